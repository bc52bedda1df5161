package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A call that waits tries once, joins the local queue, and tries again when it is first there
// and a holder may have released the lock, or the holder's lease may have expired.

// acquire implements Acquire, TryAcquire and the first half of Do. The caller's opts override
// defaults.
func (l *Locker) acquire(ctx context.Context, key string, inDo bool, defaults, opts []Option) (*Lock, error) {
	o, err := l.wishes(key, defaults, opts)
	if err != nil {
		return nil, l.fail("acquire", key, err)
	}
	w := l.startWait(ctx, key, o)
	defer w.stop()
	lock, err := w.one(key, inDo, o)
	if err != nil {
		return nil, w.failed(key, err)
	}
	w.observed.succeeded(lock)
	return lock, nil
}

// one acquires one lock, and waits for it if need be.
func (w *wait) one(key string, inDo bool, o options) (*Lock, error) {
	if err := w.locker.mayWait(w.caller, key); err != nil {
		return nil, err
	}
	if err := w.standBehind(key); err != nil {
		return nil, err
	}
	for {
		o := w.turn(o)
		if _, err := w.behindWriter([]string{key}, o); err != nil {
			return nil, w.again(key, err)
		}
		got := w.try([]string{key}, inDo, o)[0]
		if got.err == nil {
			w.granted(o)
			return got.lock, nil
		}
		if err := w.again(key, got.err); err != nil {
			return nil, err
		}
	}
}

// tried is the outcome of one try: the lock, which is granted if err is nil.
type tried struct {
	lock *Lock
	err  error
}

// try tries once to acquire each of the locks, and admits those that are granted. A lock that
// is lost before try returns fails with lockerr.ErrGrantLost. try has released it by then, so
// that the caller's next try does not find it busy.
func (w *wait) try(keys []string, inDo bool, o options) []tried {
	attempts, all := w.oneAttempt[:0], w.oneTried[:0] // most calls try one lock: no allocation
	for _, key := range keys {
		lock := w.locker.newLock(key)
		lock.hold.Mode = o.Mode
		attempts, all = append(attempts, hold.Attempt{Hold: &lock.hold}), append(all, tried{lock: lock})
	}
	w.locker.backend.Try(w.ctx, o.Request, attempts)
	for i := range all {
		got := &all[i]
		if got.err = attempts[i].Err; got.err == nil {
			got.err = got.lock.admit(inDo)
		}
		if errors.Is(got.err, ErrLost) || errors.Is(got.err, hold.ErrLateGrant) {
			h := &got.lock.hold
			release := func() error { return w.locker.backend.Release(h) }
			ctx, cancel := w.bounded()
			_, _ = batcher.Await(ctx, &w.locker.calls, release, func(error) {}) // the lock is lost, so the outcome does not matter
			cancel()
			*got = tried{err: grantLost(got.err)}
		}
	}
	return all
}

// grantLost returns why the lock was lost before the call could return it.
func grantLost(why error) error {
	if lost, ok := errors.AsType[*hold.LostError](why); ok {
		why = lost.Why
	}
	return fmt.Errorf("%w: %w", lockerr.ErrGrantLost, why)
}

// failed ends the wait, and returns err as the call's error.
func (w *wait) failed(key string, err error) error {
	w.leave()
	err = w.locker.fail("acquire", key, err)
	w.observed.failed(err)
	return err
}

// wishes merges the options of a call, later ones last, and checks the key.
func (l *Locker) wishes(key string, opts ...[]Option) (options, error) {
	o := l.options()
	for _, opts := range opts {
		if err := o.collect(opts, l.takes); err != nil {
			return o, err
		}
	}
	if o.Permits > 0 && o.Mode != hold.Exclusive {
		return o, fmt.Errorf("permits are exclusive; remove %v: %w", Mode(o.Mode), errors.ErrUnsupported)
	}
	return o, l.check(key)
}

// mayWait returns an error if a wait under ctx cannot succeed.
func (l *Locker) mayWait(ctx context.Context, key string) error {
	if ctx.Err() != nil {
		return lockerr.ContextError(ctx)
	}
	if l.holdsKey(ctx, key) {
		return fmt.Errorf("%w: this context already holds the key", ErrDeadlock)
	}
	return nil
}

// holdsKey reports whether ctx comes from a lock on this key that is still held.
func (l *Locker) holdsKey(ctx context.Context, key string) bool {
	for h := range hold.HeldBy(ctx) {
		if h.Group() == &l.holds && h.Queue == l.name(key) && h.Err() == nil {
			return true
		}
	}
	return false
}

// A wait is one call that acquires locks, from its first try to its last.
type wait struct {
	caller  context.Context
	ctx     context.Context // the caller's, with MaxWait as a timeout
	end     context.CancelFunc
	locker  *Locker
	noWait  bool
	mode    hold.Mode
	permits int
	attempt int
	lost    int        // how many grants were lost before they could be returned
	busy    *hold.Busy // the server's last refusal; nil: it has refused nothing yet
	place   *waiter    // its position in the local queue; nil: none
	holds   []*Lock    // locks that the call has acquired already; losing one ends the wait

	observed *observedCall

	oneAttempt [1]hold.Attempt
	oneTried   [1]tried
}

// startWait begins a wait for the key; an empty key means several keys.
func (l *Locker) startWait(ctx context.Context, key string, o options) *wait {
	w := &wait{caller: ctx, ctx: ctx, end: func() {}, locker: l, noWait: o.noWait(), mode: o.Mode, permits: o.Permits, observed: l.observeCall(ctx, key, o)}
	if o.wait != nil && !w.noWait {
		w.ctx, w.end = context.WithTimeoutCause(ctx, *o.wait, lockerr.ErrNoAnswer)
	}
	return w
}

// ended returns why the wait is over: its context or its Locker has ended. Otherwise nil. It
// asks the caller's context itself: that of a lock reads the clock, and w.ctx would only see
// that its Done is closed.
func (w *wait) ended() error {
	switch {
	case w.caller.Err() != nil:
		return context.Cause(w.caller)
	case w.locker.calls.Closing().Err() != nil:
		return ErrClosed
	case w.ctx.Err() != nil:
		return context.Cause(w.ctx)
	}
	return nil
}

// bounded returns a context for a step that is not a try: it ends with the wait, also when
// the Locker is closed, and after the time of a statement if the call does not wait.
func (w *wait) bounded() (context.Context, context.CancelFunc) {
	ctx, end := context.WithCancelCause(w.ctx)
	stop := context.AfterFunc(w.locker.calls.Closing(), func() { end(ErrClosed) })
	cancel := func() {}
	if w.noWait {
		ctx, cancel = context.WithTimeoutCause(ctx, dbconn.Timeout, lockerr.ErrNoAnswer)
	}
	return ctx, func() {
		stop()
		cancel()
		end(nil)
	}
}

func (w *wait) stop() {
	w.leave()
	w.end()
}

// lookEvery is about how often a waiter checks whether it must go on waiting.
const lookEvery = hold.CheckInterval

// standBehind queues this call, and waits until it is first, if other callers wait for the
// lock already.
func (w *wait) standBehind(key string) error {
	if w.noWait || w.locker.lines.count.Load() == 0 {
		return nil
	}
	if w.observed != nil && w.locker.lines.exists(w.locker.name(key)) {
		w.observed.busy(key, "")
	}
	w.join(key, nil)
	if w.place == nil {
		return nil
	}
	return w.await(time.Time{})
}

// join enters the local queue of a lock. If said is nil, it enters only a queue that exists.
func (w *wait) join(key string, said *hold.Busy) {
	var holds []heldLock
	add := func(h *hold.Hold) {
		if id := h.ID(); id != "" {
			holds = append(holds, heldLock{id, h.Key})
		}
	}
	for h := range hold.HeldBy(w.caller) {
		add(h)
	}
	for _, lock := range w.holds {
		add(&lock.hold)
	}
	w.place = w.locker.lines.join(w.locker.name(key), said, holds, w.mode)
}

// leave leaves the local queue.
func (w *wait) leave() {
	if w.place != nil {
		w.place.leave()
		w.place = nil
	}
}

// granted leaves the local queue after a grant to a try with these options.
func (w *wait) granted(o options) {
	if w.place == nil {
		return
	}
	name := w.place.line.name
	w.place.granted(o.Turn.Ticket, o.Mode == hold.Exclusive && o.Permits == 0)
	w.place = nil
	if (o.Mode == hold.Shared || o.Permits > 0) && name.Kind() == 0 && w.locker.queue != nil {
		w.locker.queue.Wake([]lockkey.Name{name}) // the next waiter may share the lock, or get another permit
	}
}

// turn adds the call's queue position to its options.
func (w *wait) turn(o options) options {
	switch {
	case w.noWait:
		o.Turn.SkipQueue = true
	case w.place != nil:
		o.Turn.Ticket, o.Turn.First = w.place.ticket()
	}
	return o
}

// behindWriter returns the first of the keys that a try may not share because a writer of
// this Locker waits for it; the error names the holder. The backends check for the writers
// of other Lockers.
func (w *wait) behindWriter(keys []string, o options) (key string, err error) {
	if !w.noWait || o.Mode != hold.Shared {
		return "", nil
	}
	for _, key := range keys {
		if busy := w.locker.lines.writerWaits(w.locker.name(key)); busy != nil {
			return key, busy
		}
	}
	if w.locker.queue != nil {
		w.locker.queue.withoutVoid(w.ctx, keys, w.locker.name)
	}
	return "", nil
}

// again waits after a failed try until the next one is due. It returns an error if the call
// must fail instead.
func (w *wait) again(key string, err error) error {
	busy, isBusy := errors.AsType[*hold.Busy](err)
	if isBusy {
		w.busy = busy
		w.observed.busy(key, busy.Holder)
	}
	if errors.Is(err, lockerr.ErrGrantLost) {
		if w.lost++; w.lost == 1 {
			return nil // the lock was granted, so even a call that does not wait tries again
		}
	}
	if known := w.known(key, err); known != nil {
		return w.gaveUp(known, err)
	}
	if w.busy == nil || w.noWait || !transient(err) {
		return w.gaveUp(nil, err)
	}
	if w.place == nil {
		w.join(key, w.busy)
	}
	first, _, _, _ := w.place.look()
	if !first {
		return w.await(time.Time{})
	}
	if isBusy {
		w.place.tell(busy)
		if w.locker.queue != nil {
			w.locker.queue.asked(w.place.line)
		}
	}
	joined := !w.place.asked
	w.place.asked = true
	if isBusy && busy.Here {
		if joined {
			return nil // the lock may have been freed before this call had queued
		}
		if busy.Wanted {
			w.queue()
		}
		return w.await(time.Time{})
	}
	if isBusy && w.queue() && (busy.Left || !w.locker.queue.refused(w.place.line)) {
		return w.await(busyEnds(w.busy))
	}
	due := time.Now().Add(w.locker.backoff(w.attempt))
	w.attempt++
	if ends := busyEnds(w.busy); !ends.IsZero() && ends.Before(due) {
		due = ends
	}
	return w.await(due)
}

// busyEnds returns when the lock may become free without a notification: the lease expires, or
// a waiter before this one may have gone. Zero means that this time is not known.
func busyEnds(b *hold.Busy) time.Time {
	left := b.Remaining
	if b.Soon && (left <= 0 || left > lookEvery) {
		left = clock.Jitter(lookEvery)
	}
	if left <= 0 {
		return time.Time{}
	}
	return time.Now().Add(left)
}

// queue makes sure that the local queue has a ticket. It reports whether the first waiter is
// then woken when it may try.
func (w *wait) queue() bool {
	return w.locker.queue != nil && w.locker.queue.stand(w.place.line)
}

// await waits until this call is first and should try: because it is woken, because due has
// come, or because the lock is held in this process.
func (w *wait) await(due time.Time) error {
	for {
		nap, isDue := clock.Jitter(lookEvery), false
		if left := time.Until(due); !due.IsZero() && left <= nap {
			nap, isDue = left, true
		}
		woken := w.rest(nap)
		first, here, said, fate := w.place.look()
		w.busy = said
		if ended := w.ended(); ended != nil {
			return w.gaveUp(said, ended)
		}
		if fate != nil {
			return fate
		}
		for _, lock := range w.holds {
			if err := lock.Err(); err != nil {
				return err
			}
		}
		if len(w.place.holds) > 0 {
			w.queue() // so that other processes can detect a deadlock with the locks held here
		}
		if first && (woken || isDue || here) {
			w.place.asked = true
			return nil
		}
	}
}

// rest waits for d, or until the waiter is woken or the wait has ended.
func (w *wait) rest(d time.Duration) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-w.ctx.Done():
	case <-w.locker.calls.Closing().Done():
	case <-w.place.turn:
		return true
	}
	return false
}

// known returns the holder of a lock, for a wait that ended with err before the server had
// answered. The Locker knows its own locks, and the server's last refusal of a waiter in its
// local queue. known returns nil if neither tells, or if err did not end the wait.
func (w *wait) known(key string, err error) *hold.Busy {
	if ended := w.ended(); w.busy != nil || w.noWait || ended == nil || !errors.Is(err, ended) {
		return nil
	}
	l := w.locker
	name := l.name(key)
	others := max(w.permits, 1) // this many held locks leave none for the caller
	for _, h := range l.holds.Holds() {
		if (w.mode == hold.Exclusive || h.Mode == hold.Exclusive) && h.Queue == name && h.Err() == nil {
			if others--; others == 0 {
				return &hold.Busy{Holder: h.Holder, Here: true}
			}
		}
	}
	return l.lines.said(name)
}

// gaveUp returns the error of a call that ends without the lock. busy is the server's refusal,
// nil if the error must not report one; last is the error of the last try.
func (w *wait) gaveUp(busy *hold.Busy, last error) error {
	switch {
	case w.caller.Err() != nil && busy != nil:
		return &hold.Busy{Holder: busy.Holder, Remaining: busy.Remaining, Ended: lockerr.ContextError(w.caller)}
	case w.caller.Err() != nil:
		return lockerr.ContextError(w.caller)
	case errors.Is(w.ended(), ErrClosed):
		return ErrClosed
	case busy != nil:
		return busy
	default:
		return last
	}
}
