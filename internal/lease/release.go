package lease

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// Leases are released here: by Release, and those whose grant no caller received.

// outcome is how a release ended, the letter of release.sql or release_shared.sql in lower case.
type outcome byte

const (
	outcomeReleased outcome = 'r'
	outcomeLeft     outcome = 'l' // other holders still share the lease
	outcomeExpired  outcome = 'e'
	outcomeGone     outcome = 'g'
)

// toOutcome reads a letter, which is in upper case if others wait for the lease.
func toOutcome(letter byte) (o outcome, wanted bool) {
	const lower = 'a' - 'A'
	return outcome(letter | lower), letter&lower == 0
}

// release is one release in flight.
type release struct {
	table   *Table
	lock    *hold.Hold
	token   *int64 // nil: any token of the holder
	done    chan struct{}
	outcome outcome
	wanted  bool // others are known to wait for the lease; the release wakes them
	handed  bool // the lease is left to a caller here
	unknown bool // it was sent before, and no answer came
	err     error
	evicted error // why it is gone; nil: not known
}

func failReleases(returns []*release, err error) {
	for _, r := range returns {
		r.err = err
		close(r.done)
	}
}

// releaseAll sends a batch of releases, and answers them.
func (t *Table) releaseAll(returns []*release) {
	_ = inModes(returns, func(r *release) hold.Mode { return r.lock.Mode }, t.releaseAs, failReleases)
}

func (t *Table) releaseAs(mode hold.Mode, returns []*release) error {
	statement := byMode(mode, statements.LeaseRelease, statements.LeaseReleaseShared)
	single := len(returns) == 1 && mode == hold.Exclusive
	if single {
		statement = statements.LeaseReleaseOne
	}
	args := &t.releaseArgs
	args.Reset(single)
	dbconn.AddTexts(args, returns, func(r *release) *string { return &r.lock.Key })
	dbconn.AddTexts(args, returns, func(r *release) *string { return &r.lock.Holder })
	dbconn.AddBigints(args, returns, func(r *release) (int64, bool) { return dbconn.OrNull(r.token) })
	var a answer
	err := t.request(t.flow.waits(t.lingering), func(ctx context.Context, q dbconn.Querier, _ bool) error {
		err := q.Answer(ctx, t.place.Statement(statement), args, func(values [][]byte) error {
			if len(values) != 1 || len(values[0]) != len(returns) {
				return fmt.Errorf("%w: %d releases", dbconn.ErrForeign, len(returns))
			}
			a.letters = slices.Clone(values[0])
			return nil
		})
		t.complete(ctx, q, &a, returns, err)
		return err
	})
	if t.flow.postpones(err) {
		putBack(&t.flow, &t.flow.releases, returns)
		return nil
	}
	if err != nil {
		rest, reached := takeUnreached(&t.flow, &t.flow.releases)
		failReleases(returns, err)
		failReleases(rest, err)
		if reached {
			return nil
		}
		return err
	}
	t.flow.answered(len(returns))
	t.settleReleases(returns, a)
	return nil
}

// answer is that of the server to a batch of releases.
type answer struct {
	letters []byte
	at      time.Duration
	evicted map[*hold.Hold]error // by whom those that are gone were evicted
}

// complete completes an answer, or records that there is none because of err.
func (t *Table) complete(ctx context.Context, q dbconn.Querier, a *answer, returns []*release, err error) {
	a.at = t.host.Clock()
	var gone []*hold.Hold
	for i, letter := range a.letters {
		if o, _ := toOutcome(letter); o == outcomeGone && returns[i].token != nil {
			gone = append(gone, returns[i].lock)
		}
	}
	a.evicted = t.whyGone(ctx, q, gone)
	if err != nil && !lockerr.Refused(err) {
		for _, r := range returns {
			r.unknown = true
		}
	}
}

// settleReleases answers a batch of releases of one mode.
func (t *Table) settleReleases(returns []*release, a answer) {
	answersWanted := returns[0].lock.Mode == hold.Exclusive // the statement answers whether others wait
	var unknown, wanted []lockkey.Name
	for i, r := range returns {
		var isWanted bool
		r.outcome, isWanted = toOutcome(a.letters[i])
		r.wanted = isWanted
		permit := r.lock.Queue.Key != r.lock.Key // the answer is about this permit, not about waiters for any permit
		if !answersWanted || permit {
			r.wanted = r.lock.Waited
		}
		r.evicted = a.evicted[r.lock]
		if r.unknown && r.outcome == outcomeGone {
			r.outcome = outcomeReleased // by an earlier attempt, whose answer was lost
		}
		if r.outcome == outcomeReleased || r.outcome == outcomeExpired {
			if permit && isWanted {
				wanted = append(wanted, lockkey.Name{Key: r.lock.Key})
			}
			switch {
			case r.handed:
			case r.wanted:
				wanted = append(wanted, r.lock.Queue)
			case !answersWanted || permit:
				unknown = append(unknown, r.lock.Queue)
			}
		}
		if until, _ := r.lock.Ended(); r.outcome == outcomeGone && r.evicted == nil && a.at >= until {
			r.outcome = outcomeExpired // while the release was on its way: another caller may have had it since
		}
		close(r.done)
	}
	t.host.Queue.Wake(unknown)
	t.flow.wanted = append(t.flow.wanted, wanted...)
}

// timers keeps the memory of timers that have stopped.
var timers = sync.Pool{New: func() any { return time.NewTimer(time.Hour) }}

// sendRelease sends one release and waits for the answer, for so long.
func (t *Table) sendRelease(lock *hold.Hold, token *int64, patience time.Duration) *release {
	r := &release{table: t, lock: lock, token: token, done: make(chan struct{})}
	if !t.leave(r) {
		t.flow.release(r)
	}
	select {
	case <-r.done: // in bounded time, where there is a connection: the batch in flight, and this one
		return r
	default:
	}
	timer := timers.Get().(*time.Timer)
	defer timers.Put(timer)
	defer timer.Stop()
	timer.Reset(patience)
	select {
	case <-r.done:
		return r
	case <-timer.C: // it stays queued, and goes with the next connection
		return &release{lock: lock, token: token, err: lockerr.ErrNoAnswer}
	}
}

// releasePatience is how long a release is retried while fenced transactions are open or the
// server cannot be reached.
const releasePatience = 5 * time.Second

// Release implements [hold.Backend].
func (t *Table) Release(lock *hold.Hold) error { return t.releaseWithRetries(lock, &lock.Token, nil) }

// releaseWithRetries releases, and retries while that may help. left, unless nil, is over with the first
// answer.
func (t *Table) releaseWithRetries(lock *hold.Hold, token *int64, left *leftover) error {
	var r *release
	defer func() {
		if r.handed {
			t.forget(lock)
			return
		}
		// The lock may have been released before the waiters here had a ticket.
		if queued := t.over(lock, r.outcome); queued && !r.wanted {
			t.host.Queue.Wake([]lockkey.Name{lock.Queue})
		}
	}()
	giveUp := time.Now().Add(releasePatience)
	unknown := false // an attempt may have gone through
	for attempt := 0; ; attempt++ {
		r = t.sendRelease(lock, token, time.Until(giveUp)+dbconn.Timeout)
		outcome, err := r.outcome, r.err
		if err == nil {
			t.endLeftover(left)
		}
		late := time.Now().After(giveUp)
		switch {
		case err != nil && (late || !lockerr.Transient(err)):
			return fmt.Errorf("the lease was not released and will expire: %w", err)
		case err != nil:
			unknown = true
		case outcome == outcomeReleased || outcome == outcomeLeft || outcome == outcomeExpired || unknown && outcome == outcomeGone:
			return nil // expired: the lock was held until Release was called
		case outcome == outcomeGone:
			return &hold.LostError{Why: cmp.Or(r.evicted, hold.ErrTakenAway)}
		case late:
			return fmt.Errorf("a transaction that fenced the lock or locked its row is still open after %s; the lease was not released and will expire", releasePatience)
		}
		time.Sleep(clock.DefaultBackoff(attempt))
	}
}

// Share implements [hold.Backend]. As a release, it is retried while a transaction that fenced the lock
// is open.
func (t *Table) Share(from, to *hold.Hold) error {
	to.Holder, to.TTL, to.Margin, to.Waited = t.cfg.Owner+":"+rand.Text(), from.TTL, from.Margin, from.Waited
	giveUp := time.Now().Add(releasePatience)
	var sent time.Duration // of the first request that may have made the share: no later one renews it
	unknown := false
	for attempt := 0; ; attempt++ {
		var outcome string
		var evicted error
		var wait clock.Deadline // for a connection
		wait.Start(t.lingering, dbconn.Timeout, lockerr.ErrNoAnswer)
		err := t.request(&wait, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
			earlier := unknown
			if !earlier {
				sent, unknown = t.host.Clock(), true
			}
			outcome, err = pgx.CollectExactlyOneRow(q.Query(ctx, t.place.Statement(statements.LeaseShareHeld),
				from.Key, from.Holder, from.Token, to.Holder, to.TTL.Milliseconds()), pgx.RowTo[string])
			if err == nil && outcome == shareSkipped {
				unknown = earlier
			}
			if outcome == renewalGone {
				evicted = t.whyGone(ctx, q, []*hold.Hold{from})[from]
			}
			return err
		})
		wait.Stop()
		late := time.Now().After(giveUp)
		switch {
		case err != nil && !late && lockerr.Transient(err):
		case err == nil && outcome == shareDone && to.Granted(from.Token, sent, t.host.Clock()):
			t.over(from, outcomeReleased)
			t.host.Queue.Wake([]lockkey.Name{from.Queue}) // readers
			return nil
		case err == nil && outcome == shareSkipped && !late:
		default:
			t.Discard(from)
			t.Discard(to)
			switch {
			case outcome == renewalGone:
				err = &hold.LostError{Why: cmp.Or(evicted, hold.ErrTakenAway)}
			case err == nil && outcome == shareDone:
				err = hold.ErrLateGrant
			case err == nil:
				err = fmt.Errorf("a transaction that fenced the lock or locked its row is still open after %s; it is being released", releasePatience)
			}
			return err
		}
		time.Sleep(clock.DefaultBackoff(attempt))
	}
}

// The outcomes of share_held.sql, which may also be renewalGone.
const (
	shareDone    = "shared"
	shareSkipped = "skipped"
)

// Discard releases, in the background, a grant that no caller received or that was lost. It
// releases at once, which cannot overtake the grant: dbconn.Session.Do ends a backend that may
// still run the grant's statement. After an unknown outcome it releases once more when the
// lease has expired.
func (t *Table) Discard(lock *hold.Hold) {
	left := t.addLeftover(lock)
	t.cleaning.Run(func() {
		err := t.releaseWithRetries(lock, nil, left)
		t.endLeftover(left)
		if err == nil || errors.Is(err, lockerr.ErrLost) { // lost: there is nothing
			return
		}
		t.host.Log.Warn("pgxlock: the outcome for a lease is unknown; it will expire", "key", lock.Key, "holder", lock.Holder, "error", err)
		time.AfterFunc(lock.TTL, func() { t.sendRelease(lock, nil, 0) })
	})
}
