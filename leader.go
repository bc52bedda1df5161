package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A leader holds a lock for as long as it can, and campaigns again when it has lost the lock.

// ErrStepDown is the cause with which the context of a leader ends that was asked to
// step down; see [Locker.AskToStepDown].
var ErrStepDown = errors.New("pgxlock: asked to step down")

// Lead makes this process a candidate: it waits for the lock, calls fn while it has
// it, and waits again when leadership was lost. So of all processes that Lead with the
// same key one runs fn, and when that is gone, another one does: at once if it
// resigned or ended, else when its TTL is over.
//
// fn's context ends when leadership is lost (cause [ErrLost]), when the leader was asked
// to step down ([ErrStepDown]), and when ctx ends; fn should return then. Nobody else
// leads before the lock's deadline has passed, or fn has returned. What fn writes is
// safe from a late leader only under [Lock.Fence], as with every lock; [Lock.Token]
// counts the terms.
//
// Lead returns what fn returns while it leads: to resign, return. It goes on after a
// loss and after it was asked to step down, whatever fn returned then; others who wait
// come first in the latter case. It goes on trying while no primary can be reached.
// It returns ctx's error if that ends while it is a candidate, [ErrNotAcquired] if
// that took longer than MaxWait, [ErrDeadlock], [ErrSchema], [ErrClosed] and what else
// does not pass by itself as [Locker.Acquire] does.
func (l *Locker) Lead(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...Option) error {
	if err := missing(ctx, l); err != nil {
		return l.fail("lead", key, err)
	}
	if fn == nil {
		return l.fail("lead", key, errors.New("fn is nil"))
	}
	o, err := l.wishes(key, opts)
	if err == nil && o.mode != Exclusive {
		err = fmt.Errorf("one leads alone, so %v has no meaning; leave it out: %w", o.mode, errors.ErrUnsupported)
	}
	if err != nil {
		return l.fail("lead", key, err)
	}
	for failures := 0; ; {
		lock, stepDown, err := l.term(ctx, key, fn, opts)
		switch {
		case lock == nil && ctx.Err() == nil && mayPass(err):
			if failures == 0 {
				l.log.Warn("pgxlock: cannot campaign; trying on", "key", key, "error", err)
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
			l.standAside(ctx)
		case errors.Is(lock.Err(), ErrLost):
			l.log.Warn("pgxlock: leadership lost", "key", key, "error", err)
		default:
			return err
		}
		failures = 0
	}
}

// term waits for the lock, and calls fn with it. stepDown is what it was asked for.
func (l *Locker) term(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts []Option) (lock *Lock, stepDown, err error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	_, err = l.do(ctx, key, func(work context.Context, leader *Lock) error {
		lock = leader
		l.leading.begin(lock, func(why error) { end(l.fail("lead", key, why)) })
		defer l.leading.end(lock)
		return fn(work, lock)
	}, nil, opts)
	if cause := context.Cause(ctx); errors.Is(cause, ErrStepDown) {
		stepDown = cause
	}
	return lock, stepDown, err
}

// mayPass reports whether it is worth to campaign again after err.
func mayPass(err error) bool {
	return transient(err) && !errors.Is(err, ErrNotAcquired) && !errors.Is(err, ErrDeadlock)
}

// standAside leaves the lock to others who wait for it. Those who stand in the queue
// come first by themselves; where there is none, they ask now and then.
func (l *Locker) standAside(ctx context.Context) {
	if l.queue != nil && !l.queue.place.Installed() {
		clock.Sleep(ctx, clock.Jitter(lookEvery))
	}
}

// AskToStepDown asks whoever leads by the key to step down, in whatever process: the
// context that [Locker.Lead] gave to its fn ends with cause [ErrStepDown], and when fn
// has returned those who wait come first. It returns when the request has been
// delivered, and not when it was followed; [Locker.Watch] tells that. A holder that did
// not get the lock by Lead does not hear of it. It is no error if there is no leader.
//
// Requests need the migrations ([ErrSchema]). A leader who listens hears of
// one at once, one behind a pooler within seconds.
func (l *Locker) AskToStepDown(ctx context.Context, key string) error {
	if err := l.begin(ctx); err != nil {
		return l.fail("ask", key, err)
	}
	defer l.calls.End()
	if err := l.backend.check(key); err != nil {
		return l.fail("ask", key, err)
	}
	if err := l.leading.ask(ctx, l.backend.name(key)); err != nil {
		return l.fail("ask", key, err)
	}
	return nil
}

// Watch yields who holds the key, first as it is now and then whenever that changes:
// nobody, somebody else, or the same one with another token. It asks about once a
// second, so that a holder who comes and goes in between is not seen. While the server
// cannot be asked it yields the error once, and goes on; errors that do not pass by
// themselves end it, and so does ctx.
func (l *Locker) Watch(ctx context.Context, key string) iter.Seq2[[]Holder, error] {
	return func(yield func([]Holder, error) bool) {
		err := missing(ctx, l)
		if err == nil {
			err = l.backend.check(key)
		}
		if err != nil {
			yield(nil, l.fail("holders", key, err))
			return
		}
		var before []Holder
		for asked, failing := false, false; ctx.Err() == nil; clock.Sleep(ctx, clock.Jitter(lookEvery)) {
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
