package pgxlock

import (
	"context"
	"errors"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Observe receives what becomes of calls and locks. Programs build metrics and traces from it.

// An EventOp is what happened, the Op of an [Event].
type EventOp string

// What can happen.
const (
	// EventBusy: a call found that somebody has the key, or that others wait for it.
	EventBusy EventOp = "busy"

	// EventWait: a call that asked for locks is over, however short its wait was. Err
	// says why it got none.
	EventWait EventOp = "wait"

	// EventAcquired: a call returns a Lock, or a Do begins its work.
	EventAcquired EventOp = "acquired"

	// EventRenewed: the deadline of a Lock has moved, by itself or by [Lock.Renew]; with
	// Err: the renewal of a lease failed, and is tried again while there is time.
	EventRenewed EventOp = "renewed"

	// EventLost: a Lock was lost. Err matches [ErrLost] and says how.
	EventLost EventOp = "lost"

	// EventReleased: a Lock was given back, by Release, the end of a Do, or Close. With
	// Err it may take until its TTL is over before others get it.
	EventReleased EventOp = "released"
)

// An Event is what Observe is told, a function in [LeaseConfig] and [AdvisoryConfig].
//
// Each call for a lock that is not refused for its arguments, or because the Locker
// is closed, has at most one [EventBusy], then one [EventWait], and then, if it
// succeeded, an [EventAcquired] for each Lock. That holds for Acquire, TryAcquire,
// AcquireAll, Do, TryDo, DoTx, those of a [Semaphore], and each time that Lead
// campaigns. A Lock has any number of [EventRenewed] after that, and in the end one of
// [EventLost] and [EventReleased], whatever ends it. So the busy ones less those waits
// that have Busy set are the calls that wait, and what was acquired less what was
// released or lost is what is held. A grant that no call returned, because its caller
// had left or AcquireAll failed in the end, is no event. A program that dies tells
// nothing more, and a loss is told when it is noticed: see [Lock.Lost].
//
// Observe is called for EventBusy, EventWait and EventAcquired in the goroutine of the
// call, before that returns, and with its context, so that a span can be its child; for
// EventReleased, and a loss that only Release finds out, in that of Release with the
// context of Release. The rest comes in goroutines of our own: EventRenewed and EventLost
// with the context of the call that acquired the Lock, without its end, and what Close
// releases with that of Close. Events of one Lock come one after the other, others at the
// same time: Observe must be safe for concurrent use.
//
// Observe shall be quick, and must neither call methods of the Locker or its Locks nor
// end its goroutine. What waits for it is the call that it is about: Acquire returns
// later, with a lock that is held and renewed meanwhile; Release, which gives the lock
// back first, when all events of the Lock are told; Close, when all of the Locker are,
// or its context ends. It holds up no renewal, no notice of a loss and no other call.
// Renewals that come while Observe is at an earlier event of that Lock are told as one,
// or not at all if the Lock ends before. When Observe panics the Logger gets that as an
// error, and nothing else comes of it.
//
// Fields may be added; those that are there keep their meaning.
type Event struct {
	Op   EventOp
	Time time.Time // when it happened, by the clock of this machine

	// Key is what was asked for: of a permit, the key of its semaphore. Of AcquireAll
	// EventBusy and EventWait have the key that was in the way first, or none.
	Key     string
	Permits int // of a semaphore: how many it has; 0: it is a lock itself
	Permit  int // which of them the Lock is: 3 of jobs#3; 0: none, or not known yet

	Kind Kind
	Mode Mode

	// Call numbers the calls of this process. All events of a call, and of the Locks that
	// it returned, have its number: with Key it is that of one Lock.
	Call uint64

	// Token and Holder are those of the Lock: [Lock.Token], [Lock.Holder]. Of EventBusy, and
	// EventWait with Err, Holder is who is in the way, if that is known.
	Token  int64
	Holder string

	Busy bool          // of EventWait and EventAcquired: the call had an EventBusy
	Wait time.Duration // of those three: since the call was made
	Held time.Duration // of EventRenewed, EventLost and EventReleased: how long it has been held, or was

	// Err is what the call returns (EventWait), what Release returns (EventReleased), why
	// the Lock is lost, or why a renewal failed.
	Err error
}

// tell calls Observe.
func (l *Locker) tell(ctx context.Context, e Event) {
	defer func() {
		if p := recover(); p != nil {
			l.log.Error("pgxlock: Observe panicked", "event", e.Op, "key", e.Key, "panic", p, "stack", string(debug.Stack()))
		}
	}()
	l.observe(ctx, e)
}

// An observedCall is the events of one call for locks. A nil one tells nobody.
type observedCall struct {
	locker *Locker
	ctx    context.Context
	began  time.Time
	event  Event // what they have in common
}

// lastCall is Event.Call of the last one.
var lastCall atomic.Uint64

// observeCall begins a call; key is empty if it is for many.
func (l *Locker) observeCall(ctx context.Context, key string, o options) *observedCall {
	if l.observe == nil {
		return nil
	}
	c := &observedCall{locker: l, ctx: ctx, began: time.Now()}
	c.event = Event{Key: key, Permits: int(o.permits), Kind: l.kind, Mode: o.mode, Call: lastCall.Add(1)}
	if o.permits > 0 {
		c.event.Key = semaphoreOf(key)
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
func (c *observedCall) succeeded(locks ...*Lock) {
	if c == nil {
		return
	}
	c.locker.tell(c.ctx, c.now(EventWait))
	for _, lock := range locks {
		c.acquired(lock)
	}
}

// acquired tells of a lock, and then of what becomes of it.
func (c *observedCall) acquired(lock *Lock) {
	e := c.now(EventAcquired)
	e.Key, e.Token, e.Holder = lock.key, lock.token, lock.holder
	if number, ok := strings.CutPrefix(lock.key, lock.queue); ok && number != "" {
		e.Key = semaphoreOf(lock.queue)
		e.Permit, _ = strconv.Atoi(number)
	}
	o := &observedLock{locker: c.locker, ctx: context.WithoutCancel(c.ctx), event: e, since: c.locker.now(), turn: make(chan struct{}, 1)}
	o.event.Busy, o.event.Wait = false, 0
	o.turn <- struct{}{} // before what comes later
	defer func() { <-o.turn }()

	lock.mu.Lock()
	lock.observed = o
	switch {
	case errors.Is(lock.ended, ErrLost):
		o.lost(lock.ended, lock.deadline)
	case lock.ended != nil: // by Close
		o.later(o.now(EventReleased))
	}
	lock.unlock()
	c.locker.tell(c.ctx, e)
}

// An observedLock is the events of a Lock that a call has returned. A nil one tells
// nobody.
type observedLock struct {
	locker *Locker
	ctx    context.Context // of that call, without its end
	event  Event           // what they have in common
	since  time.Duration   // on the Locker's clock
	turn   chan struct{}   // is full while one of them is told

	mu   sync.Mutex
	next *lockEvent // waits for that
	over bool       // it was released or lost, and nothing comes behind that
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

// renewed tells that a renewal succeeded, or not.
func (o *observedLock) renewed(err error) {
	if o != nil {
		e := o.now(EventRenewed)
		e.Err = err
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

// later tells in a goroutine of its own: whoever calls it has mutexes.
func (o *observedLock) later(e Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.over {
		return
	}
	o.over = e.Op != EventRenewed
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
