package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file gives leases back: by Release, and of grants that nobody got to hear
// of.

// What became of an entry of release.sql or renew.sql.
const (
	outcomeReleased = "released"
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
	names := make([]string, len(returns))
	holders := make([]string, len(returns))
	tokens := make([]*int64, len(returns))
	for i, r := range returns {
		names[i], holders[i], tokens[i] = r.lock.key, r.lock.holder, r.token
	}
	var outcomes []string
	var second bool
	err := t.requests.do(ioTimeout, func(ctx context.Context, q querier, again bool) (err error) {
		second = again
		outcomes, err = pgx.CollectRows(q.query(ctx, t.place.statement("release"), names, holders, tokens), pgx.RowTo[string])
		return err
	})
	if err == nil && len(outcomes) != len(returns) {
		err = fmt.Errorf("%d answers for %d releases", len(outcomes), len(returns))
	}
	if err != nil {
		failReturns(returns, err)
		if t.requests.reached() {
			return nil
		}
		return err
	}
	var freed, wanted []lockName
	for i, r := range returns {
		r.outcome = outcomes[i]
		if second && r.outcome == outcomeGone {
			r.outcome = outcomeReleased // by the first attempt, whose answer was lost
		}
		switch {
		case r.outcome != outcomeReleased && r.outcome != outcomeExpired:
		case r.lock.wanted:
			wanted = append(wanted, t.name(r.lock.key))
		default:
			freed = append(freed, t.name(r.lock.key))
		}
		close(r.done)
	}
	t.locker.queue.freed(freed)
	t.locker.queue.freedAfter(func(fn exchange) error { return t.requests.do(ioTimeout, fn) }, wanted)
	return nil
}

// sendBack releases once and waits for the answer.
func (t *leaseTable) sendBack(lock *Lock, token *int64) (outcome string, err error) {
	r := &leaseReturn{lock: lock, token: token, done: make(chan struct{})}
	t.releasing.add(r)
	<-r.done // in bounded time: a batch under way, and ours
	return r.outcome, r.err
}

// releasePatience is how long a release is tried while fenced transactions are
// open or the server is away.
const releasePatience = 5 * time.Second

func (t *leaseTable) release(lock *Lock) error { return t.handBack(lock, &lock.token) }

// handBack releases, and tries again while that may help.
func (t *leaseTable) handBack(lock *Lock, token *int64) error {
	defer t.over(lock)
	giveUp := time.Now().Add(releasePatience)
	unknown := false // an attempt may have gone through
	for attempt := 0; ; attempt++ {
		outcome, err := t.sendBack(lock, token)
		late := time.Now().After(giveUp)
		switch {
		case err != nil && (late || !passing(err)):
			return fmt.Errorf("the lease is left to its expiry: %w", err)
		case err != nil:
			unknown = true
		case outcome == outcomeReleased || outcome == outcomeExpired || unknown && outcome == outcomeGone:
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
	t.cleaning.run(func() {
		err := t.handBack(lock, nil)
		if err == nil || errors.Is(err, ErrLost) { // lost: there is nothing
			return
		}
		t.locker.log.Warn("pgxlock: a lease of unknown outcome is left to its expiry", "key", lock.key, "holder", lock.holder, "error", err)
		time.AfterFunc(lock.ttl, func() { _, _ = t.sendBack(lock, nil) })
	})
}
