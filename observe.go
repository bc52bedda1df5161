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

	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Observe receives what becomes of calls and locks. Programs build metrics and traces from it.

// EventOp says what happened: it is the Op of an [Event].
type EventOp string

// The operations of an [Event].
const (
	// EventBusy: a call found that somebody else holds the key or waits for it.
	EventBusy EventOp = "busy"

	// EventWait: a call for locks is over, even if it did not wait. Err says why it got
	// none.
	EventWait EventOp = "wait"

	// EventAcquired: a call returns a Lock, or a Do calls its function.
	EventAcquired EventOp = "acquired"

	// EventRenewed: the deadline of a Lock has moved, automatically or by [Lock.Renew].
	// With Err set: the renewal of a lease failed, and the Locker tries again while there
	// is time.
	EventRenewed EventOp = "renewed"

	// EventLost: a Lock was lost. Err matches [ErrLost] and says how.
	EventLost EventOp = "lost"

	// EventReleased: a Lock was released, by Release, the end of a Do, or Close. With Err
	// set, others may have to wait until its TTL is over.
	EventReleased EventOp = "released"
)

// An Event says what happened to a call or a lock. The function Observe in [LeaseConfig]
// and [AdvisoryConfig] receives it.
//
// Each call for a lock emits at most one EventBusy, then one EventWait, and then, if it
// succeeded, one EventAcquired for each Lock. Calls are Acquire, TryAcquire, AcquireAll,
// Do, TryDo and DoTx, those of a [Semaphore], and each campaign of Lead. A call that is
// refused for its arguments or because the Locker is closed emits nothing. After
// EventAcquired a Lock emits any number of EventRenewed, and finally one EventLost or
// EventReleased, whatever ends it. So the number of EventBusy, minus the number of
// EventWait with Busy set, is the number of waiting calls; the number of EventAcquired,
// minus those of EventLost and EventReleased, is the number of held locks. A grant that no
// call returned, because its caller had left or AcquireAll failed in the end, emits no
// event. A program that dies emits nothing more, and a loss is emitted when it is noticed:
// see [Lock.Lost].
//
// Observe is called for EventBusy, EventWait and EventAcquired in the goroutine of the
// call, before the call returns and with its context, so a span can be its child. For
// EventReleased, and for a loss that only Release notices, it is called in the goroutine of
// Release with the context of Release. Other events come from goroutines of the Locker:
// EventRenewed and EventLost with the context of the call that acquired the Lock, but
// without its cancellation, and locks that Close releases with the context of Close. Events
// of one Lock come one after the other. Events of different Locks come at the same time:
// Observe must be safe for concurrent use.
//
// Observe must return quickly. It must not call methods of the Locker or its Locks, and
// must not end its goroutine. A slow Observe delays only the call that the event is about.
// Acquire returns later, with a lock that is held and renewed meanwhile. Release releases
// the lock first, and returns after Observe has received all events of the Lock. Close
// returns after Observe has received all events of the Locker, or when its context ends.
// Observe delays no renewal, no notification of a loss and no other call. Several renewals
// may be merged into one event if Observe is slow, or be left out if the Lock ends first.
// If Observe panics, the Logger receives the panic as an error, and nothing else happens.
//
// Later versions may add fields; existing fields keep their meaning.
type Event struct {
	Op   EventOp
	Time time.Time // when it happened, by the clock of this machine

	// Key is the key of the call; for a permit, the key of its semaphore. For AcquireAll,
	// EventBusy and EventWait have the first busy key, or none.
	Key     string
	Permits int // of the semaphore; 0: the call is for a lock
	Permit  int // the number of the Lock's permit, 3 for jobs#3; 0: none, or not known yet

	Kind Kind
	Mode Mode

	// Call numbers the calls of this process. All events of a call, and of the Locks that
	// it returned, have its number: together with Key it identifies one Lock.
	Call uint64

	// Token and Holder are [Lock.Token] and [Lock.Holder]. With EventBusy, and with
	// EventWait and Err, Holder is the current holder, if that is known.
	Token  int64
	Holder string

	Busy bool          // in EventWait and EventAcquired: the call emitted an EventBusy
	Wait time.Duration // in EventBusy, EventWait and EventAcquired: time since the call was made
	Held time.Duration // in EventRenewed, EventLost and EventReleased: how long the Lock has been held, or was held

	// Err is the error that the call returns (EventWait) or that Release returns
	// (EventReleased), the reason why the Lock is lost, or the reason why a renewal failed.
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
func (l *Locker) observeCall(ctx context.Context, key string, o *options) *observedCall {
	if l.observe == nil {
		return nil
	}
	c := &observedCall{locker: l, ctx: ctx, began: time.Now()}
	c.event = Event{Key: key, Permits: o.Permits, Kind: l.kind, Mode: Mode(o.Mode), Call: lastCall.Add(1)}
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
	h := &lock.hold
	e.Key, e.Token, e.Holder = h.Key, h.Token, h.Holder
	if number, ok := strings.CutPrefix(h.Key, h.Queue.Key); ok && e.Permits > 0 {
		e.Key = lockkey.Semaphore(h.Queue.Key)
		e.Permit, _ = strconv.Atoi(number)
	}
	o := &observedLock{locker: c.locker, ctx: context.WithoutCancel(c.ctx), event: e, since: c.locker.now(), turn: make(chan struct{}, 1)}
	o.event.Busy, o.event.Wait = false, 0
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

// later tells in a goroutine of its own: its callers hold mutexes.
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
