package pgxlock

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/observe"
)

// EventOp says what happened: it is the Op of an [Event].
type EventOp string

// The operations of an [Event]: first those about the locks of a [Locker].
const (
	EventBusy     EventOp = "busy"     // a call found that somebody else holds the key or waits for it
	EventWait     EventOp = "wait"     // a call for locks is over, even if it did not wait; Err says why it got none
	EventAcquired EventOp = "acquired" // a call returns a Lock, or a Do calls its function

	// EventRenewed: the deadline of a Lock has moved, automatically or by [Lock.Renew]. With Err
	// set: the renewal of a lease failed, and is tried again while there is time.
	EventRenewed EventOp = "renewed"

	// EventLost: a Lock was lost. Err matches [ErrLost] and says how; it also matches
	// [ErrEvicted] if an operator took the lock away.
	EventLost EventOp = "lost"

	// EventReleased: a Lock was released, by Release, the end of a Do, or Close. With Err
	// set, others may have to wait until its TTL is over.
	EventReleased EventOp = "released"

	// EventTerm: [Locker.Lead] calls its function. EventTermEnded: that has returned or panicked.
	// Err matches [ErrLost] or [ErrStepDown] if that ended the term, or is what it returned.
	EventTerm      EventOp = "term"
	EventTermEnded EventOp = "term_ended"

	// EventTxLock: a call of [LockTx], [LockSQLTx] or [LockAllTx] is over. If Err is nil the
	// transaction has the locks. Their end is no event: only the server knows it.
	EventTxLock EventOp = "tx_lock"

	// EventClaim: a call of [ClaimTx] or [ClaimSQLTx] is over, or [AnswerTx] or [AnswerSQLTx]
	// knows whether to call fn. Granted: the transaction has the claim, and may still roll back.
	EventClaim EventOp = "claim"

	// EventLimit: a call of a ratelimit.Limiter is over: Allow, Reserve or Wait. Granted: N
	// events were counted. Otherwise Err matches ratelimit.ErrLimited, or says why nobody knows.
	EventLimit EventOp = "limit"

	// EventRun: a once.Runner has asked for a run. Granted: it calls the function. EventRunEnded:
	// that has returned or panicked, and its end is recorded. Err is what the call returns, or
	// says what it panicked with.
	EventRun      EventOp = "run"
	EventRunEnded EventOp = "run_ended"

	// EventEvicted: a call of Evict or Terminate of a monitor.Monitor is over, for each lock
	// that it was to end. Granted: the holder no longer has the lock.
	EventEvicted EventOp = "evicted"
)

// An Event says what happened to a call or a lock. The function Observe of a config receives
// it, and that of the option [Observe].
//
// Each call for a lock emits at most one EventBusy, then one EventWait, and then, if it
// succeeded, one EventAcquired for each Lock. Calls are Acquire, TryAcquire, AcquireAll, Do,
// TryDo and DoTx, those of a [Semaphore], Downgrade, and each campaign of Lead. After
// EventAcquired a Lock emits any number of EventRenewed, and finally one EventLost or
// EventReleased. So the number of EventBusy, minus the number of EventWait with Busy set, is
// the number of waiting calls; the number of EventAcquired, minus those of EventLost and
// EventReleased, is the number of held locks. A grant that no call returned, because its caller
// had left or AcquireAll failed in the end, emits no event, and a program that dies emits
// nothing more.
//
// EventReleased comes after the server has answered the release: if Err is nil, the lock is
// really free, and somebody else may have it already. EventLost comes when the loss is noticed,
// see [Lock.Lost]: somebody else may have the lock already, but a lease not before its
// deadline, unless it was evicted or lost by a failover.
//
// A leader's Lock also emits one EventTerm, after EventAcquired, and one EventTermEnded, before
// EventReleased unless the function itself releases the lock. A function may go on after
// EventLost: its term ends when it returns.
//
// Calls of LockTx and ClaimTx, of a Limiter, and Evict of package monitor emit one event each,
// when they are over. EventRun comes before the function of a run is called, and EventRunEnded
// after its end is recorded; a run that is not granted emits only EventRun. The lease of a run
// with Retry emits no events of its own. A call that is refused for its arguments, or because
// the Locker, Limiter or Runner is closed, emits nothing, but a refused eviction does: an audit
// wants to see it.
//
// # Calls of Observe
//
// Observe runs in the goroutine of a call, with its context, for the events of that call:
// before Acquire returns, in Release, in Lead. EventRenewed, EventLost and the releases of
// Close come from goroutines of the Locker, with the context of Close, or that of the call that
// acquired the Lock without its cancellation. Events of one Lock come one after the other,
// those of different Locks at the same time: Observe must be safe for concurrent use.
//
// Observe must return quickly, must not call methods of the Locker or its Locks, and must not
// end its goroutine. If it is slow, it delays the call that the event is about, but no renewal,
// no notification of a loss and no other call. Release and Close return after Observe has
// received their events. Renewals may be merged into one event, or be left out if the Lock ends
// first. A panic of Observe is logged as an error; without a Logger the call panics. Later versions may add
// fields and operations; existing ones keep their meaning.
type Event struct {
	Op   EventOp
	Time time.Time // when it happened, by the clock of this machine

	// Key is the key of the call, for a permit that of its semaphore; of AcquireAll in EventBusy
	// and EventWait the first busy key, or none; of LockAllTx the key if there is only one.
	Key     string
	Permits int // of the semaphore; 0: the call is for a lock
	Permit  int // the number of the Lock's permit, 3 for jobs#3; 0: none, or not known yet

	Kind Kind // 0: the event is about a claim, a limit or a run
	Mode Mode

	// Call numbers the calls of this process. All events of a call, and of the Locks that
	// it returned, have its number: together with Key and Permit it identifies one Lock.
	Call uint64

	// Token and Holder are [Lock.Token] and [Lock.Holder], in EventEvicted of the evicted holder. In
	// EventBusy, and in EventWait with Err, Holder is the current holder, if that is known.
	Token  int64
	Holder string

	Busy bool          // in EventWait and EventAcquired: the call emitted an EventBusy
	Wait time.Duration // time since the call was made; not in events of a Lock after EventAcquired, nor in EventRunEnded
	Held time.Duration // in events of a Lock after EventAcquired: how long it has been held, or was held; in EventRunEnded: how long the function ran

	// SinceRenewal is how long before EventRenewed the lock was last renewed, or acquired:
	// late, if more than half of TTL, which is for how long each renewal keeps it; 0: it is not
	// a lease.
	SinceRenewal, TTL time.Duration

	N              int       // in EventLimit: how many events the call asked for; in EventTxLock: how many locks
	Slot           time.Time // in EventRun and EventRunEnded: which run it is, if that is known
	Attempt        int       // in EventRun and EventRunEnded: how often the run was started; 0: not known
	EvictionReason string    // in EventEvicted
	Granted        bool      // in EventClaim, EventLimit, EventRun and EventEvicted: the call got what it asked for
	Err            error     // what the call returns, or Release (EventReleased); why the Lock is lost, or a renewal failed
}

// LogValue returns what is known of the event, for slog, with attributes named as those of
// [Holder] and monitor.Waiter.
func (e Event) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("op", string(e.Op))}
	switch {
	case e.Kind != 0:
		key, _ := lockkey.Split(e.Key)
		attrs = append(attrs, observe.LockAttrs(e.Kind.String(), key, e.Mode == Shared, "")...)
	case e.Key != "":
		attrs = append(attrs, slog.String("key", e.Key))
	}
	attrs = observe.AppendKnown(attrs, "permit", int64(e.Permit))
	attrs = observe.AppendKnown(attrs, "permits", int64(e.Permits))
	if e.Holder != "" {
		attrs = append(attrs, slog.String("holder", e.Holder))
	}
	attrs = observe.AppendKnown(attrs, "token", e.Token)
	attrs = append(attrs, slog.Uint64("call", e.Call))
	if e.Busy {
		attrs = append(attrs, slog.Bool("busy", true))
	}
	switch e.Op {
	case EventClaim, EventLimit, EventRun, EventEvicted:
		attrs = append(attrs, slog.Bool("granted", e.Granted))
	}
	attrs = observe.AppendKnown(attrs, "n", int64(e.N))
	attrs = observe.AppendTime(attrs, "slot", e.Slot)
	attrs = observe.AppendKnown(attrs, "attempt", int64(e.Attempt))
	if e.Wait > 0 {
		attrs = append(attrs, slog.Duration("wait", e.Wait))
	}
	if e.Held > 0 {
		attrs = append(attrs, slog.Duration("held", e.Held))
	}
	if e.SinceRenewal > 0 {
		attrs = append(attrs, slog.Duration("since_renewal", e.SinceRenewal))
	}
	if e.EvictionReason != "" {
		attrs = append(attrs, slog.String("eviction_reason", e.EvictionReason))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.Any("error", e.Err))
	}
	return slog.GroupValue(attrs...)
}

// Result says in one word how it went, for the label of a metric: ok, late (a renewal after
// more than half of the TTL), skipped (somebody else has the claim or the run, or the evicted
// holder was gone), busy, limited, canceled, lost, evicted, step_down, unavailable, or error
// for everything else.
func (e Event) Result() string {
	asked := e.Op == EventClaim || e.Op == EventRun || e.Op == EventEvicted
	switch is := func(target error) bool { return errors.Is(e.Err, target) }; {
	case e.Err == nil && asked && !e.Granted, is(ErrOtherRequest):
		return "skipped"
	case e.Err == nil && e.TTL > 0 && e.SinceRenewal > e.TTL/2:
		return "late"
	case e.Err == nil:
		return "ok"
	case is(ErrEvicted):
		return "evicted"
	case is(ErrLost):
		return "lost"
	case is(ErrStepDown):
		return "step_down"
	case is(ErrNotAcquired):
		return "busy"
	case is(context.Canceled), is(context.DeadlineExceeded):
		return "canceled"
	case is(lockerr.ErrLimited):
		return "limited"
	case is(ErrUnavailable):
		return "unavailable"
	}
	return "error"
}

// Observe is an option of [LockTx], [ClaimTx] and their variants, which have no config. It
// is called once, with an EventTxLock or an EventClaim, before the call returns.
type Observe func(context.Context, Event)

func (f Observe) apply(o *options) error {
	o.observe = f
	return nil
}
