package waitqueue

import (
	"context"
	"errors"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A Waiter is one call that acquires locks, from its first try to its last. The call joins the
// local queue of a lock that others wait for, tries, and waits before each further try. It is
// in one local queue at a time, and one goroutine uses it.
type Waiter struct {
	queue    *Queue
	caller   context.Context
	ctx      context.Context // the caller's, or deadline
	deadline clock.Deadline  // the caller's context with MaxWait as a timeout
	noWait   bool
	mode     hold.Mode
	permits  int
	together int          // how many of the permits are wanted
	waited   bool         // it was in a local queue, or a try failed
	attempt  int          // counts the pauses of Backoff
	tooSlow  int          // counts the tries for which the server was too slow
	locked   error        // why a try failed that met a table which another session keeps locked
	busy     *hold.Busy   // the server's last refusal; nil: it has refused nothing yet
	position *position    // in the local queue; nil: none
	number   int64        // of the ticket that the last try carried
	holds    []*hold.Hold // what the call has acquired already; losing one ends the wait
}

// mostTooSlow is how often a call tries again because the server was too slow; for each try it is
// asked twice. It is not for ever: a server that is always too slow must not be a call that says
// nothing.
const mostTooSlow = 4

// Begin prepares a zero w for a call under ctx whose tries are like r. maxWait bounds the wait; nil:
// only ctx does, and 0: the call does not wait. End follows.
func (q *Queue) Begin(ctx context.Context, w *Waiter, r hold.Request, maxWait *time.Duration) {
	w.queue, w.caller, w.ctx = q, ctx, ctx
	w.noWait, w.mode, w.permits, w.together = maxWait != nil && *maxWait == 0, r.Mode, r.Permits, r.Together
	if maxWait != nil && !w.noWait {
		w.deadline.Start(ctx, *maxWait, lockerr.ErrNoAnswer)
		w.ctx = &w.deadline
	}
}

// End leaves the local queue, and ends the context of the tries.
func (w *Waiter) End() {
	w.Leave()
	if w.ctx == context.Context(&w.deadline) {
		w.deadline.Stop()
	}
}

// AtOnce reports whether the call neither waited nor had a context of its own. Then nothing
// refers to the Waiter once it has ended.
func (w *Waiter) AtOnce() bool { return !w.waited && w.ctx != context.Context(&w.deadline) }

// Context is the context of the tries: it ends with the caller's, and when MaxWait is over.
func (w *Waiter) Context() context.Context { return w.ctx }

// Waits reports whether the call goes on waiting after a failure: the server has refused a try
// before, and the call waits at all.
func (w *Waiter) Waits() bool { return w.busy != nil && !w.noWait }

// Holding records what the call has acquired so far.
func (w *Waiter) Holding(holds []*hold.Hold) { w.holds = holds }

// Ended returns why the wait is over: its context or its Locker has ended. Otherwise nil. The
// context of a lock reads the clock, which a channel does not.
func (w *Waiter) Ended() error {
	switch {
	case w.caller.Err() != nil:
		return context.Cause(w.caller)
	case w.queue.config.Closing.Err() != nil:
		return lockerr.ErrClosed
	case w.ctx.Err() != nil:
		return context.Cause(w.ctx)
	}
	return nil
}

// MayJoin reports whether there is anything to join: the call waits, and others wait for some
// lock. Most calls go no further, and need not know what their keys name.
func (w *Waiter) MayJoin() bool { return !w.noWait && !w.queue.Idle() }

// Join joins the local queue of a lock, and waits until the call is first there, if other
// callers wait for the lock already. The call waits (MayJoin).
func (w *Waiter) Join(name lockkey.Name) error {
	w.join(name, nil)
	if w.position == nil {
		return nil
	}
	return w.await(time.Time{})
}

// Enqueue joins the local queue of a lock that a try found busy, unless the call is in one or
// does not wait. It does not wait; the next Wait does.
func (w *Waiter) Enqueue(name lockkey.Name, busy *hold.Busy) {
	if w.position == nil && !w.noWait {
		w.join(name, busy)
	}
}

// Queued reports whether the call is in a local queue.
func (w *Waiter) Queued() bool { return w.position != nil }

// join joins the local queue of a lock. If refusal is nil, it joins only one that exists.
func (w *Waiter) join(name lockkey.Name, refusal *hold.Busy) {
	var holds []heldLock
	add := func(h *hold.Hold) {
		if id := h.ID(); id != "" {
			holds = append(holds, heldLock{id, h.Key})
		}
	}
	for h := range hold.HeldBy(w.caller) {
		add(h)
	}
	for _, h := range w.holds {
		add(h)
	}
	w.waited = true
	w.position = w.queue.join(name, refusal, holds, w.mode)
}

// Leave leaves the local queue without the lock.
func (w *Waiter) Leave() {
	if w.position != nil {
		w.position.leave()
		w.position = nil
	}
}

// Turn returns the queue position that the next try carries.
func (w *Waiter) Turn() (t hold.Turn) {
	switch {
	case w.noWait:
		t.SkipQueue = true
	case w.position != nil:
		t = w.position.try()
	}
	w.number = t.Ticket
	return t
}

// Granted leaves the local queue after a try that was granted.
func (w *Waiter) Granted() {
	if w.position == nil {
		return
	}
	name := w.position.local.name
	alone := w.mode == hold.Exclusive && w.permits == 0
	joined := w.position.granted(w.number, alone)
	w.position = nil
	if !alone && !joined && name.Kind() == 0 {
		w.queue.Wake([]lockkey.Name{name}) // the next waiter may share the lock, or get another permit
	}
}

// ChecksWriters reports whether BehindWriter has to be called before a try.
func (w *Waiter) ChecksWriters() bool {
	return w.noWait && (w.mode == hold.Shared || w.permits > 0)
}

// BehindWriter returns the first of the locks that a try may not share, or of which it may not have
// a permit, because an exclusive caller of this Locker waits for it, as an index and as the try's error; no error: there is none. The
// backends check for the writers of other Lockers.
func (w *Waiter) BehindWriter(names []lockkey.Name) (int, error) {
	for i, name := range names {
		if busy := w.queue.writerWaits(name); busy != nil {
			return i, busy
		}
	}
	w.queue.withoutVoid(w.ctx, names)
	return 0, nil
}

// Wait waits, after a try for the lock that failed with err, until the next try is due. It
// returns an error if the call must fail instead.
func (w *Waiter) Wait(name lockkey.Name, err error) error {
	w.waited = true
	if w.position != nil {
		w.position.failed()
	}
	busy, isBusy := errors.AsType[*hold.Busy](err)
	if isBusy {
		w.busy = busy
	}
	if known := w.known(name, err); known != nil {
		return w.endError(known, err)
	}
	if w.busy == nil && !w.noWait && lockerr.IsLocked(err) && w.Ended() == nil {
		w.locked = err
		pause := w.queue.config.Backoff(w.attempt)
		w.attempt++
		if closing, ended := clock.Rest(w.ctx, pause, w.queue.config.Closing.Done()); !closing && !ended {
			return nil
		}
	}
	if w.busy == nil && !w.noWait && lockerr.TooSlow(err) && w.Ended() == nil && w.tooSlow < mostTooSlow {
		w.tooSlow++ // that was a pause already
		return nil
	}
	if !w.Waits() || !isBusy && !lockerr.Transient(err) {
		return w.endError(nil, err)
	}
	if w.position == nil {
		w.join(name, w.busy)
	}
	first, _, _, _ := w.position.look()
	if !first {
		return w.await(time.Time{})
	}
	if isBusy {
		w.position.refused(busy)
		w.queue.asked(w.position.local)
	}
	joined := !w.position.tried
	w.position.tried = true
	if isBusy && busy.Here {
		if joined {
			return nil // the lock may have been freed before this call had queued
		}
		if busy.Wanted {
			w.enter()
		}
		return w.await(time.Time{})
	}
	if isBusy {
		woken := w.enter()
		polls := !busy.Left && w.queue.refused(w.position.local)
		if woken && !polls {
			return w.await(busyEnds(w.busy))
		}
	}
	due := time.Now().Add(w.queue.config.Backoff(w.attempt))
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
	if b.Soon && (left <= 0 || left > clock.CheckInterval) {
		left = clock.Jitter(clock.CheckInterval)
	}
	if left <= 0 {
		return time.Time{}
	}
	return time.Now().Add(left)
}

// enter makes sure that the local queue has a ticket. It reports whether the first waiter is
// then woken when it may try.
func (w *Waiter) enter() bool { return w.queue.enter(w.position.local) }

// await waits until this call is first and should try: because it is woken, because due has
// come, or because the lock is held in this process.
func (w *Waiter) await(due time.Time) error {
	w.position.rest(true)
	defer w.position.rest(false)
	for {
		nap, isDue := clock.Jitter(clock.CheckInterval), false
		if left := time.Until(due); !due.IsZero() && left <= nap {
			nap, isDue = left, true
		}
		woken := w.rest(nap)
		first, here, refusal, fate := w.position.look()
		w.busy = refusal
		if ended := w.Ended(); ended != nil {
			return w.endError(refusal, ended)
		}
		if fate != nil {
			return fate
		}
		for _, h := range w.holds {
			if err := h.Err(); err != nil {
				return err
			}
		}
		if len(w.position.holds) > 0 {
			w.enter() // so that other processes can detect a deadlock with the locks held here
		}
		if first && (woken || isDue || here) {
			w.position.tried = true
			return nil
		}
	}
}

// rest waits for d, or until the waiter is woken or the wait has ended.
func (w *Waiter) rest(d time.Duration) (woken bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-w.ctx.Done():
	case <-w.queue.config.Closing.Done():
	case <-w.position.woken:
		return true
	}
	return false
}

// Knows reports whether the call, which ended with err before the server had answered, can
// still tell who has the lock.
func (w *Waiter) Knows(name lockkey.Name, err error) bool { return w.known(name, err) != nil }

// known returns the holder of a lock, for a wait that ended with err before the server had
// answered. The Locker knows its own locks, and the server's last refusal of a waiter in its
// local queue. known returns nil if neither tells, or if err did not end the wait.
func (w *Waiter) known(name lockkey.Name, err error) *hold.Busy {
	if ended := w.Ended(); w.busy != nil || w.noWait || ended == nil || !errors.Is(err, ended) {
		return nil
	}
	others := max(w.permits-w.together+1, 1) // this many held locks leave none for the caller, or too few
	for _, h := range w.queue.config.Holds.Holds() {
		if (w.mode == hold.Exclusive || h.Mode == hold.Exclusive) && h.Queue == name && h.Err() == nil {
			if others--; others == 0 {
				return &hold.Busy{Holder: h.Holder, Here: true}
			}
		}
	}
	return w.queue.refusalFor(name)
}

// EndError returns the error of a call that ends without the lock, because of last.
func (w *Waiter) EndError(last error) error { return w.endError(w.busy, last) }

// endError is EndError with the server's refusal; nil if the error must not report one.
func (w *Waiter) endError(busy *hold.Busy, last error) error {
	switch {
	case w.caller.Err() != nil && busy != nil:
		return &hold.Busy{Holder: busy.Holder, Remaining: busy.Remaining, Ended: lockerr.ContextError(w.caller)}
	case w.caller.Err() != nil:
		return lockerr.ContextError(w.caller)
	case errors.Is(w.Ended(), lockerr.ErrClosed):
		return lockerr.ErrClosed
	case busy != nil:
		return busy
	case w.locked != nil && w.Ended() != nil:
		return w.locked
	default:
		return last
	}
}
