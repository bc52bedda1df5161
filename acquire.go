package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
)

// An acquisition is one call that acquires locks: it joins a local queue that others are in,
// tries, waits, and tries again. Its Waiter is all that it knows of waiting.
type acquisition struct {
	waitqueue.Waiter
	locker   *Locker
	caller   context.Context
	options  options
	lost     int // how many grants were lost before they could be returned
	observed *observedCall
	reusable bool // nobody else refers to it

	oneAttempt [1]hold.Attempt
	oneTried   [1]tried
}

// acquisitions keeps memory for later calls.
var acquisitions = sync.Pool{New: func() any { return new(acquisition) }}

// newAcquisition returns an acquisition under ctx, with the defaults of the Locker. end follows.
func (l *Locker) newAcquisition(ctx context.Context) *acquisition {
	a := acquisitions.Get().(*acquisition)
	a.locker, a.caller, a.options = l, ctx, l.options()
	return a
}

// unshared reports whether nothing refers to an acquisition that was granted: no goroutine
// releases a lost grant, no local queue has had it, and no try has had a context of its own.
func (a *acquisition) unshared() bool { return a.lost == 0 && a.AtOnce() }

// end ends the acquisition, and keeps its memory for another call if it was granted and
// nothing else refers to it.
func (a *acquisition) end() {
	a.End()
	if a.reusable {
		*a = acquisition{}
		acquisitions.Put(a)
	}
}

// begin begins the acquisition of the key; an empty key means several keys.
func (a *acquisition) begin(key string) {
	a.observed = a.locker.observeCall(a.caller, key, &a.options)
	a.locker.queue.Begin(a.caller, &a.Waiter, a.options.Request, a.options.bound())
}

// acquire implements Acquire, TryAcquire and the first half of Do. The caller's opts override
// defaults. Of permits that are acquired together it returns the first and the others.
func (l *Locker) acquire(ctx context.Context, key string, inDo bool, defaults, opts []AcquireOption) (lock *Lock, others Locks, err error) {
	a := l.newAcquisition(ctx)
	if err := cmp.Or(l.collect(&a.options, defaults, opts), l.check(key)); err != nil {
		return nil, nil, l.fail("acquire", key, err)
	}
	a.begin(key)
	defer a.end()
	got, err := a.one(key, inDo)
	if err != nil {
		return nil, nil, a.failed(key, err)
	}
	lock = got[0].lock
	for _, other := range got[1:] {
		others = append(others, other.lock)
	}
	a.observed.succeeded(lock, others...)
	a.reusable = a.unshared()
	return lock, others, nil
}

// one acquires one lock, or the permits that the call wants together, and waits for them if need be.
func (a *acquisition) one(key string, inDo bool) ([]tried, error) {
	if err := a.locker.mayWait(a.caller, key, a.options.Mode); err != nil {
		return nil, err
	}
	if err := a.join(key); err != nil {
		return nil, err
	}
	keys := []string{key}
	if n := a.options.Together; n > 1 {
		keys = slices.Repeat(keys, n)
	}
	for {
		_, err := a.behindWriter(keys[:1])
		if err == nil {
			got := a.try(keys, inDo)
			if err = a.allOrNone(got); err == nil {
				a.Granted()
				return got, nil
			}
		}
		if err := a.wait(key, err); err != nil {
			return nil, err
		}
	}
}

// join queues the call, and waits until it is first, if other callers wait for the lock
// already.
func (a *acquisition) join(key string) error {
	if !a.MayJoin() {
		return nil
	}
	name := a.locker.name(key)
	if a.observed != nil { // told before it queues, when no other caller depends on it yet
		if !a.locker.queue.Waiting(name) {
			return nil
		}
		a.observed.busy(key, "")
	}
	return a.Join(name)
}

// tried is the outcome of one try: the lock, which is granted if err is nil.
type tried struct {
	lock *Lock
	err  error
}

// try tries once to acquire each of the locks, and admits those that are granted. A lock that
// is lost before try returns fails with lockerr.ErrGrantLost. try has released it by then, so
// that the caller's next try does not find it busy.
func (a *acquisition) try(keys []string, inDo bool) []tried {
	attempts, all := a.oneAttempt[:0], a.oneTried[:0] // most calls try one lock: no allocation
	if len(keys) > 1 {
		attempts, all = make([]hold.Attempt, 0, len(keys)), make([]tried, 0, len(keys))
	}
	for _, key := range keys {
		lock := a.locker.newLock(key)
		lock.hold.Mode = a.options.Mode
		attempts, all = append(attempts, hold.Attempt{Hold: &lock.hold}), append(all, tried{lock: lock})
	}
	request := a.options.Request
	request.Turn = a.Turn()
	a.locker.backend.Try(a.Context(), request, attempts)
	for i := range all {
		got := &all[i]
		if got.err = attempts[i].Err; got.err == nil {
			got.err = got.lock.admit(inDo)
		}
		if errors.Is(got.err, ErrLost) || errors.Is(got.err, hold.ErrLateGrant) {
			h := &got.lock.hold
			ctx, cancel := a.bounded()
			a.release(ctx, func() error { return a.locker.backend.Release(h) }) // the lock is lost, so the outcome does not matter
			cancel()
			*got = tried{err: grantLost(got.err)}
		}
	}
	return all
}

// allOrNone returns the first error of a try, and releases what it got besides: a lock may be lost
// before the try has returned.
func (a *acquisition) allOrNone(got []tried) error {
	i := slices.IndexFunc(got, func(one tried) bool { return one.err != nil })
	if i < 0 {
		return nil
	}
	err := got[i].err
	var held Locks
	for _, one := range got {
		if one.err == nil {
			held = append(held, one.lock)
		}
	}
	a.giveUp(held)
	return err
}

// grantLost returns why the lock was lost before the call could return it.
func grantLost(why error) error {
	if lost, ok := errors.AsType[*hold.LostError](why); ok {
		why = lost.Why
	}
	return fmt.Errorf("%w: %w", lockerr.ErrGrantLost, why)
}

// behindWriter returns the first of the keys that a try may not share because a writer of
// this Locker waits for it; the error names the holder.
func (a *acquisition) behindWriter(keys []string) (key string, err error) {
	if !a.ChecksWriters() {
		return "", nil
	}
	names := make([]lockkey.Name, len(keys))
	for i, key := range keys {
		names[i] = a.locker.name(key)
	}
	i, err := a.BehindWriter(names)
	return keys[i], err
}

// wait waits after a failed try until the next one is due. It returns an error if the call
// must fail instead.
func (a *acquisition) wait(key string, err error) error {
	if busy, ok := errors.AsType[*hold.Busy](err); ok {
		a.observed.busy(key, busy.Holder)
	}
	if errors.Is(err, lockerr.ErrGrantLost) {
		if a.lost++; a.lost == 1 {
			return nil // the lock was granted, so even a call that does not wait tries again
		}
	}
	return a.Wait(a.locker.name(key), err)
}

// bounded returns a context for a step that is not a try: it ends with the wait, also when
// the Locker is closed, and after the time of a statement if the call does not wait.
func (a *acquisition) bounded() (context.Context, context.CancelFunc) {
	ctx, end := context.WithCancelCause(a.Context())
	stop := context.AfterFunc(a.locker.calls.Closing(), func() { end(ErrClosed) })
	cancel := func() {}
	if a.options.noWait() {
		ctx, cancel = context.WithTimeoutCause(ctx, dbconn.Timeout, lockerr.ErrNoAnswer)
	}
	return ctx, func() {
		stop()
		cancel()
		end(nil)
	}
}

// release runs a release, and waits for it until ctx ends.
func (a *acquisition) release(ctx context.Context, release func() error) {
	_, _ = batcher.Await(ctx, &a.locker.calls, release, func(error) {})
}

// failed ends the wait, and returns err as the call's error.
func (a *acquisition) failed(key string, err error) error {
	a.Leave()
	err = a.locker.fail("acquire", key, err)
	a.observed.failed(err)
	return err
}

// collect merges the options of a call into o, later ones last.
func (l *Locker) collect(o *options, opts ...[]AcquireOption) error {
	for _, opts := range opts {
		for _, opt := range opts {
			if !l.takes(opt) {
				return fmt.Errorf("this kind of Locker does not support the option %T; remove it: %w", opt, errors.ErrUnsupported)
			}
		}
		if err := collect(o, opts); err != nil {
			return err
		}
	}
	return nil
}

// mayWait returns an error if a wait for the key, in that mode, under ctx cannot succeed: ctx may come
// from a lock on the key that is still held.
func (l *Locker) mayWait(ctx context.Context, key string, mode hold.Mode) error {
	if ctx.Err() != nil {
		return lockerr.ContextError(ctx)
	}
	for h := range hold.HeldBy(ctx) {
		switch {
		case h.Group() != &l.holds || h.Queue != l.name(key) || h.Err() != nil:
		case h.Mode == hold.Shared && mode == hold.Exclusive:
			return fmt.Errorf("%w: this context holds the key shared, and two upgrades would wait for each other for ever; acquire it exclusively from the start, or release it first", ErrDeadlock)
		default:
			return fmt.Errorf("%w: this context already holds the key", ErrDeadlock)
		}
	}
	return nil
}
