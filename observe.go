package pgxlock

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/observe"
)

// Observe receives what becomes of calls and locks. Programs build metrics and traces from it.
// event.go has what it receives; this file has when it is called.

// tell calls Observe.
func (l *Locker) tell(ctx context.Context, e Event) { observe.Tell(ctx, l.log, l.observe, e) }

// An observedCall is the events of one call for locks. A nil one tells nobody.
type observedCall struct {
	locker *Locker
	ctx    context.Context
	began  time.Time
	event  Event // what they have in common
}

// observeCall begins a call; key is empty if it is for many.
func (l *Locker) observeCall(ctx context.Context, key string, o *options) *observedCall {
	if l.observe == nil {
		return nil
	}
	c := &observedCall{locker: l, ctx: ctx, began: time.Now()}
	c.event = Event{Key: key, Permits: o.Permits, Kind: l.kind, Mode: Mode(o.Mode), Call: observe.Call()}
	if o.Permits > 0 {
		c.event.Key = lockkey.Semaphore(key)
	}
	return c
}

func (c *observedCall) now(op EventOp) Event {
	e := c.event
	e.Op, e.Time = op, time.Now()
	e.Wait = e.Time.Sub(c.began)
	return e
}

// busy tells, the first time, that the key is. The call must not stand in line yet: those
// behind it would wait for Observe.
func (c *observedCall) busy(key, holder string) {
	if c == nil || c.event.Busy {
		return
	}
	c.event.Busy = true
	if c.event.Permits == 0 {
		c.event.Key = key
	}
	e := c.now(EventBusy)
	e.Holder = holder
	c.locker.tell(c.ctx, e)
}

// failed tells that the call ends without a lock.
func (c *observedCall) failed(err error) {
	if c == nil {
		return
	}
	e := c.now(EventWait)
	e.Err = err
	if failure, ok := errors.AsType[*Error](err); ok {
		told := *failure
		if e.Permits > 0 {
			told.Key = e.Key
		}
		if !e.Busy {
			e.Key = told.Key
		}
		e.Holder, e.Err = told.Holder, &told // a copy: who asked for a permit gets the other one, changed
	}
	c.locker.tell(c.ctx, e)
}

// succeeded tells that the call returns locks.
func (c *observedCall) succeeded(first *Lock, others ...*Lock) {
	if c == nil {
		return
	}
	c.locker.tell(c.ctx, c.now(EventWait))
	if first != nil {
		c.acquired(first)
	}
	for _, lock := range others {
		c.acquired(lock)
	}
}

// acquired tells of a lock, and then of what becomes of it.
func (c *observedCall) acquired(lock *Lock) {
	e := c.now(EventAcquired)
	h := &lock.hold
	e.Key, e.Token, e.Holder = h.Key, h.Token, h.Holder
	if number, ok := strings.CutPrefix(h.Key, h.Queue.Key); ok && e.Permits > 0 {
		e.Key = lockkey.Semaphore(h.Queue.Key)
		e.Permit, _ = strconv.Atoi(number)
	}
	o := &observedLock{locker: c.locker, ctx: context.WithoutCancel(c.ctx), event: e, since: c.locker.now(), turn: make(chan struct{}, 1)}
	o.event.Busy, o.event.Wait = false, 0
	if c.locker.kind != KindAdvisory { // a lock in memory has one if it is of package locktesting
		o.event.TTL = h.TTL
	}
	o.turn <- struct{}{} // before what comes later
	defer func() { <-o.turn }()

	lock.observed.Store(o)
	switch until, ended := h.Ended(); { // it may have ended before the Lock was observed
	case errors.Is(ended, ErrLost):
		o.lost(ended, until)
	case ended != nil: // by Close
		o.later(o.now(EventReleased))
	}
	c.locker.tell(c.ctx, e)
}

// An observedLock is the events of a Lock that a call has returned: a grant that is released at
// once would count as a hold that no caller had. Other callers wait for the goroutines that find
// losses and renewals, so each lock has one of its own for them: with one for all, an observer that
// blocks on one lock would delay the loss of another. What was not told yet is merged, so that a
// slow observer accumulates nothing. A nil observedLock tells nobody.
type observedLock struct {
	locker *Locker
	ctx    context.Context // of that call, without its end
	event  Event           // what they have in common
	since  time.Duration   // on the Locker's clock
	turn   chan struct{}   // is full while one of them is told

	mu   sync.Mutex
	next *lockEvent    // waits for that
	last time.Duration // Held of the last successful renewal
	over bool          // it was released or lost, and nothing comes behind that
}

type lockEvent struct {
	ctx context.Context
	Event
}

func (o *observedLock) now(op EventOp) Event {
	if o == nil {
		return Event{}
	}
	e := o.event
	e.Op, e.Time, e.Held = op, time.Now(), o.locker.now()-o.since
	return e
}

// renewed tells that a renewal succeeded, or not. ttl is what the lock had until then.
func (o *observedLock) renewed(ttl time.Duration, err error) {
	if o != nil {
		e := o.now(EventRenewed)
		e.Err = err
		if e.TTL > 0 {
			e.TTL = ttl
		}
		o.later(e)
	}
}

// lost tells that the lock was lost, which until then was believed in at most.
func (o *observedLock) lost(why error, until time.Duration) {
	if o != nil {
		e := o.now(EventLost)
		e.Held, e.Err = max(min(e.Held, until-o.since), 0), why
		o.later(e)
	}
}

// term tells in the goroutine of Lead that a term begins, or that it has ended.
func (o *observedLock) term(ctx context.Context, op EventOp, why error) {
	if o == nil {
		return
	}
	o.turn <- struct{}{}
	defer func() { <-o.turn }()
	e := o.now(op)
	e.Err = why
	o.locker.tell(ctx, e)
}

// later tells in a goroutine of its own: its callers hold mutexes.
func (o *observedLock) later(e Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return
	}
	o.over = e.Op != EventRenewed
	if e.Op == EventRenewed {
		e.SinceRenewal = max(e.Held-o.last, 0)
		if e.Err == nil {
			o.last = e.Held
		}
	}
	if o.next != nil { // a renewal that has not been told yet
		o.next.Event = e
		return
	}
	next := &lockEvent{o.ctx, e}
	o.next = next
	o.locker.telling.Run(func() { o.tell(next) })
}

// released tells how a release went that was begun with that event, unless the loss came
// before, and returns when all has been told.
func (o *observedLock) released(ctx context.Context, e Event, err error) {
	if o == nil {
		return
	}
	e.Err = err
	if errors.Is(err, ErrLost) {
		e.Op = EventLost
	}
	o.mu.Lock()
	if !o.over {
		o.over, o.next = true, &lockEvent{ctx, e}
	}
	next := o.next
	o.mu.Unlock()
	o.tell(next)
}

// tell waits for what is told just now, and then tells the next event unless somebody
// else has.
func (o *observedLock) tell(next *lockEvent) {
	o.turn <- struct{}{}
	defer func() { <-o.turn }()
	o.mu.Lock()
	due := next != nil && o.next == next
	if due {
		o.next = nil
	}
	o.mu.Unlock()
	if due {
		o.locker.tell(next.ctx, next.Event)
	}
}

// observeTx calls the option Observe, if there is one, when a call in the caller's
// transaction is over.
func (o *options) observeTx(ctx context.Context, e Event, began time.Time) {
	if o.observe == nil {
		return
	}
	e.Call, e.Mode, e.Time = observe.Call(), Mode(o.Mode), time.Now()
	e.Wait = e.Time.Sub(began)
	o.observe(ctx, e)
}
