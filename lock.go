package pgxlock

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"math"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/usertx"
)

// A Lock is one acquisition. It is held from the grant until Release or Close of its Locker
// is called, or until it is lost. The Locker renews it automatically. It is safe for
// concurrent use.
//
// Nobody else is granted the lock before its local deadline has passed, unless the server
// ends the session of an advisory lock or an operator evicts the holder. The local deadline
// is a margin earlier than the server's. Err, [Lock.Renew], [Lock.Fence] and Err of the
// context from [Lock.Context] read the clock each time. The process may freeze between such
// a check and its next step, so only [Lock.Fence] prevents a late holder from writing.
type Lock struct {
	locker *Locker
	key    string
	queue  string // wait name: the semaphore's for a permit, otherwise key
	holder string // unique to this acquisition
	ttl    time.Duration
	margin time.Duration
	mode   Mode
	inDo   bool // Do holds it, and releases it

	token  int64     // these are constant from the grant on
	since  time.Time // the grant by our clock, where the server's time is unknown
	wanted bool      // of a lease: its caller had to queue, so others probably queue as well

	hold     *advisoryHold // the entry of an advisory lock; for its backend
	observed *observedLock // nil: no Observe; guarded by mu

	mu       sync.Mutex
	deadline time.Duration // on the Locker's clock; the lock is lost after it
	ended    error         // why it is not held any more; nil while it is
	closing  error         // why its contexts end while it is held
	contexts map[*lockContext]struct{}
	ending   []func()      // cancel functions of contexts, for unlock to call
	lost     chan struct{} // closed when the lock is lost; nil until the first call of Lost

	release  sync.Once
	released error // what Release returns
}

// newLock returns the Lock for one try.
func (l *Locker) newLock(key, holder string, ttl, margin time.Duration) *Lock {
	return &Lock{
		locker: l, key: key, queue: key, holder: holder, ttl: ttl, margin: margin,
	}
}

// Key returns the name that was locked. For a permit of a [Semaphore] it is the semaphore's
// name followed by # and the number of the permit.
func (l *Lock) Key() string {
	if l == nil {
		return ""
	}
	return l.key
}

// Token returns the fencing token, or 0 if the Locker is from [NewAdvisoryLocker] without
// [AdvisoryConfig.Tokens]. It is greater than the token of every earlier acquisition of this
// key, also after a crash or a failover. Shared holders have no order among themselves, and
// those of one lease have the same token. A late holder cannot write to a resource that
// remembers the greatest token it has seen and refuses smaller ones. For writes to the same
// database use [Lock.Fence], which needs no help from the resource.
func (l *Lock) Token() int64 {
	if l == nil {
		return 0
	}
	return l.token
}

// Holder returns the holder id, under which others see who holds the lock. It begins with
// the Locker's owner. For a lease it identifies the acquisition. For an advisory lock it
// identifies the session, and ends in the pid of the server's process.
func (l *Lock) Holder() string {
	if l == nil {
		return ""
	}
	return l.holder
}

// Lost returns a channel that is closed when the lock is lost; Release does not close it. A
// timer closes it, which may be late: call Err before a step that matters.
func (l *Lock) Lost() <-chan struct{} {
	if l == nil {
		lost := make(chan struct{})
		close(lost)
		return lost
	}
	l.mu.Lock()
	defer l.unlock()
	if l.lost == nil {
		l.lost = make(chan struct{})
		if errors.Is(l.ended, ErrLost) {
			close(l.lost)
		}
	}
	return l.lost
}

// Err returns nil while the lock is held. Afterwards it always returns an error that matches
// [ErrLost], [ErrReleased] or [ErrClosed]. It reads the clock: a call that starts at or
// after the local deadline never returns nil.
func (l *Lock) Err() error {
	if l == nil {
		return l.fail("hold", missingReceiver(l))
	}
	l.mu.Lock()
	defer l.unlock()
	return l.look()
}

// Deadline returns the local deadline: the local time at which the lock is lost if no further
// renewal succeeds. ok is false for a lock without a TTL.
func (l *Lock) Deadline() (t time.Time, ok bool) {
	if l == nil {
		return time.Time{}, false
	}
	l.mu.Lock()
	defer l.unlock()
	if l.deadline == forever {
		return time.Time{}, false
	}
	return time.Now().Add(l.deadline - l.locker.now()), true
}

// Renew renews the lock now, in addition to the automatic renewals. It returns nil if the
// lock is held for its TTL from now, and ErrLost if it was too late. With any other error it
// could not find out before ctx ended, and the lock is as before.
func (l *Lock) Renew(ctx context.Context) error {
	if err := cmp.Or(missing(ctx, l), l.Err()); err != nil {
		return l.fail("renew", err)
	}
	return l.fail("renew", l.locker.backend.renew(ctx, l))
}

// Fence protects tx from a late holder. Call it first, at the top level of the transaction
// that writes under the lock. If it returns nil, nobody can take over the lock until the
// transaction has ended, however long this process is frozen and whatever expires meanwhile.
// It does not wait for anything of pgxlock, and renewals continue.
//
// After [ErrLost] roll back: the transaction must not write. The loss may concern this
// transaction alone, if somebody is about to take over an expired lease. [ErrStaleSnapshot]
// means that the transaction is REPEATABLE READ or SERIALIZABLE and older than the lock;
// SQLSTATE 40001 there, that the lock changed hands since. [ErrReadOnly] means that there is
// nothing to protect. SQLSTATE 55P03 means that the transaction is REPEATABLE READ or
// SERIALIZABLE, and that somebody locked the row by hand. Each of these errors aborts the
// transaction, unless the local deadline had passed and nothing was sent.
//
// The protection ends with the transaction, and with a rollback to an earlier savepoint:
// Fence refuses a nested transaction of pgx with [errors.ErrUnsupported]. tx must be on the
// Locker's database.
func (l *Lock) Fence(ctx context.Context, tx pgx.Tx) error {
	if isSavepoint(tx) {
		return l.fail("fence", fmt.Errorf("tx is nested, so that rolling it back would end the protection; fence the outermost transaction: %w", errors.ErrUnsupported))
	}
	return l.fence(ctx, usertx.Pgx(tx))
}

// FenceSQL is [Lock.Fence] for database/sql, with any driver for PostgreSQL. It can tell
// errors apart if they have a method SQLState, as those of pgx and lib/pq do. It cannot
// detect a savepoint: call it before the first one.
func (l *Lock) FenceSQL(ctx context.Context, tx *sql.Tx) error {
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
	return l.fail("fence", l.locker.backend.fence(ctx, tx, l))
}

// isSavepoint reports whether tx was returned by Begin of a pgx transaction. pgx does not
// export that type; a test compares its name with what Begin returns.
func isSavepoint(tx pgx.Tx) bool { return fmt.Sprintf("%T", tx) == "*pgx.dbSimulatedNestedTx" }

// Release releases the lock. The end of ctx does not stop it. It takes as long as a
// statement. While a fenced transaction is open, or the server is away, it tries for 5 s,
// which a dead network stretches to 15 s. After that a lease is no longer renewed and
// expires, and the error says so; an advisory lock ends with its session, and the error is
// ErrLost. The contexts of the lock end when Release is called. Release returns nil if the
// lock was held until then, and ErrLost if it was lost before. A second Release returns
// what the first returned.
func (l *Lock) Release(ctx context.Context) error {
	err := missing(ctx, l)
	switch {
	case l == nil:
		return l.fail("release", err)
	case err != nil: // callers of a deferred Release seldom check its error
		return cmp.Or(l.end(context.Background(), ErrReleased), l.fail("release", err))
	}
	return l.end(ctx, ErrReleased)
}

func (l *Lock) end(ctx context.Context, why error) error {
	l.release.Do(func() {
		l.mu.Lock()
		lost := l.look()
		if lost == nil {
			l.finish(l.reason(why))
		}
		observed := l.observed
		event := observed.now(EventReleased)
		l.unlock()
		if lost != nil {
			l.locker.backend.discard(l) // its row may still exist
			l.released = l.fail("release", lost)
		} else {
			l.released = l.fail("release", l.locker.backend.release(l))
		}
		observed.released(ctx, event, l.released)
	})
	return l.released
}

// Context returns a context for the work under the lock: a child of parent that ends when the
// lock does, with a cause that matches [ErrLost], [ErrReleased] or [ErrClosed]. Its Err reads
// the clock, so that it is right even on the first line after the process was frozen. A
// timer closes its Done and ends contexts derived from it. Call cancel when the work is
// over.
func (l *Lock) Context(parent context.Context) (context.Context, context.CancelFunc) {
	if err := missing(parent, l); err != nil {
		return endedContext(l.fail("hold", err))
	}
	inner, cancel := context.WithCancelCause(parent)
	c := &lockContext{Context: inner, lock: l, cancel: cancel}
	l.mu.Lock()
	defer l.unlock()
	if l.contexts == nil {
		l.contexts = make(map[*lockContext]struct{})
	}
	l.contexts[c] = struct{}{}
	if err := l.look(); err != nil {
		l.cancelContexts(err)
	} else if l.closing != nil {
		l.cancelContexts(l.closing)
	}
	context.AfterFunc(inner, func() {
		l.mu.Lock()
		defer l.unlock()
		delete(l.contexts, c)
	})
	return c, func() { cancel(context.Canceled) }
}

// A lockContext is a context whose Err checks the lock.
type lockContext struct {
	context.Context // with a cancel of its own
	lock            *Lock
	cancel          context.CancelCauseFunc
}

func (c *lockContext) Err() error {
	if err := c.lock.Err(); err != nil {
		c.cancel(err) // the lock may have noticed just now, and be about to end c
	}
	return c.Context.Err()
}

// heldKey is the context key under which a lockContext returns itself.
type heldKey struct{}

func (c *lockContext) Value(key any) any {
	if key == (heldKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// heldBy yields the locks that ctx comes from, the last one first.
func heldBy(ctx context.Context) iter.Seq[*Lock] {
	return func(yield func(*Lock) bool) {
		for {
			c, ok := ctx.Value(heldKey{}).(*lockContext)
			if !ok || !yield(c.lock) {
				return
			}
			ctx = c.Context
		}
	}
}

// holds reports whether ctx comes from a lock on this key that is still held.
func (l *Locker) holds(ctx context.Context, key string) bool {
	for lock := range heldBy(ctx) {
		if lock.locker == l && l.backend.name(lock.queue) == l.backend.name(key) && lock.Err() == nil {
			return true
		}
	}
	return false
}

// granted records the answer to a request. It returns false if the answer came so late that
// the local deadline has passed. sent is the time before the request, and now the time after
// the answer.
func (l *Lock) granted(token int64, sent, now time.Duration) bool {
	l.mu.Lock()
	defer l.unlock()
	l.token = token
	l.deadline = l.believedUntil(sent)
	return l.lookAt(now) == nil
}

// forever is the deadline of a lock without a TTL.
const forever = time.Duration(math.MaxInt64)

// believedUntil returns the local deadline after a successful request.
func (l *Lock) believedUntil(sent time.Duration) time.Duration {
	if l.ttl == 0 {
		return forever
	}
	return sent + l.ttl - l.margin
}

// admit starts the hold: from now on the Locker renews and watches the lock.
func (l *Lock) admit(inDo bool) error {
	l.mu.Lock()
	now := l.locker.now()
	err := l.lookAt(now)
	if err == nil {
		l.inDo = inDo
		l.locker.mu.Lock()
		l.locker.held[l] = struct{}{}
		l.locker.mu.Unlock()
		l.locker.backend.keep(l)
		l.locker.watch.add(l, now)
	}
	l.unlock()
	if err == nil && l.locker.calls.Closing().Err() != nil {
		err = ErrClosed
	}
	if err != nil {
		_ = l.end(context.Background(), ErrClosed)
	}
	return err
}

// renewed moves the deadline, unless it has passed: a lock that was once reported as lost
// stays lost.
func (l *Lock) renewed(sent time.Duration) error {
	l.mu.Lock()
	defer l.unlock()
	if err := l.look(); err != nil {
		return err
	}
	if until := l.believedUntil(sent); until > l.deadline {
		l.deadline = until
		l.observed.renewed(nil)
	}
	return nil
}

// notRenewed records a renewal that failed and is tried again.
func (l *Lock) notRenewed(err error) {
	l.mu.Lock()
	defer l.unlock()
	if l.ended == nil {
		l.observed.renewed(l.fail("renew", err))
	}
}

// lose ends the hold because of what the server said.
func (l *Lock) lose(why error) error {
	l.mu.Lock()
	defer l.unlock()
	if err := l.look(); err != nil {
		return err
	}
	l.finish(l.reason(&lostError{why}))
	return l.ended
}

var errDeadlinePassed = errors.New("it was not renewed before its deadline")

// A lostError is ErrLost, and why.
type lostError struct{ why error }

func (e *lostError) Error() string   { return ErrLost.Error() + ": " + e.why.Error() }
func (e *lostError) Unwrap() []error { return []error{ErrLost, e.why} }

// endContexts ends the contexts of a lock that is still held.
func (l *Lock) endContexts(why error) {
	l.mu.Lock()
	defer l.unlock()
	l.closing = l.reason(why)
	l.cancelContexts(l.closing)
}

func (l *Lock) reason(err error) error {
	return &Error{Op: "hold", Key: l.key, Kind: l.locker.kind, Err: err}
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
	return l.locker.fail(op, l.key, err)
}

// The methods below require l.mu, which is locked before the mutexes of the Locker and of its
// backend. Use unlock to unlock it.

// look reads the clock, and returns why the lock is no longer held, or nil.
func (l *Lock) look() error { return l.lookAt(l.locker.now()) }

func (l *Lock) lookAt(now time.Duration) error {
	if l.ended == nil && now >= l.deadline {
		l.finish(l.reason(&lostError{errDeadlinePassed}))
	}
	return l.ended
}

func (l *Lock) finish(why error) {
	l.ended = why
	if errors.Is(why, ErrLost) {
		if l.lost != nil {
			close(l.lost)
		}
		l.observed.lost(why, l.deadline)
	}
	l.cancelContexts(why)
	l.locker.forget(l)
}

func (l *Lock) cancelContexts(why error) {
	for c := range l.contexts {
		l.ending = append(l.ending, func() { c.cancel(why) })
	}
	clear(l.contexts)
}

// unlock unlocks l.mu and then ends contexts: ending a context calls methods of its parents,
// which are the caller's and may check this lock.
func (l *Lock) unlock() {
	ending := l.ending
	l.ending = nil
	l.mu.Unlock()
	for _, end := range ending {
		end()
	}
}

// endedContext returns a context that has ended with the cause err.
func endedContext(err error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(err)
	return ctx, func() {}
}

// A watch ends the locks of a Locker whose deadlines have passed, where nobody calls a
// method that would notice. Go's timers stop while the machine sleeps, so it never waits
// longer than half a lock's margin: then Done is closed before somebody else can acquire
// the lock. One timer serves all locks, and runs until there are none: a lock that is
// acquired and released meanwhile costs it nothing.
type watch struct {
	locker *Locker

	mu    sync.Mutex
	timer *time.Timer
	due   time.Duration // when the timer fires, on the Locker's clock; 0: it is stopped
}

// add watches a lock. l.mu must be held.
func (w *watch) add(l *Lock, now time.Duration) {
	if l.deadline != forever {
		w.lookIn(l.patience(now), now)
	}
}

// patience returns how long the watch may leave the lock unchecked. l.mu must be held.
func (l *Lock) patience(now time.Duration) time.Duration {
	return max(min(l.margin/2, l.deadline-now), 0)
}

// lookIn makes the watch check all locks after d at the latest.
func (w *watch) lookIn(d, now time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.due != 0 && w.due <= now+d {
		return
	}
	w.due = now + d
	if w.timer == nil {
		w.timer = time.AfterFunc(d, w.look)
	} else {
		w.timer.Reset(d)
	}
}

// look checks every lock.
func (w *watch) look() {
	w.mu.Lock()
	w.due = 0
	w.mu.Unlock()
	next := forever
	for _, l := range w.locker.locks() {
		l.mu.Lock()
		now := w.locker.now()
		if l.lookAt(now) == nil && l.deadline != forever {
			next = min(next, l.patience(now))
		}
		l.unlock()
	}
	if next != forever {
		w.lookIn(next, w.locker.now())
	}
}
