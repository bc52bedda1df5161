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

// A Lock is one acquisition: it is held from the grant until Release or Close of
// its Locker is called, or until it is lost. It renews itself meanwhile. It is
// safe for concurrent use.
//
// Nobody else is granted the lock before its local deadline has passed, unless the server
// ends the session of an advisory lock or an operator evicts the holder. The
// deadline is a margin earlier than the server's, and Err, [Lock.Renew],
// [Lock.Fence] and Err of the context from [Lock.Context] read the clock each
// time. Between such a check and what is done next the process may freeze, so
// only [Lock.Fence] keeps a late holder from writing.
type Lock struct {
	locker *Locker
	key    string
	queue  string // of a permit: what those wait for who would have it; else the key
	holder string // unique to this acquisition
	ttl    time.Duration
	margin time.Duration
	mode   Mode
	inDo   bool // a Do uses it, and releases it

	token  int64     // these are constant from the grant on
	since  time.Time // the grant by our clock; only where the server's is not known
	wanted bool      // of a lease: its caller had to queue, and is seldom the last who does

	hold     *advisoryHold // what an advisory lock is one of; for its backend
	observed *observedLock // nil: nobody is told; mu guards it

	mu       sync.Mutex
	deadline time.Duration // on the Locker's clock: believe no longer than this
	ended    error         // why it is not held any more; nil while it is
	closing  error         // why its contexts end although it is held
	contexts map[*lockContext]struct{}
	ending   []func()      // cancels contexts that end; for unlock
	lost     chan struct{} // closed when it is lost; nil until somebody asks for it

	release  sync.Once
	released error // what Release returns
}

// newLock makes the Lock for one try.
func (l *Locker) newLock(key, holder string, ttl, margin time.Duration) *Lock {
	return &Lock{
		locker: l, key: key, queue: key, holder: holder, ttl: ttl, margin: margin,
	}
}

// Key returns the name that was locked; of a permit of a [Semaphore] that is the
// semaphore's with # and the number of the permit.
func (l *Lock) Key() string {
	if l == nil {
		return ""
	}
	return l.key
}

// Token returns the fencing token; 0 if the Locker is one of [NewAdvisoryLocker] without
// [AdvisoryConfig.Tokens]. It is greater than that of every earlier acquisition of this key,
// also after a crash or a failover; but readers are in no order among themselves, and
// readers of one lease share a token. A resource that remembers the greatest token it has seen and refuses smaller ones
// cannot be written by a late holder. For writes to the same database, [Lock.Fence] does
// it without the resource's help.
func (l *Lock) Token() int64 {
	if l == nil {
		return 0
	}
	return l.token
}

// Holder returns the id under which others see who has the lock. It begins with
// the Locker's owner. A lease has one for each acquisition; of advisory locks it
// names the session, which ends in the pid of the server's process.
func (l *Lock) Holder() string {
	if l == nil {
		return ""
	}
	return l.holder
}

// Lost returns a channel that is closed when the lock is lost; Release does not
// close it. It follows the clock by timer: look at Err where it matters.
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

// Err returns nil while the lock is held. Later it returns, for good, an error
// that matches [ErrLost], [ErrReleased] or [ErrClosed]. It reads the clock: a
// call that starts at or after the local deadline never returns nil.
func (l *Lock) Err() error {
	if l == nil {
		return l.fail("hold", missingReceiver(l))
	}
	l.mu.Lock()
	defer l.unlock()
	return l.look()
}

// Deadline returns the local time until which the lock may be believed to be
// held if no renewal succeeds any more. ok is false for a lock without a TTL.
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

// Renew renews now, besides the renewals that happen by themselves. It returns
// nil if the lock is held for its TTL from now, ErrLost if it is too late, or
// what kept it from finding out before ctx ended; the lock is then as before.
func (l *Lock) Renew(ctx context.Context) error {
	if err := cmp.Or(missing(ctx, l), l.Err()); err != nil {
		return l.fail("renew", err)
	}
	return l.fail("renew", l.locker.backend.renew(ctx, l))
}

// Fence makes tx safe from a late holder: call it first, at the top level of the
// transaction that writes under the lock. If it returns nil, nobody can take the
// lock over until the transaction has ended, however long this process is frozen
// and whatever expires meanwhile. It waits for nothing of pgxlock's, and renewals
// go on.
//
// With [ErrLost] nobody may write: roll back. The loss may concern this
// transaction only, when somebody is just about to take an expired lease.
// [ErrStaleSnapshot]: the transaction is REPEATABLE READ or SERIALIZABLE and
// older than the lock; SQLSTATE 40001 there: the lock changed hands since.
// [ErrReadOnly]: there is nothing to protect. SQLSTATE 55P03: REPEATABLE READ or
// SERIALIZABLE, and somebody has locked the row by hand. The transaction is
// aborted after each of them, except when the local deadline had passed and
// nothing was sent.
//
// The protection ends with the transaction, and with a savepoint that is rolled
// back to: a nested transaction of pgx is refused with [errors.ErrUnsupported].
// tx must be on the Locker's database.
func (l *Lock) Fence(ctx context.Context, tx pgx.Tx) error {
	if isSavepoint(tx) {
		return l.fail("fence", fmt.Errorf("tx is nested, so that rolling it back would end the protection; fence the outermost transaction: %w", errors.ErrUnsupported))
	}
	return l.fence(ctx, usertx.Pgx(tx))
}

// FenceSQL is [Lock.Fence] for database/sql, with any driver of PostgreSQL; what
// went wrong is told apart if its errors have a method SQLState, as those of pgx
// and lib/pq do. A savepoint cannot be seen here: call it before the first one.
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

// isSavepoint reports whether tx is what Begin of a pgx transaction returns. pgx
// does not export that type; a test holds its name against what Begin returns.
func isSavepoint(tx pgx.Tx) bool { return fmt.Sprintf("%T", tx) == "*pgx.dbSimulatedNestedTx" }

// Release gives the lock back. It is not stopped by ctx. It takes as long as a
// statement; while a fenced transaction is open, or the server is away, it is
// tried for 5 s, which a dead network stretches to 15 s. Then a lease is left to
// its expiry, is not renewed any more, and the error says so; an advisory lock is
// gone with its session, and the error is ErrLost. The contexts of
// the lock end when Release is called. It returns nil if the lock was held until
// then, and ErrLost if that had lapsed before. A second Release returns what the
// first returned.
func (l *Lock) Release(ctx context.Context) error {
	err := missing(ctx, l)
	switch {
	case l == nil:
		return l.fail("release", err)
	case err != nil: // what is deferred has its error seldom looked at
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
			l.locker.backend.discard(l) // its row may still stand there
			l.released = l.fail("release", lost)
		} else {
			l.released = l.fail("release", l.locker.backend.release(l))
		}
		observed.released(ctx, event, l.released)
	})
	return l.released
}

// Context returns a context for the work under the lock: a child of parent that
// ends, with a cause that matches [ErrLost], [ErrReleased] or [ErrClosed], when
// the lock does. Its Err reads the clock, so that it is right even on the first
// line after the process was frozen; its Done, and contexts made from it, follow
// by timer. Call cancel when the work is over.
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

// lockContext is a context whose Err looks at the lock.
type lockContext struct {
	context.Context // with a cancel of its own
	lock            *Lock
	cancel          context.CancelCauseFunc
}

func (c *lockContext) Err() error {
	if err := c.lock.Err(); err != nil {
		c.cancel(err) // it may have found out just now, or be about to tell us
	}
	return c.Context.Err()
}

// heldKey is the context key under which a lockContext finds itself.
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

// granted takes the answer to a request. It returns false if it came so late that
// the lock cannot be believed in any more. sent is the clock before the request,
// and now that after the answer.
func (l *Lock) granted(token int64, sent, now time.Duration) bool {
	l.mu.Lock()
	defer l.unlock()
	l.token = token
	l.deadline = l.believedUntil(sent)
	return l.lookAt(now) == nil
}

// forever is the deadline of a lock without a TTL.
const forever = time.Duration(math.MaxInt64)

// believedUntil is the local deadline that a good request gives.
func (l *Lock) believedUntil(sent time.Duration) time.Duration {
	if l.ttl == 0 {
		return forever
	}
	return sent + l.ttl - l.margin
}

// admit starts the hold: from now on the lock is renewed and watched.
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

// renewed moves the deadline, unless it has passed: what was once reported as
// lost stays lost.
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

// notRenewed takes note of a renewal that failed, and is tried again.
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

// endContexts ends the contexts while the lock is still held.
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

// The methods below need l.mu, which is taken before those of the Locker and of
// its backend, and is given back by unlock.

// look reads the clock, and returns why the lock is not held.
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

// unlock ends contexts only after l.mu is free: that calls methods of their
// parents, which are the caller's and may look at this lock.
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
