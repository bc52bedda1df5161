package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// Leases are released here: by Release, and those whose grant no caller received.

// What became of an entry of release.sql or renew.sql, or those of shared leases.
const (
	outcomeReleased = "released"
	outcomeLeft     = "left" // by one of several who shared it
	outcomeExpired  = "expired"
	outcomeGone     = "gone"
	outcomeRenewed  = "renewed"
)

// leaseReturn is one release under way.
type leaseReturn struct {
	lock    *Lock
	token   *int64 // nil: whichever the holder has
	done    chan struct{}
	outcome string
	wanted  bool // others wait for it, as far as is known; they are woken
	err     error
}

func failReturns(returns []*leaseReturn, err error) {
	for _, r := range returns {
		r.err = err
		close(r.done)
	}
}

// giveBack sends a batch of releases.
func (t *leaseTable) giveBack(returns []*leaseReturn) error {
	return inModes(returns, func(r *leaseReturn) Mode { return r.lock.mode }, t.giveBackAs, failReturns)
}

func (t *leaseTable) giveBackAs(mode Mode, returns []*leaseReturn) error {
	names := make([]string, len(returns))
	holders := make([]string, len(returns))
	tokens := make([]*int64, len(returns))
	for i, r := range returns {
		names[i], holders[i], tokens[i] = r.lock.key, r.lock.holder, r.token
	}
	type row struct {
		Outcome string
		Wanted  bool
	}
	var rows []row
	var second bool
	told := mode == Exclusive // whether others wait for it
	err := t.request(func(ctx context.Context, q dbconn.Querier, again bool) (err error) {
		second = again
		rows, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(byMode(mode, statements.LeaseRelease, statements.LeaseReleaseShared)), names, holders, tokens), pgx.RowToStructByPos[row])
		return err
	})
	if err == nil && len(rows) != len(returns) {
		err = fmt.Errorf("%d answers for %d releases", len(rows), len(returns))
	}
	if err != nil {
		failReturns(returns, err)
		if t.requests.Reached() {
			return nil
		}
		return err
	}
	var unknown, wanted []lockkey.Name
	for i, r := range returns {
		r.outcome, r.wanted = rows[i].Outcome, rows[i].Wanted
		permit := r.lock.queue != r.lock.key // who waits for any permit is not asked about
		if !told || permit {
			r.wanted = r.lock.wanted
		}
		if second && r.outcome == outcomeGone {
			r.outcome = outcomeReleased // by the first attempt, whose answer was lost
		}
		if r.outcome == outcomeReleased || r.outcome == outcomeExpired {
			if permit && rows[i].Wanted {
				wanted = append(wanted, t.name(r.lock.key))
			}
			switch {
			case r.wanted:
				wanted = append(wanted, t.name(r.lock.queue))
			case !told || permit:
				unknown = append(unknown, t.name(r.lock.queue))
			}
		}
		close(r.done)
	}
	t.locker.queue.freed(unknown)
	t.locker.queue.freedAfter(t.request, wanted)
	return nil
}

// sendBack releases once and waits for the answer.
func (t *leaseTable) sendBack(lock *Lock, token *int64) *leaseReturn {
	r := &leaseReturn{lock: lock, token: token, done: make(chan struct{})}
	t.releasing.Add(r)
	<-r.done // in bounded time: a batch under way, and ours
	return r
}

// releasePatience is how long a release is tried while fenced transactions are
// open or the server is away.
const releasePatience = 5 * time.Second

func (t *leaseTable) release(lock *Lock) error { return t.handBack(lock, &lock.token, nil) }

// handBack releases, and tries again while that may help. left is nil, or ends with the
// first answer.
func (t *leaseTable) handBack(lock *Lock, token *int64, left *leftover) error {
	var r *leaseReturn
	defer func() {
		// The lock may have been given back before those who wait here had a ticket.
		if queued := t.over(lock, r.outcome); queued && !r.wanted {
			t.locker.queue.freed([]lockkey.Name{t.name(lock.queue)})
		}
	}()
	giveUp := time.Now().Add(releasePatience)
	unknown := false // an attempt may have gone through
	for attempt := 0; ; attempt++ {
		r = t.sendBack(lock, token)
		outcome, err := r.outcome, r.err
		if err == nil {
			t.endLeftover(left)
		}
		late := time.Now().After(giveUp)
		switch {
		case err != nil && (late || !transient(err)):
			return fmt.Errorf("the lease is left to its expiry: %w", err)
		case err != nil:
			unknown = true
		case outcome == outcomeReleased || outcome == outcomeLeft || outcome == outcomeExpired || unknown && outcome == outcomeGone:
			return nil // expired: it was ours until Release was called, and nobody had it since
		case outcome == outcomeGone:
			return fmt.Errorf("%w: it was gone before the release", ErrLost)
		case late:
			return fmt.Errorf("a transaction that fenced the lock, or one that has its row locked, is still open after %s; the lease is left to its expiry", releasePatience)
		}
		time.Sleep(defaultBackoff(attempt))
	}
}

// discard gives back, in the background, a grant that nobody got to hear of or
// believes in: at once, which session.do makes late enough by ending the backend
// that may still be at it, and once more when the lease would have expired.
func (t *leaseTable) discard(lock *Lock) {
	left := t.addLeftover(lock)
	t.cleaning.Run(func() {
		err := t.handBack(lock, nil, left)
		t.endLeftover(left)
		if err == nil || errors.Is(err, ErrLost) { // lost: there is nothing
			return
		}
		t.locker.log.Warn("pgxlock: a lease of unknown outcome is left to its expiry", "key", lock.key, "holder", lock.holder, "error", err)
		time.AfterFunc(lock.ttl, func() { t.sendBack(lock, nil) })
	})
}
