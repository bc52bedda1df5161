package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/usertx"
)

// A Lock is one acquisition; the package comment tells its life. It is safe for concurrent use.
type Lock struct {
	locker *Locker
	hold   hold.Hold
	inDo   bool // Do holds it, and releases it

	ended    Error                        // what the hold reports once it has ended
	observed atomic.Pointer[observedLock] // nil: no Observe

	release  sync.Once
	released error // what Release returns
}

// newLock returns the Lock for one try.
func (l *Locker) newLock(key string) *Lock {
	lock := &Lock{locker: l}
	l.holds.Begin(&lock.hold, (*lockOwner)(lock), key, l.name(key))
	return lock
}

// Key returns the name that was locked; [Locker.Semaphore] has that of a permit.
func (l *Lock) Key() string {
	if l == nil {
		return ""
	}
	return l.hold.Key
}

// Token returns the fencing token, or 0 if the Locker is from [NewAdvisoryLocker] without
// [AdvisoryConfig.Tokens]. It is greater than the token of every earlier acquisition of this
// key, also after a crash or a failover. Shared holders have no order among themselves: those
// of one lease have one token together, after a [Lock.Downgrade] that of the exclusive lock,
// but greater ones if they join it after a failover or a crash.
func (l *Lock) Token() int64 {
	if l == nil {
		return 0
	}
	return l.hold.Token
}

// Holder returns the holder id, under which others see who holds the lock. It begins with the
// Locker's owner. For a lease it identifies the acquisition; for an advisory lock the session,
// with the pid of the server's process at the end.
func (l *Lock) Holder() string {
	if l == nil {
		return ""
	}
	return l.hold.Holder
}

// Lost returns a channel that is closed when the lock is lost; Release does not close it. A
// timer closes it, which may be late: call Err before a step that matters.
func (l *Lock) Lost() <-chan struct{} {
	if l == nil {
		lost := make(chan struct{})
		close(lost)
		return lost
	}
	return l.hold.Lost()
}

// Err returns nil while the lock is held. Afterwards it always returns an error that matches
// [ErrLost], [ErrReleased] or [ErrClosed]. It reads the clock: a call that starts at or
// after the local deadline never returns nil.
func (l *Lock) Err() error {
	if l == nil {
		return l.fail("hold", missingReceiver(l))
	}
	return l.hold.Err()
}

// Deadline returns the local deadline: the local time at which the lock is lost if no further
// renewal succeeds. ok is false for a lock without a TTL.
func (l *Lock) Deadline() (t time.Time, ok bool) {
	if l == nil {
		return time.Time{}, false
	}
	return l.hold.Deadline()
}

// Renew renews the lock now, in addition to the automatic renewals. It returns nil if the
// lock is held for its TTL from now, and ErrLost if it was too late. After any other error
// the lock is as before: Renew got no answer before ctx ended.
func (l *Lock) Renew(ctx context.Context) error {
	if err := cmp.Or(missing(ctx, l), l.Err()); err != nil {
		return l.fail("renew", err)
	}
	return l.fail("renew", l.locker.backend.Renew(ctx, &l.hold))
}

// SetTTL renews the lock as [Lock.Renew] does, but for ttl, and so does each renewal from now
// on, as with the option [TTL]. A request that got no answer may have made the lease shorter
// until the next renewal, so that [Lock.Deadline] is that of the shorter TTL until then. An
// advisory lock has the TTL of its session: the error matches [errors.ErrUnsupported].
func (l *Lock) SetTTL(ctx context.Context, ttl time.Duration) error { return l.change(ctx, TTL(ttl)) }

// SetMetadata renews the lock, and replaces its [Metadata]. The errors are those of
// [Lock.SetTTL]; without an answer, the metadata is the new or the old one.
func (l *Lock) SetMetadata(ctx context.Context, metadata string) error {
	return l.change(ctx, Metadata(metadata))
}

// change makes a held lock as if it had been acquired with the option.
func (l *Lock) change(ctx context.Context, opt AcquireOption) error {
	err := missing(ctx, l)
	var o options
	if err == nil {
		err = cmp.Or(l.locker.collect(&o, []AcquireOption{opt}), l.Err())
	}
	if err != nil {
		return l.fail("change", err)
	}
	return l.fail("change", l.locker.backend.Change(ctx, &l.hold, o.TTL, o.Metadata))
}

// Fence protects tx from a late holder. Call it first, at the top level of the transaction that
// writes under the lock. If it returns nil, nobody can take over the lock until the transaction
// has ended, however long this process is frozen and whatever expires meanwhile. Fence does not
// wait for other holders or waiters, and renewals continue.
//
// After [ErrLost] roll back: the transaction must not write. The loss may concern only this
// transaction, if somebody is about to take over an expired lease. Other errors are
// [ErrStaleSnapshot], if the transaction is REPEATABLE READ or SERIALIZABLE and older than the
// lock, there also SQLSTATE 40001, if the lock has changed hands since its snapshot, and 55P03,
// if somebody has locked the row by hand; and [ErrReadOnly], if the transaction cannot write,
// so that there is nothing to protect. Each of them aborts the transaction, unless the local
// deadline had passed and nothing was sent.
//
// The protection ends with the transaction, and with a rollback to an earlier savepoint: Fence
// refuses a nested transaction of pgx with [errors.ErrUnsupported]. tx must be on the Locker's
// database.
func (l *Lock) Fence(ctx context.Context, tx pgx.Tx) error {
	if isSavepoint(tx) {
		return l.fail("fence", fmt.Errorf("tx is nested, and rolling it back would end the protection; fence the outermost transaction: %w", errors.ErrUnsupported))
	}
	return l.fence(ctx, usertx.Pgx(tx))
}

// FenceSQL is [Lock.Fence] for database/sql. It cannot detect a savepoint: call it before
// the first one.
func (l *Lock) FenceSQL(ctx context.Context, tx SQLTx) error {
	return l.fence(ctx, usertx.SQL(tx))
}

func (l *Lock) fence(ctx context.Context, tx usertx.Tx) error {
	if err := missing(ctx, l); err != nil {
		return l.fail("fence", err)
	}
	if tx == nil {
		return l.fail("fence", errors.New("tx is nil; pass the transaction that writes"))
	}
	if err := l.Err(); err != nil {
		return l.fail("fence", err)
	}
	return l.fail("fence", l.locker.backend.Fence(ctx, tx, &l.hold))
}

// isSavepoint reports whether tx was returned by Begin of a pgx transaction. pgx does not
// export that type; a test compares its name with what Begin returns.
func isSavepoint(tx pgx.Tx) bool { return fmt.Sprintf("%T", tx) == "*pgx.dbSimulatedNestedTx" }

// Release releases the lock. It takes as long as a statement, and continues if ctx ends. While
// a fenced transaction is open, or the server cannot be reached, it retries for 5 s (up to 15 s
// on a dead network). After that a lease is no longer renewed and expires, and the error says
// so; an advisory lock ends with its session, and the error is ErrLost. The contexts of the
// lock end when Release is called. Release returns nil if the lock was held until then, even if
// the lease expires before the release arrives, and ErrLost if it was lost before, with
// [ErrEvicted] after an eviction. A second Release returns what the first returned.
func (l *Lock) Release(ctx context.Context) error {
	err := missing(ctx, l)
	switch {
	case l == nil:
		return l.fail("release", err)
	case err != nil: // callers of a deferred Release seldom check its error
		return cmp.Or(l.end(context.Background(), ErrReleased, l.sendRelease), l.fail("release", err))
	}
	return l.end(ctx, ErrReleased, l.sendRelease)
}

func (l *Lock) sendRelease() error { return l.locker.backend.Release(&l.hold) }

// Downgrade releases an exclusive lease, as [Lock.Release] does, and returns a Lock that shares
// it, with the same token. Nobody can acquire it exclusively in between, while callers that
// share it may join. After an error nothing is held. There is no upgrade, because two would
// wait for each other for ever: Acquire of an exclusive lock under the context of a shared one
// fails with [ErrDeadlock]. For an advisory lock, and for a permit, the error matches
// [errors.ErrUnsupported], and the lock is as before.
func (l *Lock) Downgrade(ctx context.Context) (*Lock, error) {
	if err := cmp.Or(missing(ctx, l), l.Err()); err != nil {
		return nil, l.fail("downgrade", err)
	}
	if err := l.locker.begin(ctx); err != nil {
		return nil, l.fail("downgrade", err)
	}
	defer l.locker.calls.End()
	switch {
	case l.hold.Mode == hold.Shared:
		return nil, l.fail("downgrade", errors.New("the lock is shared already"))
	case l.locker.kind == KindAdvisory || l.hold.Key != l.hold.Queue.Key:
		return nil, l.fail("downgrade", fmt.Errorf("only a lease that is no permit can be shared: %w", errors.ErrUnsupported))
	}
	o := l.locker.options()
	o.Mode = hold.Shared
	observed := l.locker.observeCall(ctx, l.hold.Key, &o)
	shared := l.locker.newLock(l.hold.Key)
	shared.hold.Mode = hold.Shared
	downgraded := false
	err := l.end(ctx, ErrReleased, func() error {
		downgraded = true
		return l.locker.backend.Share(&l.hold, &shared.hold)
	})
	switch {
	case err == nil && !downgraded:
		err = l.fail("downgrade", ErrReleased)
	case err == nil:
		err = l.fail("downgrade", shared.admit(false))
	}
	if err != nil {
		observed.failed(err)
		return nil, err
	}
	observed.succeeded(shared)
	return shared, nil
}

// end ends the hold, and releases the lock.
func (l *Lock) end(ctx context.Context, why error, release func() error) error {
	l.release.Do(func() {
		lost := l.hold.End(why)
		observed := l.observed.Load() // not before the end: a call that returns the Lock looks for the end behind this
		event := observed.now(EventReleased)
		if lost != nil {
			l.locker.backend.Discard(&l.hold) // its row may still exist
			l.released = l.fail("release", lost)
		} else {
			l.released = l.fail("release", release())
		}
		observed.released(ctx, event, l.released)
	})
	return l.released
}

// Context returns a context for the work under the lock: a child of parent that ends when the
// lock does, with a cause that matches [ErrLost], [ErrReleased] or [ErrClosed]. A timer closes
// its Done and ends contexts derived from it, which may be late. Call cancel when the work is
// over.
func (l *Lock) Context(parent context.Context) (context.Context, context.CancelFunc) {
	if err := missing(parent, l); err != nil {
		return endedContext(l.fail("hold", err))
	}
	return l.hold.Context(parent)
}

// admit starts the hold, unless the Locker is being closed.
func (l *Lock) admit(inDo bool) error {
	l.inDo = inDo
	err := l.hold.Admit()
	if err == nil && l.locker.calls.Closing().Err() != nil {
		err = ErrClosed
	}
	if err != nil {
		_ = l.end(context.Background(), ErrClosed, l.sendRelease)
	}
	return err
}

// A lockOwner is the Lock to its hold, whose methods users do not see.
type lockOwner Lock

// Close implements [hold.Owner].
func (o *lockOwner) Close(ctx context.Context) error {
	l := (*Lock)(o)
	if l.inDo { // still in use: no other caller may have it before it expires
		return nil
	}
	return l.end(ctx, ErrClosed, l.sendRelease)
}

// Ended implements [hold.Owner].
func (o *lockOwner) Ended(why error, until time.Duration) error {
	l := (*Lock)(o)
	l.ended = Error{Op: "hold", Key: l.hold.Key, Kind: l.locker.kind, Err: why}
	if errors.Is(why, ErrLost) {
		l.observed.Load().lost(&l.ended, until)
	}
	return &l.ended
}

// Renewed implements [hold.Owner].
func (o *lockOwner) Renewed(err error) {
	l := (*Lock)(o)
	l.observed.Load().renewed(l.hold.TTL, l.fail("renew", err))
}

func (l *Lock) fail(op string, err error) error {
	if err == nil {
		return nil
	}
	if l == nil {
		return fail(op, "", 0, err)
	}
	if e, ok := errors.AsType[*Error](err); ok && e.Op == "hold" {
		err = e.Err
	}
	return l.locker.fail(op, l.hold.Key, err)
}

// endedContext returns a context that has ended with the cause err.
func endedContext(err error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(err)
	return ctx, func() {}
}
