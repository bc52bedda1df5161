package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A Locker that waits asks, joins a line, and asks again when it is first and a holder may
// have released, or the holder's lease may have expired.

// acquire is Acquire, TryAcquire and the first half of Do. defaults stand below
// the caller's opts.
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

// one waits for one lock.
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

// try asks once for each of the locks, and admits those that are granted. A lock that is
// lost before is lockerr.ErrGrantLost, and nothing of it is left that the next try could meet.
func (w *wait) try(keys []string, inDo bool, o options) []attempt {
	attempts := w.locker.backend.try(w, keys, o)
	for i := range attempts {
		got := &attempts[i]
		if got.err == nil {
			got.lock.mode = o.mode
			got.err = got.lock.admit(inDo)
		}
		if !errors.Is(got.err, ErrLost) && !errors.Is(got.err, errLateGrant) {
			continue
		}
		if lock := got.lock; lock != nil {
			release := func() error { return w.locker.backend.release(lock) }
			_, _ = batcher.Await(w, &w.locker.calls, release, func(error) {}) // it is lost: what it says does not matter
		}
		*got = attempt{err: grantLost(got.err)}
	}
	return attempts
}

// grantLost returns why what was granted was lost before the call could return it.
func grantLost(why error) error {
	if lost, ok := errors.AsType[*lostError](why); ok {
		why = lost.why
	}
	return fmt.Errorf("%w: %w", lockerr.ErrGrantLost, why)
}

// failed makes the error that the call returns, which waits for nothing any more.
func (w *wait) failed(key string, err error) error {
	w.leave()
	err = w.locker.fail("acquire", key, err)
	w.observed.failed(err)
	return err
}

// wishes puts together what a call asks for.
func (l *Locker) wishes(key string, opts ...[]Option) (options, error) {
	o := l.backend.options()
	for _, opts := range opts {
		if err := o.collect(opts, l.backend.takes); err != nil {
			return o, err
		}
	}
	if o.permits > 0 && o.mode != Exclusive {
		return o, fmt.Errorf("a permit is nobody else's, so %v has no meaning; leave it out: %w", o.mode, errors.ErrUnsupported)
	}
	return o, l.backend.check(key)
}

// mayWait says why a wait under ctx makes no sense.
func (l *Locker) mayWait(ctx context.Context, key string) error {
	if ctx.Err() != nil {
		return lockerr.ContextError(ctx)
	}
	if l.holds(ctx, key) {
		return fmt.Errorf("%w: this context already holds the key", ErrDeadlock)
	}
	return nil
}

// A wait is a context that ends with the caller's, when the Locker is closed, and
// when MaxWait is over. Most waits end before anybody has to be woken when it does,
// so that what does that is made only for who asks for Done.
type wait struct {
	caller  context.Context
	locker  *Locker
	noWait  bool
	until   time.Time // zero: no bound
	mode    Mode
	permits permits
	attempt int
	lost    int        // how many grants were lost before they could be returned
	busy    *busyError // what the server said last, if it said so at all
	place   *waiter    // in the line of what it waits for; nil: in none
	holds   []*Lock    // what it acquired already; to lose one of them ends it

	observed *observedCall

	mu      sync.Mutex
	inner   context.Context // nil until somebody asks for it
	cancel  context.CancelCauseFunc
	stops   []func() bool
	stopped bool
}

// startWait begins a wait for the key, or for many if that is empty.
func (l *Locker) startWait(ctx context.Context, key string, o options) *wait {
	w := &wait{caller: ctx, locker: l, noWait: o.noWait(), mode: o.mode, permits: o.permits, observed: l.observeCall(ctx, key, o)}
	if o.wait != nil {
		bound := *o.wait
		if w.noWait {
			bound = dbconn.Timeout
		}
		w.until = time.Now().Add(bound)
	}
	return w
}

// context makes the context that ends by itself.
func (w *wait) context() context.Context {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.inner != nil {
		return w.inner
	}
	inner, cancel := context.WithCancelCause(w.caller)
	w.inner, w.cancel = inner, cancel
	if w.stopped { // whoever leads may be looked at when it is through
		cancel(nil)
		return inner
	}
	w.stops = append(w.stops, context.AfterFunc(w.locker.calls.Closing(), func() { cancel(ErrClosed) }))
	if !w.until.IsZero() {
		w.stops = append(w.stops, time.AfterFunc(time.Until(w.until), func() { cancel(lockerr.ErrNoAnswer) }).Stop)
	}
	return inner
}

func (w *wait) Deadline() (time.Time, bool) { return w.caller.Deadline() }
func (w *wait) Done() <-chan struct{}       { return w.context().Done() }
func (w *wait) Value(key any) any           { return w.context().Value(key) }

func (w *wait) Err() error {
	why := w.cause()
	if why == nil {
		return nil
	}
	ctx := w.context()
	w.cancel(why) // it may not have been told yet
	return ctx.Err()
}

// cause is why the wait has ended, nil while it has not.
func (w *wait) cause() error {
	switch {
	case w.caller.Err() != nil:
		return context.Cause(w.caller)
	case w.locker.calls.Closing().Err() != nil:
		return ErrClosed
	case !w.until.IsZero() && !time.Now().Before(w.until):
		return lockerr.ErrNoAnswer
	}
	return nil
}

// ends returns channels one of which is closed when ctx ends. They are there already
// if it is a wait that has no bound, or none that its backend does not keep anyway.
func ends(ctx context.Context) (ended, closing <-chan struct{}) {
	if w, ok := ctx.(*wait); ok && (w.noWait || w.until.IsZero()) {
		return w.caller.Done(), w.locker.calls.Closing().Done()
	}
	return ctx.Done(), nil
}

func (w *wait) stop() {
	w.leave()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	for _, stop := range w.stops {
		stop()
	}
	if w.inner != nil {
		w.cancel(nil)
	}
}

// lookEvery is about how often who stands in line looks whether that makes sense.
const lookEvery = time.Second

// standBehind waits for the turn of this call if others wait for the lock already.
func (w *wait) standBehind(key string) error {
	if w.noWait || w.locker.lines.count.Load() == 0 {
		return nil
	}
	if w.observed != nil && w.locker.lines.exists(w.locker.backend.name(key)) {
		w.observed.busy(key, "")
	}
	w.join(key, nil)
	if w.place == nil {
		return nil
	}
	return w.await(time.Time{})
}

// join stands in the line for a lock, unless there is none and said is nil.
func (w *wait) join(key string, said *busyError) {
	var holds []hold
	for _, lock := range append(slices.Collect(heldBy(w.caller)), w.holds...) {
		if id := lock.locker.backend.holdID(lock); id != "" {
			holds = append(holds, hold{id, lock.key})
		}
	}
	w.place = w.locker.lines.join(w.locker.backend.name(key), said, holds, w.mode)
}

// leave leaves the line.
func (w *wait) leave() {
	if w.place != nil {
		w.place.leave()
		w.place = nil
	}
}

// granted leaves the line with the lock that was asked for with these options.
func (w *wait) granted(o options) {
	if w.place == nil {
		return
	}
	name := w.place.line.name
	w.place.granted(o.turn, o.mode == Exclusive && o.permits == 0)
	w.place = nil
	if (o.mode == Shared || o.permits > 0) && name.Kind() == 0 && w.locker.queue != nil {
		w.locker.queue.freed([]lockkey.Name{name}) // the next one may share it, or there may be another permit
	}
}

// turn adds to the options of a call as whom it asks.
func (w *wait) turn(o options) options {
	switch {
	case w.noWait:
		o.turn = barges
	case w.place != nil:
		o.turn, o.first = w.place.ticket()
	}
	return o
}

// behindWriter returns the first of the keys that a try may not share because a writer of
// this Locker waits for it, and says who has the lock. Each kind of lock sees to the
// writers of other Lockers.
func (w *wait) behindWriter(keys []string, o options) (key string, err error) {
	if !w.noWait || o.mode != Shared {
		return "", nil
	}
	for _, key := range keys {
		if busy := w.locker.lines.writerWaits(w.locker.backend.name(key)); busy != nil {
			return key, busy
		}
	}
	if w.locker.queue != nil {
		w.locker.queue.withoutVoid(w, keys, w.locker.backend.name)
	}
	return "", nil
}

// again waits until it is worth to ask again after err, or says why not to.
func (w *wait) again(key string, err error) error {
	busy, isBusy := errors.AsType[*busyError](err)
	if isBusy {
		w.busy = busy
		w.observed.busy(key, busy.holder)
	}
	if errors.Is(err, lockerr.ErrGrantLost) {
		if w.lost++; w.lost == 1 {
			return nil // it is ours to ask for, also in a call that does not wait
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
	if isBusy && busy.here {
		if joined {
			return nil // it may have been freed before it stood here
		}
		if busy.wanted {
			w.queue()
		}
		return w.await(time.Time{})
	}
	if isBusy && w.queue() && (busy.left || !w.locker.queue.refused(w.place.line)) {
		return w.await(w.busy.ends())
	}
	due := time.Now().Add(w.locker.backoff(w.attempt))
	w.attempt++
	if ends := w.busy.ends(); !ends.IsZero() && ends.Before(due) {
		due = ends
	}
	return w.await(due)
}

// ends is when what is in the way may be over without a word: the lease has run out,
// or who stands before has gone; zero if that is not known.
func (e *busyError) ends() time.Time {
	left := e.remaining
	if e.soon && (left <= 0 || left > lookEvery) {
		left = clock.Jitter(lookEvery)
	}
	if left <= 0 {
		return time.Time{}
	}
	return time.Now().Add(left)
}

// queue makes sure that other processes know of the line. It reports whether they tell
// the one in front when to ask.
func (w *wait) queue() bool {
	return w.locker.queue != nil && w.locker.queue.stand(w.place.line)
}

// await waits until the one in front should ask: when it is told to, or at due.
func (w *wait) await(due time.Time) error {
	for {
		nap, isDue := clock.Jitter(lookEvery), false
		if left := time.Until(due); !due.IsZero() && left <= nap {
			nap, isDue = left, true
		}
		told, ended := clock.Rest(w, nap, w.place.turn)
		first, here, said, fate := w.place.look()
		w.busy = said
		if ended {
			return w.gaveUp(said, context.Cause(w))
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
			w.queue() // for who looks for circles of waits
		}
		if first && (told || isDue || here) {
			w.place.asked = true
			return nil
		}
	}
}

// known is what keeps a lock from a wait that ended, with err, before the server had said
// anything, as far as the Locker knows by itself: its own locks, and what the server said last
// to those who stand in line here. It is nil if the Locker knows of nothing, and if err is not
// the end of the wait.
func (w *wait) known(key string, err error) *busyError {
	if ended := w.cause(); w.busy != nil || w.noWait || ended == nil || !errors.Is(err, ended) {
		return nil
	}
	l := w.locker
	name := l.backend.name(key)
	others := max(int(w.permits), 1) // how many locks have to be held for none to be left
	for _, lock := range l.locks() {
		if (w.mode == Exclusive || lock.mode == Exclusive) && l.backend.name(lock.queue) == name && lock.Err() == nil {
			if others--; others == 0 {
				return &busyError{holder: lock.holder, here: true}
			}
		}
	}
	return l.lines.said(name)
}

// gaveUp makes the error of a call that ends without the lock. busy is what the
// server said, if that may be told; last what the last try returned.
func (w *wait) gaveUp(busy *busyError, last error) error {
	switch {
	case w.caller.Err() != nil && busy != nil:
		return &busyError{holder: busy.holder, remaining: busy.remaining, ended: lockerr.ContextError(w.caller)}
	case w.caller.Err() != nil:
		return lockerr.ContextError(w.caller)
	case errors.Is(w.cause(), ErrClosed):
		return ErrClosed
	case busy != nil:
		return busy
	default:
		return last
	}
}
