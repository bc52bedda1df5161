package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

// The acts of the demonstration. Each shows something, and then judges what the
// database has on record, not what was printed.

const turnsEach = 3

// victimTTL is the TTL of those that will be killed or frozen, on a machine on which a turn takes so
// long: before that they must have had the time to renew.
func victimTTL(turn time.Duration) time.Duration {
	return min(max(2*time.Second, (30*turn).Round(time.Second)), time.Minute)
}

// longTTL is that of those that stay.
func (d *demo) longTTL() time.Duration { return 15 * d.victimTTL }

// The names that are locked.
const (
	sectionKey  = "stock:update"
	dailyKey    = "cron:daily-report"
	importKey   = "import:csv"
	invoiceKey  = "invoice:42"
	nightlyKey  = "nightly-report"
	nightlyUser = "psql"
)

// What the SQL caller sends.
const (
	acquireSQL = "SELECT acquire_lock('" + nightlyKey + "', '" + nightlyUser + "', 30)"
	releaseSQL = "SELECT release_lock('" + nightlyKey + "', '" + nightlyUser + "')"
)

// compete lets all workers go through one critical section.
func (d *demo) compete(ctx context.Context) error {
	d.section("1. Four processes compete for one lease")
	for _, w := range d.team.workers {
		if err := w.tell(order{Do: doTurns, Key: sectionKey, Turns: turnsEach}); err != nil {
			return err
		}
	}
	for working := len(d.team.workers); working > 0; {
		r, err := d.team.next(ctx)
		if err == nil {
			err = r.failure()
		}
		if err != nil {
			return err
		}
		if r.Token == 0 {
			working--
			continue
		}
		d.victimTTL = max(d.victimTTL, victimTTL(r.Inside))
		d.act(r.Worker, "token %d  waited %7s  inside %5s", r.Token, brief(r.Waited), brief(r.Inside))
	}
	rows, _ := d.pool.Query(ctx, "SELECT worker, token, inside, entered_at, left_at FROM turns ORDER BY entered_at") // CollectRows returns the error
	turns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[turn])
	if err != nil {
		return err
	}
	return errors.Join(
		d.claim("no two processes were in the critical section at once", checkExclusive(turns, turnsEach*len(d.team.workers))),
		d.claim("each turn had a greater fencing token than the one before", checkGrowing(turns)))
}

// crash kills a holder while another worker waits.
func (d *demo) crash(ctx context.Context) error {
	d.section("2. A holder is killed with SIGKILL")
	victim, heir := d.team.workers[0], d.team.workers[1]
	first, err := d.team.must(ctx, victim, order{Do: doTake, Key: dailyKey, TTL: d.victimTTL})
	if err != nil {
		return err
	}
	d.act(victim.name, "holds %s, token %d, TTL %s", dailyKey, first.Token, d.victimTTL)
	second, err := d.team.must(ctx, victim, order{Do: doTake, Key: importKey, TTL: d.victimTTL, Metadata: "part 3 of 8"})
	if err != nil {
		return err
	}
	d.act(victim.name, "holds %s as well", importKey)
	if err := heir.tell(order{Do: doTake, Key: dailyKey, TTL: d.longTTL(), Metadata: "second attempt"}); err != nil {
		return err
	}
	d.act(heir.name, "waits for %s", dailyKey)

	last, left, err := d.renewal(ctx, dailyKey)
	if err != nil {
		return err
	}
	d.act(victim.name, "has renewed it: the lease lasts for another %s", brief(left))
	victim.kill()
	killed := time.Now()
	d.act(victim.name, "is killed, and releases nothing")
	_, now, err := d.lease(ctx, dailyKey)
	if err != nil {
		return err
	}
	if now.Token == last.Token {
		last = now // renewed once more
	}
	r, err := d.team.answer(ctx, heir, doTake)
	if err == nil {
		err = r.failure()
	}
	if err != nil {
		return err
	}
	d.act(heir.name, "has it, %s after the kill, token %d", brief(time.Since(killed)), r.Token)
	_, next, err := d.lease(ctx, dailyKey)
	if err != nil {
		return err
	}
	d.held = append(d.held, held{dailyKey, pgxlock.StateLive, r.Holder, r.Token}, held{importKey, pgxlock.StateExpired, second.Holder, second.Token})
	return errors.Join(
		d.claim("the dead holder's lease was taken over when it had expired, not before", checkTakeover(last, next)),
		d.claim("the new holder's token is greater than the dead one's", errors.Join(checkGreater(first.Token, r.Token), checkGreater(first.Token, next.Token))))
}

// freeze stops a holder for longer than its TTL, and lets it go on with what it
// was about to do.
func (d *demo) freeze(ctx context.Context) error {
	d.section("3. A holder freezes, and comes back too late")
	zombie, heir := d.team.workers[2], d.team.workers[3]
	mine, err := d.team.must(ctx, zombie, order{Do: doTake, Key: invoiceKey, TTL: d.victimTTL})
	if err != nil {
		return err
	}
	if _, err := d.team.must(ctx, zombie, order{Do: doWrite, Key: invoiceKey}); err != nil {
		return err
	}
	d.act(zombie.name, "holds %s, token %d, and writes: lock.Fence(ctx, tx), INSERT, COMMIT", invoiceKey, mine.Token)
	if err := zombie.freeze(); err != nil {
		return err
	}
	frozen := time.Now()
	d.act(zombie.name, "is frozen with SIGSTOP, about to write again")
	next, err := d.team.must(ctx, heir, order{Do: doTake, Key: invoiceKey, TTL: d.longTTL()})
	if err != nil {
		return err
	}
	d.act(heir.name, "waits, and has it after %s, token %d", brief(time.Since(frozen)), next.Token)
	if _, err := d.team.must(ctx, heir, order{Do: doWrite, Key: invoiceKey}); err != nil {
		return err
	}
	d.act(heir.name, "writes: lock.Fence(ctx, tx), INSERT, COMMIT")
	d.held = append(d.held, held{invoiceKey, pgxlock.StateLive, next.Holder, next.Token})

	about := []string{doLook, doWrite, doWriteUnfenced} // what it finds to do when it wakes up
	for _, do := range about {
		if err := zombie.tell(order{Do: do, Key: invoiceKey}); err != nil {
			return err
		}
	}
	if err := zombie.thaw(); err != nil {
		return err
	}
	d.act(zombie.name, "is thawed, and does not know what happened")
	var woke [3]report
	for i, do := range about {
		if woke[i], err = d.team.answer(ctx, zombie, do); err != nil {
			return err
		}
	}
	looked, fenced, unfenced := woke[0], woke[1], woke[2]
	d.act(zombie.name, "lock.Err() says: %s", orNoError(looked.Err))
	d.act(zombie.name, "its write, with lock.Fence: %s", orNoError(fenced.Err))
	if unfenced.Err == "" {
		d.act(zombie.name, "the same write without lock.Fence would have gone through; it is rolled back")
	}
	refusal, err := d.refusal(ctx, mine)
	if err != nil {
		return err
	}
	d.act("server", "SELECT assert_lock_held(... token %d): SQLSTATE %s", mine.Token, refusal)
	rows, _ := d.pool.Query(ctx, "SELECT worker, token FROM ledger ORDER BY id") // CollectRows returns the error
	ledger, err := pgx.CollectRows(rows, pgx.RowToStructByPos[entry])
	if err != nil {
		return err
	}
	return errors.Join(
		d.claim("the late holder learned that it had lost the lock; another process holds it, with a greater token", errors.Join(checkLost(looked), checkGreater(mine.Token, next.Token))),
		d.claim("its fenced write was refused, by lock.Fence and by the server", checkRefused(fenced, refusal, unfenced)),
		d.claim("nothing that the late holder wrote is in the table",
			checkLedger(ledger, entry{zombie.name, mine.Token}, entry{heir.name, next.Token})))
}

// refusal returns the SQLSTATE with which the server refuses a late holder,
// whatever that believes itself.
func (d *demo) refusal(ctx context.Context, late report) (string, error) {
	_, err := d.pool.Exec(ctx, "SELECT assert_lock_held($1, $2, $3, true)", invoiceKey, late.Holder, late.Token)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code, nil
	}
	return "", err
}

// mix locks one name from SQL and from Go.
func (d *demo) mix(ctx context.Context) error {
	d.section("4. SQL callers and Go callers exclude each other")
	w := d.team.workers[1]
	var s sqlAndGo
	var err error
	if s.sqlAcquired, err = d.query(ctx, acquireSQL); err != nil {
		return err
	}
	if s.goTried, err = d.team.ask(ctx, w, order{Do: doTry, Key: nightlyKey, TTL: d.longTTL()}); err != nil {
		return err
	}
	d.act(w.name, "TryAcquire: %s", orNoError(s.goTried.Err))
	if s.sqlReleased, err = d.query(ctx, releaseSQL); err != nil {
		return err
	}
	if s.goTook, err = d.team.ask(ctx, w, order{Do: doTry, Key: nightlyKey, TTL: d.longTTL(), Metadata: "page 1 of 40"}); err != nil {
		return err
	}
	d.act(w.name, "TryAcquire: %s, token %d", orNoError(s.goTook.Err), s.goTook.Token)
	if s.sqlAgain, err = d.query(ctx, acquireSQL); err != nil {
		return err
	}
	d.held = append(d.held, held{nightlyKey, pgxlock.StateLive, s.goTook.Holder, s.goTook.Token})
	return d.claim("SQL kept Go out and Go kept SQL out, and Go learned who holds the lock", checkMixed(s, nightlyUser))
}

// query runs a statement that returns one boolean, and shows both.
func (d *demo) query(ctx context.Context, sql string) (yes bool, err error) {
	if err := d.pool.QueryRow(ctx, sql).Scan(&yes); err != nil {
		return false, err
	}
	d.act("SQL", "%s: %t", sql, yes)
	return yes, nil
}

// list shows what an operator sees.
func (d *demo) list(ctx context.Context) error {
	d.section("5. What an operator sees, as by: pgxlock ls")
	at, leases, err := d.leases(ctx, "")
	if err != nil {
		return err
	}
	const columns = "%-17s  %-5s  %s  %-8s  %-9s  %-35s  %-13v  %s"
	d.say("%s", d.paint(bold, fmt.Sprintf(columns, "KEY", "KIND", "STATE  ", "HELD FOR", "REMAINING", "HOLDER", "TOKEN", "NOTE")))
	for _, l := range leases {
		until, color := at, green
		if l.State != pgxlock.StateLive {
			until, color = l.Expires, yellow
		}
		d.say("%s", strings.TrimRight(fmt.Sprintf(columns, l.Key, "lease", d.paint(color, fmt.Sprintf("%-7s", l.State)),
			brief(until.Sub(l.Since)), brief(l.Expires.Sub(at)), l.ID, l.Token, l.Metadata), " "))
	}
	return d.claim("the list shows exactly what is held, and the dead worker's lease as expired", checkListed(leases, d.held))
}

// renewal returns a lease once it has been renewed, and for how much longer it lasts.
func (d *demo) renewal(ctx context.Context, name string) (pgxlock.Holder, time.Duration, error) {
	at, first, err := d.lease(ctx, name)
	for now := first; err == nil; at, now, err = d.lease(ctx, name) {
		switch {
		case now.Token != first.Token:
			return now, 0, fmt.Errorf("%s was not renewed in time: this machine is too busy for a TTL of %s", name, d.victimTTL)
		case now.Expires.After(first.Expires):
			return now, now.Expires.Sub(at), nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return pgxlock.Holder{}, 0, err
}

// lease returns a lease as it is at a moment.
func (d *demo) lease(ctx context.Context, name string) (time.Time, pgxlock.Holder, error) {
	at, leases, err := d.leases(ctx, name)
	if err == nil && len(leases) != 1 {
		err = fmt.Errorf("%d leases begin with %s", len(leases), name)
	}
	if err != nil {
		return time.Time{}, pgxlock.Holder{}, err
	}
	return at, leases[0], nil
}

// leases returns the leases whose keys begin with prefix, by key, and when they were read.
func (d *demo) leases(ctx context.Context, prefix string) (time.Time, []pgxlock.Holder, error) {
	locks, err := monitor.New(d.pool, nil)
	if err != nil {
		return time.Time{}, nil, err
	}
	shot, err := locks.Snapshot(ctx)
	leases := slices.DeleteFunc(slices.Concat(shot.Holders, shot.Expired), func(h pgxlock.Holder) bool {
		return h.Kind != pgxlock.KindLease || !strings.HasPrefix(h.Key, prefix)
	})
	slices.SortFunc(leases, func(a, b pgxlock.Holder) int { return strings.Compare(a.Key, b.Key) })
	return shot.At, leases, cmp.Or(err, shot.Unread.Leases)
}
