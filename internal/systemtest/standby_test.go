package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
)

// What a standby changes: it refuses to lock, commits wait for it, and it takes
// over, with or without what its primary did last.

// promote makes the standby the primary, and returns its database.
func promote(t *testing.T, standby *pgserver.Server) *pgtest.DB {
	t.Helper()
	if err := standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	return testkit.On(t, "", standby)
}

// waitsForStandby returns the backend of that application_name whose commit waits
// for a synchronous standby; 0 if none does.
func waitsForStandby(t *testing.T, db *pgtest.DB, name string) (pid int32) {
	t.Helper()
	return testkit.Query[int32](t, db, "select coalesce(max(pid), 0) from pg_stat_activity where application_name = $1 and wait_event = 'SyncRep'", name)
}

// commitsWaitFor makes commits wait for the standbys of that name. None of them
// may be answering: it returns when the server has taken it in, so that a commit
// of somebody else does wait.
func commitsWaitFor(t *testing.T, db *pgtest.DB, name string) {
	t.Helper()
	db.Exec(t, "alter system set synchronous_standby_names = '"+name+"'")
	db.Exec(t, "select pg_reload_conf()")
	probe := db.Connect(t)
	if _, err := probe.Exec(t.Context(), "set application_name = 'probe'"); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var probing sync.WaitGroup
	defer probing.Wait()
	defer stop()
	probing.Go(func() {
		for ctx.Err() == nil {
			_, _ = probe.Exec(ctx, "set synchronous_commit = on; select pg_logical_emit_message(true, 'probe', '')")
		}
	})
	pgtest.Until(t, "commits wait for a standby", func() bool { return waitsForStandby(t, db, "probe") != 0 })
}

// synchronous starts a primary and a standby that every commit waits for.
func synchronous(t *testing.T) (primary, standby *pgserver.Server, db *pgtest.DB) {
	t.Helper()
	primary, db = privateServer(t, nil)
	standby = pgtest.Standby(t, primary, pgserver.Config{})
	if err := standby.Freeze(); err != nil {
		t.Fatal(err)
	}
	commitsWaitFor(t, db, "*")
	if err := standby.Thaw(); err != nil {
		t.Fatal(err)
	}
	return primary, standby, db
}

// wantReadOnly checks the error of a call on a standby: it says what is wrong and
// what to do, and is nothing that a program would wait or give up for.
func wantReadOnly(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, pgxlock.ErrReadOnly) || errors.Is(err, pgxlock.ErrNotAcquired) || errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("%s: %v, want ErrReadOnly", what, err)
		return
	}
	wantOneLine(t, err, "standby", "connect to the primary")
}

// wantFenced checks what the server says to a transaction that fences the lock;
// the Lock itself, which may know better, is not asked.
func wantFenced(t *testing.T, db *pgtest.DB, lock *pgxlock.Lock, want string) {
	t.Helper()
	_, err := db.Pool.Exec(t.Context(), "select assert_lock_held($1, $2, $3, true)", lock.Key(), lock.Holder(), lock.Token())
	state := ""
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		state = pgErr.Code
	}
	if state != want {
		t.Errorf("a fence of %s with token %d: %v, want SQLSTATE %q", lock.Key(), lock.Token(), err, want)
	}
}

// untilLost renews until the server, which may be just coming up, has said that
// the lock is lost.
func untilLost(t *testing.T, lock *pgxlock.Lock) {
	t.Helper()
	pgtest.Until(t, lock.Key()+" is lost", func() bool {
		err := lock.Renew(t.Context())
		if err == nil {
			t.Fatalf("%s was renewed where it is not held", lock.Key())
		}
		return errors.Is(err, pgxlock.ErrLost)
	})
}

func TestStandbyLocksNothing(t *testing.T) {
	t.Parallel()
	server, primary := privateServer(t, nil)
	held := testkit.Acquire(t, testkit.NewLocker(t, primary, nil), "held")
	replica := pgtest.Standby(t, server, pgserver.Config{})
	standby := testkit.Roomy(t, testkit.On(t, "", replica), 40)
	pgtest.Until(t, "the standby knows the lease", func() bool { return len(testkit.Rows(t, standby)) == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // nothing waits for it
	defer cancel()
	locks, elsewhere := testkit.NewLocker(t, standby, nil), testkit.NewLocker(t, primary, nil)
	neverRun := func(context.Context, *pgxlock.Lock) error {
		t.Error("the work was done")
		return nil
	}
	neverWrite := func(context.Context, pgx.Tx, *pgxlock.Lock) error { return neverRun(nil, nil) }

	for name, call := range map[string]func(key string) error{
		"Acquire":          func(key string) error { _, err := locks.Acquire(ctx, key); return err },
		"Acquire, MaxWait": func(key string) error { _, err := locks.Acquire(ctx, key, testkit.LongWait); return err },
		"TryAcquire":       func(key string) error { _, err := locks.TryAcquire(ctx, key); return err },
		"AcquireAll":       func(key string) error { _, err := locks.AcquireAll(ctx, []string{"a", key}); return err },
		"Do":               func(key string) error { return locks.Do(ctx, key, neverRun) },
		"TryDo": func(key string) error {
			ran, err := locks.TryDo(ctx, key, neverRun)
			if ran {
				t.Error("TryDo says that it ran")
			}
			return err
		},
		"DoTx":                    func(key string) error { return locks.DoTx(ctx, standby.Pool, key, neverWrite) },
		"DoTx of another's lease": func(string) error { return elsewhere.DoTx(ctx, standby.Pool, "free", neverWrite) },
		"Holders":                 func(key string) error { _, err := locks.Holders(ctx, key); return err },
		"a semaphore":             func(key string) error { _, err := testkit.Semaphore(t, locks, 1).Acquire(ctx, key); return err },
		"AskToStepDown":           func(key string) error { return locks.AskToStepDown(ctx, key) },
		"PurgeClaims":             func(string) error { _, err := pgxlock.PurgeClaims(ctx, standby.Pool, 0); return err },
		"Fence":                   func(string) error { return held.Fence(ctx, testkit.Begin(t, standby, pgx.TxOptions{})) },
		"ClaimTx": func(key string) error {
			first, err := pgxlock.ClaimTx(ctx, testkit.Begin(t, standby, pgx.TxOptions{}), key)
			if first {
				t.Error("a claim was granted")
			}
			return err
		},
	} {
		for _, key := range []string{"free", "held"} {
			wantReadOnly(t, name+" of what is "+key, call(key))
		}
	}

	// These leave the transaction as it was.
	for _, level := range []pgx.TxIsoLevel{"", pgx.RepeatableRead} {
		for _, w := range []way{byLockTx, byLockAllTx, byLockSQLTx} {
			x := w.beginTx(t, standby, level)
			before := x.state()
			for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}, {pgxlock.Shared, testkit.LongWait}, {pgxlock.AllowStaleSnapshot(true)}} {
				wantReadOnly(t, fmt.Sprint(w, level, opts), x.lock(ctx, "k", opts...))
			}
			wantChanged(t, before, x.state())
			x.commit()
		}
		tx := testkit.Begin(t, standby, pgx.TxOptions{IsoLevel: level})
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}} {
			wantReadOnly(t, fmt.Sprint("LockAllTx", level, opts), pgxlock.LockAllTx(ctx, tx, []string{"a", "b"}, opts...))
		}
		usable(t, tx)
	}

	for _, isolation := range []string{"serializable", "repeatable read", "read committed"} {
		t.Run(isolation, func(t *testing.T) {
			seenOnAStandby(t, testkit.On(t, "default_transaction_isolation='"+isolation+"'", replica), held)
		})
	}

	untilOnlyHeld(t, primary, held)
	if err := held.Err(); err != nil {
		t.Errorf("what was asked of the standby cost the holder its lease: %v", err)
	}
	if n := testkit.AdvisoryCount(t, primary); n != 0 {
		t.Errorf("%d advisory locks on the primary", n)
	}
}

// seenOnAStandby checks that all who ask a standby learn what it is, whatever isolation the role's
// transactions begin with, and that a Monitor shows the lease and says what it cannot see.
func seenOnAStandby(t *testing.T, standby *pgtest.DB, held *pgxlock.Lock) {
	t.Helper()
	ctx := t.Context()
	_, err := testkit.NewLocker(t, standby, nil).TryAcquire(ctx, "free")
	wantReadOnly(t, "a lease", err)
	_, err = testkit.NewAdvisory(t, standby, nil).TryAcquire(ctx, "free")
	wantReadOnly(t, "an advisory lock", err)
	findings, err := doctor.Check(ctx, standby.Pool, nil)
	if err != nil || len(findings) != 1 || findings[0].Check != "primary" || findings[0].Status != doctor.StatusError {
		t.Errorf("the doctor: %+v, %v", findings, err)
	}

	mon := testkit.NewMonitor(t, standby, nil)
	shot := testkit.Snapshot(t, mon)
	if found := testkit.HoldersOf(shot, held.Key()); len(found) != 1 || found[0].ID != held.Holder() {
		t.Errorf("the snapshot has %+v", shot.Holders)
	}
	if shot.Unread.Leases != nil {
		t.Errorf("leases: %v", shot.Unread.Leases)
	}
	wantReadOnly(t, "advisory locks of the snapshot", shot.Unread.Advisory)
	wantReadOnly(t, "queues of the snapshot", shot.Unread.Queues)
	if found, err := mon.Holders(ctx, monitor.Filter{Kind: pgxlock.KindLease}); err != nil || len(found) != 1 {
		t.Errorf("leases: %+v, %v", found, err)
	}
	for _, kind := range []pgxlock.Kind{0, pgxlock.KindAdvisory} {
		found, err := mon.Holders(ctx, monitor.Filter{Kind: kind})
		wantReadOnly(t, fmt.Sprintf("holders of kind %d", kind), err)
		if kind == 0 && len(found) != 1 {
			t.Errorf("holders that were read: %+v", found)
		}
	}
	for _, kind := range []pgxlock.Kind{0, pgxlock.KindLease, pgxlock.KindAdvisory} {
		_, err := mon.Waiters(ctx, monitor.Filter{Kind: kind})
		wantReadOnly(t, fmt.Sprintf("waiters of kind %d", kind), err)
	}
	if _, err := mon.Session(ctx, 0); !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("a session: %v", err)
	}
	if _, err := migrations.Version(ctx, standby.Pool, nil); err != nil {
		t.Errorf("the version: %v", err)
	}
}

// Names, tokens and tickets are in unlogged tables, which a standby cannot read. The views show
// what is known without them.
func TestStandbyShowsHoldersAndWaiters(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, primary := privateServer(t, nil)
	locks, others := testkit.NewLocker(t, primary, nil), testkit.NewLocker(t, primary, nil)
	lease, share := testkit.Acquire(t, locks, "lease"), testkit.Acquire(t, locks, "share", pgxlock.Shared)
	testkit.Acquire(t, locks, "evicted")
	next := testkit.Waits(t, others, "lease", testkit.LongWait)
	testkit.UntilQueued(t, primary, "lease", 1)
	testkit.Acquire(t, testkit.NewAdvisory(t, primary, &pgxlock.AdvisoryConfig{Tokens: true}), "on the primary")
	evict(t, testkit.NewMonitor(t, primary, nil), holder(t, testkit.NewMonitor(t, primary, nil), "evicted"))
	standby := testkit.On(t, "", pgtest.Standby(t, server, pgserver.Config{}))
	pgtest.Until(t, "the standby knows the leases", func() bool {
		return testkit.Query[bool](t, standby, "select exists (select from pgxlock_evictions)")
	})
	has, pid := testkit.Backend(t, standby)
	testkit.ExecOn(t, has, "select pg_advisory_lock(7)")
	wants, waiting := testkit.Backend(t, standby)
	ended := make(chan error, 1)
	go func() {
		_, err := wants.PgConn().Exec(t.Context(), "select pg_advisory_lock_shared(7)").ReadAll()
		ended <- err
	}()
	pgtest.Until(t, "it waits", func() bool { return testkit.Query[bool](t, standby, "select exists (select from lock_waiters)") })

	const show = "select string_agg(concat_ws(' ', kind, lock_name, mode, holder_id, fencing_token, pid), ', ' order by kind, lock_name) from lock_holders"
	want := fmt.Sprintf("advisory #7 exclusive %d %[1]d, lease lease exclusive %s %d, lease share shared %s %d", pid, lease.Holder(), lease.Token(), share.Holder(), share.Token())
	if got := testkit.Query[string](t, standby, show); got != want {
		t.Errorf("the holders are %s, want %s", got, want)
	}
	want = fmt.Sprintf("advisory #7 shared %d {%d} {%[2]d}", waiting, pid)
	if got := testkit.Query[string](t, standby, "select string_agg(concat_ws(' ', kind, lock_name, mode, pid, blocked_by, held_by), ', ') from lock_waiters"); got != want {
		t.Errorf("the waiters are %s, want %s", got, want)
	}

	// So does the Monitor, which says what it cannot see.
	shot := testkit.Snapshot(t, testkit.NewMonitor(t, standby, nil))
	if len(shot.Holders) != 3 || len(shot.Waiters) != 1 || len(shot.Expired) != 1 || shot.Expired[0].EvictionReason != "this node is drained" {
		t.Errorf("%+v", shot)
	}
	if len(shot.Missing) != 3 || !strings.HasPrefix(shot.Missing[0], "names behind") || !strings.HasPrefix(shot.Missing[1], "advisory locks of the primary") || !strings.HasPrefix(shot.Missing[2], "the queues") {
		t.Errorf("missing: %q", shot.Missing)
	}

	testkit.ExecOn(t, has, "select pg_advisory_unlock_all()")
	if err := <-ended; err != nil {
		t.Error(err)
	}
	testkit.Release(t, lease)
	testkit.Release(t, <-next)
}

// Whatever the pool is for, the Locker goes to the primary.
func TestOfSeveralHostsTheLockerTakesThePrimary(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	primary, db := privateServer(t, nil)
	standby := pgtest.Standby(t, primary, pgserver.Config{})
	for _, attrs := range []string{"any", "read-write", "primary", "prefer-standby"} {
		several := testkit.On(t, "target_session_attrs="+attrs, standby, primary)
		useLock(t, testkit.NewLocker(t, several, nil), db.Pool, attrs)
		if held, err := testkit.NewLocker(t, several, nil).Holders(t.Context(), attrs); err != nil || len(held) != 0 {
			t.Errorf("%s: Holders: %v, %v", attrs, held, err)
		}
	}
	for _, attrs := range []string{"standby", "read-only"} {
		_, err := testkit.NewLocker(t, testkit.On(t, "target_session_attrs="+attrs, standby, primary), nil).Acquire(t.Context(), "k")
		wantReadOnly(t, attrs, err)
	}
	untilOnlyHeld(t, db)
}

// The server is a standby for a while, as in a switch-over. Nobody is told that
// the lease is lost, and who waits or releases goes on afterwards.
func TestDemotedPrimaryCostsNoLease(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	asked := make(chan struct{}, 1)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: 5 * time.Minute}) // longer than servers take to start
	others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Backoff: func(int) time.Duration {
		select {
		case asked <- struct{}{}:
		default:
		}
		return 20 * time.Millisecond
	}})
	lock := testkit.Acquire(t, locks, "k")
	if err := lock.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() {
		next, err := others.Acquire(t.Context(), "k")
		if err == nil && next.Token() <= lock.Token() {
			err = fmt.Errorf("token %d after %d", next.Token(), lock.Token())
		}
		waited <- err
	}()
	<-asked
	for try := 1; ; try++ { // a busy machine may need longer to promote it than a release is tried
		given := testkit.Acquire(t, locks, fmt.Sprint("given", try))
		if err := server.Demote(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantReadOnly(t, "Renew", lock.Renew(t.Context()))
		_, err := locks.TryAcquire(t.Context(), "other")
		wantReadOnly(t, "TryAcquire", err)
		released := make(chan error, 1)
		go func() { released <- given.Release(t.Context()) }()
		pgtest.Until(t, "the release has begun", func() bool { return given.Err() != nil })
		for len(asked) > 0 {
			<-asked
		}
		for range 3 { // the waiter and the release ask, and are refused
			select {
			case <-asked:
			case err := <-waited:
				t.Fatalf("the waiter: %v", err)
			}
		}
		promote(t, server)
		err = <-released
		if err == nil {
			break
		}
		if errors.Is(err, pgxlock.ErrLost) || try == 5 {
			t.Fatalf("Release: %v", err)
		}
	}
	pgtest.Until(t, "it is renewed again", func() bool {
		if err := lock.Err(); err != nil {
			t.Fatal(err)
		}
		return lock.Renew(t.Context()) == nil
	})
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-waited; err != nil {
		t.Errorf("the waiter: %v", err)
	}
}

func TestLeaseSurvivesAFailoverToASynchronousStandby(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, end := range map[string]func(*pgserver.Server) error{
		"crash": (*pgserver.Server).Crash, "kill": (*pgserver.Server).Kill, "freeze": (*pgserver.Server).Freeze,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			primary, standby, db := synchronous(t)
			db.Exec(t, "create table written (token bigint)")
			hosts := testkit.On(t, "", primary, standby)
			locks := testkit.NewLocker(t, hosts, &pgxlock.LeaseConfig{TTL: 5 * time.Minute, Renew: 300 * time.Millisecond})
			others := testkit.NewLocker(t, hosts, nil)
			lock, lapsed := testkit.Acquire(t, locks, "k"), testkit.Acquire(t, others, "lapsed", pgxlock.TTL(time.Hour))
			if _, err := others.TryAcquire(t.Context(), "k"); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("before the failover, somebody else: %v", err)
			}
			if err := end(primary); err != nil {
				t.Fatal(err)
			}
			db = promote(t, standby)
			// A frozen server takes each connection some seconds to give up: all at once.
			var moving sync.WaitGroup
			for _, locks := range []*pgxlock.Locker{locks, others} {
				moving.Go(func() { _, _ = locks.Holders(t.Context(), "k") })
			}
			for _, lock := range []*pgxlock.Lock{lock, lapsed} {
				moving.Go(func() { _ = lock.Renew(t.Context()) })
			}
			moving.Wait()

			untilOnlyHeld(t, db, lock, lapsed)
			untilRenewed(t, db, lock, 2)
			_, err := others.TryAcquire(t.Context(), "k")
			if e, ok := errors.AsType[*pgxlock.Error](err); !ok || !errors.Is(err, pgxlock.ErrNotAcquired) || e.Holder != lock.Holder() {
				t.Errorf("somebody else, after the failover: %v", err)
			}
			err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
				if err := lock.Fence(t.Context(), tx); err != nil {
					return err
				}
				_, err := tx.Exec(t.Context(), "insert into written values ($1)", lock.Token())
				return err
			})
			if err != nil {
				t.Errorf("the holder's fenced write: %v", err)
			}

			// From its expiry on somebody else gets it, and the old holder nothing.
			db.Exec(t, "update distributed_locks set expires_at = clock_timestamp() where lock_name = 'lapsed'")
			next := testkit.Acquire(t, others, "lapsed")
			if next.Token() <= max(lock.Token(), lapsed.Token()) {
				t.Errorf("token %d after %d and %d", next.Token(), lock.Token(), lapsed.Token())
			}
			wantFenced(t, db, lapsed, "LK001")
			untilLost(t, lapsed)
			wantFenced(t, db, next, "")
			if err := errors.Join(lock.Err(), lock.Release(t.Context()), next.Release(t.Context())); err != nil {
				t.Error(err)
			}
			untilOnlyHeld(t, db)
			if name == "freeze" {
				grantsNothingAlone(t, primary)
			}
		})
	}
}

// grantsNothingAlone checks that a primary which comes back after its synchronous
// standby was promoted waits with what it would grant.
func grantsNothingAlone(t *testing.T, primary *pgserver.Server) {
	t.Helper()
	if err := primary.Thaw(); err != nil {
		t.Fatal(err)
	}
	old := testkit.On(t, "application_name=old", primary)
	ctx, giveUp := context.WithCancel(t.Context())
	granted := make(chan error, 1)
	go func() {
		_, err := old.Pool.Exec(ctx, "select acquire_lock('alone', 'A')")
		granted <- err
	}()
	pgtest.Until(t, "a grant waits for the standby that has left", func() bool { return waitsForStandby(t, old, "old") != 0 })
	giveUp()
	if err := <-granted; !errors.Is(err, context.Canceled) {
		t.Errorf("granted by a primary that is alone: %v", err)
	}
}

// stalled is a server whose commits wait for a standby that is frozen now.
type stalled struct {
	standby       *pgserver.Server
	db            *pgtest.DB
	locks, others *pgxlock.Locker
}

// stalledBy is the owner of the Locker whose commits are interrupted.
const stalledBy = "stalled"

// freeze lets commits wait, at the longest until the test is over.
func (s *stalled) freeze(t *testing.T) {
	t.Helper()
	t.Cleanup(func() { s.thaw(t) })
	if err := s.standby.Freeze(); err != nil {
		t.Fatal(err)
	}
}

// thaw lets them go on.
func (s *stalled) thaw(t *testing.T) {
	t.Helper()
	if err := s.standby.Thaw(); err != nil {
		t.Fatal(err)
	}
}

// untilStalled waits until a commit of that owner waits.
func (s *stalled) untilStalled(t *testing.T, owner string) {
	t.Helper()
	pgtest.Until(t, owner+" waits for the standby", func() bool { return waitsForStandby(t, s.db, "pgxlock "+owner) != 0 })
}

// interrupt ends the wait of a commit, by that function of the server's.
func (s *stalled) interrupt(t *testing.T, function string) {
	t.Helper()
	pgtest.Until(t, "the wait was interrupted", func() bool {
		return testkit.Query[bool](t, s.db, "select coalesce(bool_or("+function+`(pid)), false) from pg_stat_activity
			where wait_event = 'SyncRep' and application_name = 'pgxlock ' || $1`, stalledBy)
	})
}

// acquired is what became of an Acquire.
type acquired struct {
	lock *pgxlock.Lock
	err  error
}

// acquireLater acquires in another goroutine.
func acquireLater(ctx context.Context, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) <-chan acquired {
	result := make(chan acquired, 1)
	go func() {
		lock, err := locks.Acquire(ctx, key, opts...)
		result <- acquired{lock, err}
	}()
	return result
}

// nobodyElse checks that somebody else does not get the key.
func (s *stalled) nobodyElse(t *testing.T, key string) {
	t.Helper()
	if _, err := s.others.TryAcquire(t.Context(), key); err == nil {
		t.Errorf("%s was granted to a second one", key)
	}
}

// A commit that was not waited for is there on this server, and perhaps not on the
// one that is promoted next: the outcome of what it did is unknown. The three ways
// in which the wait ends early are an operator's, a restart's and the caller's.
func TestCommitThatTheStandbyDidNotConfirmIsOfUnknownOutcome(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, standby, db := synchronous(t)
	// The Locker's own way of committing is not that of the pool.
	db = &pgtest.DB{URL: db.URL, Name: db.Name, Pool: db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["synchronous_commit"] = "local" })}
	s := &stalled{
		standby: standby, db: db,
		locks:  testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Owner: stalledBy}),
		others: testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Owner: "others"}),
	}
	replica := testkit.On(t, "", standby)
	const cancel, terminate = "pg_cancel_backend", "pg_terminate_backend"

	// confirmed waits for the next holder, whose lease has to be on the standby.
	confirmed := func(t *testing.T, waiting <-chan acquired, before int64) {
		t.Helper()
		next := <-waiting
		if next.err != nil {
			t.Fatal(next.err)
		}
		if next.lock.Token() <= before {
			t.Errorf("token %d after %d", next.lock.Token(), before)
		}
		untilOnlyHeld(t, db, next.lock)
		untilOnlyHeld(t, replica, next.lock)
		if err := next.lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		untilOnlyHeld(t, db)
	}

	// What one of them leaves behind would only be found again by the next ones.
	run := func(name string, test func(t *testing.T)) {
		if !t.Run(name, test) {
			t.FailNow()
		}
	}

	for _, how := range []string{cancel, terminate, "the context ends"} {
		run("an acquire, "+how, func(t *testing.T) {
			first := testkit.Acquire(t, s.locks, t.Name())
			if err := first.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			s.freeze(t)
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			asked := acquireLater(ctx, s.locks, t.Name())
			s.untilStalled(t, stalledBy)
			s.nobodyElse(t, t.Name())
			if len(asked) > 0 {
				t.Fatalf("before the standby had it: %v", (<-asked).err)
			}
			switch how {
			case cancel, terminate:
				s.interrupt(t, how)
			default:
				giveUp()
			}
			s.nobodyElse(t, t.Name())

			if how == terminate { // asked again, under the same holder id
				s.untilStalled(t, stalledBy)
				if len(asked) > 0 {
					t.Fatalf("before the standby had it: %v", (<-asked).err)
				}
				s.thaw(t)
				confirmed(t, asked, first.Token())
				return
			}
			got := <-asked
			if got.lock != nil || got.err == nil || errors.Is(got.err, pgxlock.ErrNotAcquired) {
				t.Fatalf("granted: %t, %v; want an error that is not ErrNotAcquired", got.lock != nil, got.err)
			}
			if how == cancel {
				wantOneLine(t, got.err, "synchronous standby")
			} else if !errors.Is(got.err, context.Canceled) {
				t.Errorf("%v, want context.Canceled", got.err)
			}
			waiting := acquireLater(t.Context(), s.others, t.Name(), testkit.LongWait)
			s.thaw(t)
			confirmed(t, waiting, first.Token())
		})
	}

	for _, how := range []string{cancel, terminate} {
		run("a release, "+how, func(t *testing.T) {
			lock := testkit.Acquire(t, s.locks, t.Name())
			s.freeze(t)
			released := make(chan error, 1)
			go func() { released <- lock.Release(t.Context()) }()
			s.untilStalled(t, stalledBy)
			s.nobodyElse(t, t.Name())
			if len(released) > 0 {
				t.Fatalf("released before the standby had it: %v", <-released)
			}
			s.interrupt(t, how)
			if err := <-released; err != nil { // it was held until then
				t.Errorf("Release: %v", err)
			}
			// To this server it is free. To be granted it has to be free on the standby.
			waiting := acquireLater(t.Context(), s.others, t.Name(), testkit.LongWait)
			s.untilStalled(t, "others")
			if len(waiting) > 0 {
				t.Errorf("before the standby had it: %v", (<-waiting).err)
			}
			s.thaw(t)
			confirmed(t, waiting, lock.Token())
		})
	}

	for _, how := range []string{cancel, terminate, "the context ends"} {
		run("a renewal, "+how, func(t *testing.T) {
			lock := testkit.Acquire(t, s.locks, t.Name())
			s.freeze(t)
			asked := time.Now()
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			renewed := make(chan error, 1)
			go func() { renewed <- lock.Renew(ctx) }()
			s.untilStalled(t, stalledBy)
			if len(renewed) > 0 {
				t.Fatalf("renewed before the standby had it: %v", <-renewed)
			}
			believed := func() bool { // for a TTL from this renewal, less the margin
				until, _ := lock.Deadline()
				return !until.Before(asked.Add(time.Hour - time.Hour/10))
			}
			switch how {
			case cancel:
				s.interrupt(t, how)
				if err := <-renewed; err == nil || errors.Is(err, pgxlock.ErrLost) {
					t.Errorf("Renew: %v, want an error that is not ErrLost", err)
				}
			case terminate:
				s.interrupt(t, how)
				s.untilStalled(t, stalledBy) // again
				if len(renewed) > 0 {
					t.Fatalf("renewed before the standby had it: %v", <-renewed)
				}
			default:
				giveUp()
				if err := <-renewed; !errors.Is(err, context.Canceled) {
					t.Errorf("Renew: %v, want context.Canceled", err)
				}
			}
			if believed() {
				t.Error("the deadline moved with a renewal that may not survive a failover")
			}
			s.nobodyElse(t, t.Name())
			s.thaw(t)
			pgtest.Until(t, "it is renewed", func() bool { return believed() })
			if err := errors.Join(lock.Err(), lock.Release(t.Context())); err != nil {
				t.Error(err)
			}
			untilOnlyHeld(t, db)
		})
	}
}

// The standby has not received what the primary did last when it becomes the
// primary; and once more. What is lost can be granted again, and then nothing of
// the old holder's counts.
func TestFailoverThatLosesCommitsRepeatsNoTokenAndTellsTheHolders(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	primary, db := privateServer(t, nil)
	for name, end := range map[string]func(*pgserver.Server) error{"kill": (*pgserver.Server).Kill, "crash": (*pgserver.Server).Crash} {
		standby := pgtest.Standby(t, primary, pgserver.Config{})
		hosts := testkit.On(t, "", primary, standby)
		cfg := &pgxlock.LeaseConfig{TTL: time.Hour}
		locks, before := testkit.NewLocker(t, hosts, cfg), testkit.NewLocker(t, db, cfg)
		kept, moves := testkit.Acquire(t, locks, "kept"), testkit.Acquire(t, before, "moved")
		replica := testkit.On(t, "", standby)
		pgtest.Until(t, "the standby has the first leases", func() bool { return len(testkit.Rows(t, replica)) == 2 })

		if err := standby.Detach(t.Context()); err != nil {
			t.Fatal(err)
		}
		var highest int64
		for range 3 {
			round := pgxlock.Locks(testkit.AcquireMany(t, locks, 50))
			for _, lock := range round {
				highest = max(highest, lock.Token())
			}
			if err := round.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := moves.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		moved, taken, gone, fenced := testkit.Acquire(t, locks, "moved"), testkit.Acquire(t, locks, "taken"), testkit.Acquire(t, locks, "gone"), testkit.Acquire(t, locks, "fenced")
		highest = max(highest, moved.Token(), taken.Token(), gone.Token(), fenced.Token())
		if err := end(primary); err != nil {
			t.Fatal(err)
		}
		primary, db = standby, promote(t, standby)

		others := testkit.NewLocker(t, db, cfg)
		for _, key := range []string{"taken", "never seen", "key:7"} {
			next := testkit.Acquire(t, others, key)
			if next.Token() <= highest {
				t.Errorf("after a %s, %s: token %d after %d", name, key, next.Token(), highest)
			}
			highest = next.Token()
		}
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return fenced.Fence(t.Context(), tx) })
		if !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("the fence of a lease that is gone: %v, want ErrLost", err)
		}
		pgtest.Until(t, "the holder whose fence failed knows", func() bool { return fenced.Err() != nil })
		for _, lock := range []*pgxlock.Lock{moved, taken, gone} {
			wantFenced(t, db, lock, "LK001")
			untilLost(t, lock)
			if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
				t.Errorf("Release of %s: %v, want ErrLost", lock.Key(), err)
			}
		}
		if got := testkit.Rows(t, db); got["moved"] != moves.Holder() || got["taken"] == taken.Holder() || got["gone"] != "" || len(got) != 5 {
			t.Errorf("held after a %s: %v", name, got)
		}

		// What was replicated is held as before.
		wantFenced(t, db, kept, "")
		if _, err := others.TryAcquire(t.Context(), "kept"); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("somebody else: %v", err)
		}
		if err := errors.Join(kept.Renew(t.Context()), kept.Release(t.Context())); err != nil {
			t.Errorf("after a %s, the lease that was replicated: %v", name, err)
		}
		if err := others.Close(t.Context()); err != nil {
			t.Error(err)
		}
		db.Exec(t, "delete from distributed_locks") // what the standby still has of others
	}
}

// There are two primaries then, and nothing in the old one can know. What the
// tokens and the fence promise holds all the same.
func TestOldPrimaryThatIsStartedAgainHandsOutOlderTokens(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	old, db := privateServer(t, nil)
	standby := pgtest.Standby(t, old, pgserver.Config{})
	hosts := testkit.On(t, "", old, standby)
	locks := testkit.NewLocker(t, hosts, &pgxlock.LeaseConfig{Owner: "loyal", TTL: time.Hour})
	lock := testkit.Acquire(t, locks, "k")
	replica := testkit.On(t, "", standby)
	pgtest.Until(t, "the standby has the lease", func() bool { return len(testkit.Rows(t, replica)) == 1 })
	if err := old.Kill(); err != nil {
		t.Fatal(err)
	}
	promoted := promote(t, standby)
	pgtest.Until(t, "the holder is on the new primary", func() bool { return lock.Renew(t.Context()) == nil })
	first := testkit.Acquire(t, testkit.NewLocker(t, promoted, nil), "first")

	if err := old.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	db.Pool.Reset()
	astray := testkit.NewLocker(t, db, nil)
	if _, err := astray.TryAcquire(t.Context(), "k"); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("the old primary has the lease, too: %v", err)
	}
	db.Exec(t, "delete from distributed_locks")
	for range 100 {
		late := testkit.Acquire(t, astray, "k")
		if late.Token() >= first.Token() || late.Token() <= lock.Token() {
			t.Fatalf("token %d of the old primary, after %d, and %d of the new one", late.Token(), lock.Token(), first.Token())
		}
		wantFenced(t, promoted, late, "LK001")
		if err := late.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// A Locker that has used the new one stays there, though the old one is the first of its hosts.
	testkit.Terminate(t, promoted, "loyal")
	expires := expiry(t, promoted, "k")
	if err := errors.Join(lock.Renew(t.Context()), lock.Err()); err != nil || !expiry(t, promoted, "k").After(expires) {
		t.Errorf("the holder: %v", err)
	}
	wantFenced(t, promoted, lock, "")
}
