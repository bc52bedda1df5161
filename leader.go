package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A leader holds a lock for as long as it can, and campaigns again when it has lost the lock:
//
//	candidate ── granted ────────────▶ term: fn runs
//	term ─────── fn returns ─────────▶ Lead returns
//	term ─────── lock lost ──────────▶ candidate, once fn has returned
//	term ─────── asked to step down ─▶ candidate behind those who wait, once fn has returned
//	candidate ── ctx ends, MaxWait is over, or an error that does not pass ─▶ Lead returns

// ErrStepDown is the cause with which a leader's context ends after [Locker.AskToStepDown].
var ErrStepDown = errors.New("pgxlock: asked to step down")

// Lead makes this process a candidate for leader. It waits for the lock, calls fn while it
// holds the lock, and waits again after it has lost the lock. So among all processes that call
// Lead with the same key, one runs fn. When that one is gone, another one does: at once if the
// leader resigned or its program ended in order, otherwise when its TTL is over, or for an
// advisory lock when the server notices that the process has died.
//
// fn's context ends when the leader loses the lock (cause [ErrLost]), when it is asked to step
// down ([ErrStepDown]), and when ctx ends; fn should then return. Nobody else leads before the
// lock's deadline has passed or fn has returned. Only [Lock.Fence] protects fn's writes from a
// late leader. [Lock.Token] counts the terms.
//
// To resign, return from fn: Lead returns fn's result. After a loss or a request to step down
// Lead ignores that result and becomes a candidate again, after a request behind other waiters.
// Lead keeps trying while no primary can be reached. It returns ctx's error if ctx ends while
// it is a candidate, [ErrNotAcquired] if it has waited longer than MaxWait, and [ErrDeadlock],
// [ErrSchema], [ErrClosed] and other errors that are not temporary, as [Locker.Acquire] does.
func (l *Locker) Lead(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...PermitOption) error {
	if err := missing(ctx, l); err != nil {
		return l.fail("lead", key, err)
	}
	if fn == nil {
		return l.fail("lead", key, errors.New("fn is nil"))
	}
	acquire, o := acquireOptions(opts), l.options()
	if err := cmp.Or(l.collect(&o, acquire), l.check(key)); err != nil {
		return l.fail("lead", key, err)
	}
	for failures := 0; ; {
		lock, stepDown, err := l.term(ctx, key, fn, acquire)
		switch {
		case lock == nil && ctx.Err() == nil && mayPass(err):
			if failures == 0 {
				l.log.Warn("pgxlock: cannot campaign; trying again", "key", key, "error", err)
			}
			if !clock.Sleep(ctx, l.backoff(failures)) {
				return l.fail("lead", key, lockerr.ContextError(ctx))
			}
			failures++
			continue
		case lock == nil:
			return err
		case stepDown != nil:
			l.log.Info("pgxlock: stepped down", "key", key, "reason", stepDown, "error", err)
			l.letOthersLead(ctx)
		case errors.Is(lock.Err(), ErrLost):
			l.log.Warn("pgxlock: leadership lost", "key", key, "error", err)
		default:
			return err
		}
		failures = 0
	}
}

// term waits for the lock, and calls fn with it. stepDown is what it was asked for.
func (l *Locker) term(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts []AcquireOption) (lock *Lock, stepDown, err error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	_, err = l.do(ctx, key, func(work context.Context, leader *Lock) error {
		lock = leader
		l.leading.begin(work, lock, func(why error) { end(l.fail("lead", key, why)) })
		defer l.leading.end(lock)
		observed := lock.observed.Load()
		observed.term(ctx, EventTerm, nil)
		var result error
		defer func() { // deferred, so that a panic in fn ends the term as well
			why := result
			if lost := lock.Err(); errors.Is(lost, ErrLost) {
				why = lost
			} else if cause := context.Cause(ctx); errors.Is(cause, ErrStepDown) {
				why = cause
			}
			observed.term(ctx, EventTermEnded, why)
		}()
		result = fn(work, lock)
		return result
	}, nil, opts)
	if cause := context.Cause(ctx); errors.Is(cause, ErrStepDown) {
		stepDown = cause
	}
	return lock, stepDown, err
}

// Leads reports whether this process leads for the key now: a function that [Locker.Lead] called
// is running, and its context has not ended. It reads the clock, as [Lock.Err] does, and asks no
// server. Package adapters/health answers requests by it.
func (l *Locker) Leads(key string) bool {
	return l != nil && l.leading.leads(l.name(key))
}

// mayPass reports whether it is worth to campaign again after err.
func mayPass(err error) bool {
	return transient(err) && !errors.Is(err, ErrNotAcquired) && !errors.Is(err, ErrDeadlock)
}

// letOthersLead leaves the lock to others who wait for it. Those who stand in the queue
// come first by themselves; where there is none, they ask now and then.
func (l *Locker) letOthersLead(ctx context.Context) {
	if l.leading.server.Place != nil && !l.leading.installed() {
		clock.Sleep(ctx, clock.Jitter(clock.CheckInterval))
	}
}

// AskToStepDown asks the leader for the key, in any process, to step down: see [Locker.Lead].
// It returns when the request is delivered, not when the leader has stepped down; use
// [Locker.Watch] to see that. A leader that listens is notified at once, one behind a pooler
// within seconds; a holder that did not get the lock from Lead is not. If there is no leader,
// the error is nil. Requests need the migrations ([ErrSchema]), but for a Locker in memory.
func (l *Locker) AskToStepDown(ctx context.Context, key string) error {
	if err := l.begin(ctx); err != nil {
		return l.fail("ask", key, err)
	}
	defer l.calls.End()
	if err := l.check(key); err != nil {
		return l.fail("ask", key, err)
	}
	if err := l.leading.ask(ctx, l.name(key)); err != nil {
		return l.fail("ask", key, err)
	}
	return nil
}

// Watch yields the holders of the key now, and again whenever they change: no holder, another
// holder, or the same holder with another token. It asks about once a second, so it can miss a
// holder that has the lock for less. While the server cannot be reached it yields the error
// once and keeps trying. ctx ends it, and so does an error that is not temporary.
func (l *Locker) Watch(ctx context.Context, key string) iter.Seq2[[]Holder, error] {
	return func(yield func([]Holder, error) bool) {
		err := missing(ctx, l)
		if err == nil {
			err = l.check(key)
		}
		if err != nil {
			yield(nil, l.fail("holders", key, err))
			return
		}
		var before []Holder
		for asked, failing := false, false; ctx.Err() == nil; clock.Sleep(ctx, clock.Jitter(clock.CheckInterval)) {
			now, err := l.Holders(ctx, key)
			switch {
			case ctx.Err() != nil:
				return
			case err != nil:
				if !failing && !yield(nil, err) || !transient(err) {
					return
				}
				failing = true
			case !asked || failing || !slices.EqualFunc(before, now, sameHold):
				if !yield(now, nil) {
					return
				}
				before, asked, failing = now, true, false
			}
		}
	}
}

// sameHold reports whether both are of one acquisition.
func sameHold(a, b Holder) bool {
	return a.ID == b.ID && a.Token == b.Token && a.Mode == b.Mode && a.PID == b.PID
}
