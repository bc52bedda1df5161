package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
)

// Kind says what a Locker's locks are made of. Locks of different kinds do not
// exclude each other, also not those of the same key, so the kind is chosen once, with the
// Locker.
type Kind uint8

const (
	// KindAdvisory is one of PostgreSQL's advisory locks: what LockTx takes.
	KindAdvisory Kind = iota + 1

	// KindLease is a row in the table distributed_locks that expires unless renewed.
	KindLease

	// KindMemory is a lock in this process.
	KindMemory
)

func (k Kind) String() string {
	switch k {
	case KindAdvisory:
		return "advisory"
	case KindLease:
		return "lease"
	case KindMemory:
		return "memory"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// A Locker hands out Locks of one Kind and is one liveness unit: what it holds
// is renewed, lost and closed together. It is safe for concurrent use. Most
// programs need one. [NewLeaseLocker], [NewAdvisoryLocker] and [NewMemoryLocker] make it; the zero
// value is of no use.
type Locker struct {
	kind    Kind
	backend backend
	now     clock.Clock
	backoff func(attempt int) time.Duration
	log     *slog.Logger
	observe func(context.Context, Event) // nil: nobody
	telling batcher.Background           // what observe is told in goroutines of ours
	watch   watch
	lines   lines
	queue   *queue // nil: other processes are not known to wait
	leading leading

	mu   sync.Mutex
	held map[*Lock]struct{}

	calls     batcher.Calls
	closeOnce sync.Once
	closed    chan struct{} // closed when Close is through, after closeErr is set
	closeErr  error
}

// newLocker makes a Locker that still lacks its backend.
func newLocker(kind Kind, now clock.Clock, backoff func(int) time.Duration, log *slog.Logger) *Locker {
	l := &Locker{kind: kind, now: now, backoff: backoff, log: log, held: make(map[*Lock]struct{}), calls: batcher.NewCalls(), closed: make(chan struct{})}
	l.watch.locker, l.leading.locker = l, l
	return l
}

// backend is what the kinds of Locker differ in. The Locker above it owns
// waiting, deadlines, contexts and closing; a backend owns the traffic with the
// server, and none of it runs under a caller's context: ctx ends a wait for the
// answer, never a statement that was sent.
type backend interface {
	// options returns the defaults of a call, and takes tells which options it
	// can honour.
	options() options
	takes(Option) bool

	// check says what is wrong with a key, and name which lock it names.
	check(key string) error
	name(key string) lockkey.Name

	// try asks once for each of the locks, in one go where all are free. The
	// error of one is a *busyError if somebody has it, and ctx's cause if the
	// answer did not arrive before ctx ended; the grant that it may still bring is
	// then given back.
	try(ctx context.Context, keys []string, o options) []attempt

	// holders returns who has the keys now.
	holders(ctx context.Context, keys []string) ([]Holder, error)

	// keep renews the lock by itself until drop. renew does it now.
	keep(l *Lock)
	drop(l *Lock)
	renew(ctx context.Context, l *Lock) error

	// release gives the lock back. It returns ErrLost if somebody took it away. When
	// that, or anything else, may have freed a lock, the backend tells lines.freed.
	release(l *Lock) error

	// holdID is what others know the lock by while it is held; "" if they do not.
	holdID(l *Lock) string

	// discard removes, in the background, what may be left of the lock.
	discard(l *Lock)

	// fence pins the lock for a transaction.
	fence(ctx context.Context, tx usertx.Tx, l *Lock) error

	// close ends the traffic, renewals included, after what is under way; but not
	// later than ctx.
	close(ctx context.Context) error
}

// attempt is what became of a try: a lock that is granted, or an error.
type attempt struct {
	lock *Lock
	err  error
}

// busyError says that somebody else holds the key, and who.
type busyError struct {
	holder    string
	remaining time.Duration
	here      bool  // it is this Locker that has it, so that lines.freed will be told
	wanted    bool  // by other processes as well
	left      bool  // to other processes, which are woken: nobody was asked
	soon      bool  // it is worth to ask again soon, though nobody gives anything back
	ended     error // the context's error, if that ended the wait
}

func (e *busyError) Error() string {
	if e.ended == nil {
		return ErrNotAcquired.Error()
	}
	return ErrNotAcquired.Error() + ": " + e.ended.Error()
}

func (e *busyError) Unwrap() []error {
	if e.ended == nil {
		return []error{ErrNotAcquired}
	}
	return []error{ErrNotAcquired, e.ended}
}

// Kind returns what this Locker's locks are made of.
func (l *Locker) Kind() Kind {
	if l == nil {
		return 0
	}
	return l.kind
}

// begin counts a call under ctx, which calls.End ends.
func (l *Locker) begin(ctx context.Context) error {
	if err := missing(ctx, l); err != nil {
		return err
	}
	return l.calls.Begin()
}

// Acquire waits until the lock is granted, ctx ends or MaxWait is over. The
// context bounds the wait only: the lock outlives it, is renewed by itself, and
// ends with Release (use [Lock.Context] for the work).
//
// Who waits is served in turn: in the order of the calls within this Locker, and
// fairly between processes. It does not keep a connection, a transaction or a
// snapshot for that. Who waits with a lock in hand must pass on the context of that
// lock: a circle of such waits, also between processes, ends with [ErrDeadlock] for
// one of them.
//
// On failure nothing is held, and the error is an [*Error]: with
// [ErrNotAcquired] if somebody else has the lock, [ErrDeadlock] if ctx comes
// from a lock on the same key or in such a circle, [ErrClosed], [ErrSchema], [ErrReadOnly],
// [ErrUnavailable], or what the server said; never with [ErrLost]: a lock that is lost
// before Acquire can return it is asked for again, by TryAcquire once. A failure to reach a primary is returned at
// once on the first attempt; once a server has said that the key is busy it is
// waited out, without a bound but ctx and MaxWait. What the server refuses for good, such as
// a password, ends the wait.
//
// Try again after ErrNotAcquired and ErrUnavailable, and after the ErrDeadlock of a circle when
// you have released what you hold; after other errors something has to be changed first.
func (l *Locker) Acquire(ctx context.Context, key string, opts ...Option) (*Lock, error) {
	if err := l.begin(ctx); err != nil {
		return nil, l.fail("acquire", key, err)
	}
	defer l.calls.End()
	return l.acquire(ctx, key, false, nil, opts)
}

// TryAcquire is Acquire with [NoWait]: it asks once, and returns an error with
// [ErrNotAcquired] if the lock is held. It may come before those who wait, but not with
// [Shared]: then it also fails with ErrNotAcquired while a writer waits, in this Locker or
// in another one that has its place in the queue. (For an advisory lock that costs one
// more round trip, and needs the migrations; where the queue cannot be asked
// it is as if nobody waited there.)
func (l *Locker) TryAcquire(ctx context.Context, key string, opts ...Option) (*Lock, error) {
	if err := l.begin(ctx); err != nil {
		return nil, l.fail("acquire", key, err)
	}
	defer l.calls.End()
	for _, opt := range opts {
		if w, ok := opt.(MaxWait); ok && w > 0 {
			return nil, l.fail("acquire", key, fmt.Errorf("TryAcquire does not wait, so %v has no meaning; use Acquire: %w", w, errors.ErrUnsupported))
		}
	}
	return l.acquire(ctx, key, false, []Option{NoWait}, opts)
}

// Do acquires the lock, calls fn and releases the lock, also when fn panics. It
// is what most callers should use. fn's context ends when the lock is lost, with
// cause [ErrLost], and when ctx ends.
//
// Do returns the error of Acquire, and fn was not called then; or fn's error,
// joined with ErrLost if the lock was lost before fn had returned.
func (l *Locker) Do(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...Option) error {
	_, err := l.do(ctx, key, fn, nil, opts)
	return err
}

// TryDo is Do for "skip if busy": if somebody else has the lock it returns false
// and no error, and fn was not called. With MaxWait it waits that long before it
// skips. An ErrNotAcquired that fn returns comes back with ran = true.
func (l *Locker) TryDo(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...Option) (ran bool, err error) {
	ran, err = l.do(ctx, key, fn, []Option{NoWait}, opts)
	if busy, ok := errors.AsType[*busyError](err); !ran && ok && busy.ended == nil {
		return false, nil
	}
	return ran, err
}

func (l *Locker) do(ctx context.Context, key string, fn func(context.Context, *Lock) error, defaults, opts []Option) (ran bool, err error) {
	if err := l.begin(ctx); err != nil {
		return false, l.fail("acquire", key, err)
	}
	defer l.calls.End()
	if fn == nil {
		return false, l.fail("acquire", key, errors.New("fn is nil"))
	}
	lock, err := l.acquire(ctx, key, true, defaults, opts)
	if err != nil {
		return false, err
	}

	// Deferred, so that a panic and runtime.Goexit in fn release as well.
	defer func() {
		released := lock.Release(ctx)
		if errors.Is(released, ErrLost) && !errors.Is(err, ErrLost) {
			err = errors.Join(err, released)
		} else if released != nil {
			l.log.Warn("pgxlock: release failed; the lock is left to its end", "key", key, "error", released)
		}
	}()
	work, cancel := lock.Context(ctx)
	defer cancel()
	return true, fn(work, lock)
}

// Close refuses new calls, ends every [Lock.Context] with cause [ErrClosed],
// waits for running Do until ctx ends, and then releases what is held. What a Do
// still uses then is left to its expiry: it is not renewed any more, and nobody
// gets it earlier; but an advisory lock ends with the session, and is lost. Close
// returns ctx's error in that case, and when ctx ended before everything was
// released. Do not call it inside Do, which would wait for itself. A second Close
// waits for the first, until its own ctx ends.
func (l *Locker) Close(ctx context.Context) error {
	if err := missing(ctx, l); err != nil {
		return l.fail("close", "", err)
	}
	l.closeOnce.Do(func() {
		go func() {
			defer close(l.closed)
			l.closeErr = l.shutdown(ctx)
		}()
	})
	select {
	case <-l.closed:
	case <-ctx.Done():
		select {
		case <-l.closed:
		case <-time.After(2 * closeGrace): // the first caller's ctx may be another
			return l.fail("close", "", lockerr.ContextError(ctx))
		}
	}
	if l.closeErr != nil {
		return l.fail("close", "", l.closeErr)
	}
	return nil
}

// closeGrace is how long Close tries to release after its context has ended.
const closeGrace = time.Second

func (l *Locker) shutdown(ctx context.Context) error {
	l.calls.Close()
	for _, lock := range l.locks() {
		lock.endContexts(ErrClosed)
	}
	err := until(ctx, l.calls.Wait)
	l.leading.stop()

	ctx, cancel := grace(ctx)
	defer cancel()
	released := until(ctx, func() {
		var releasing sync.WaitGroup
		for _, lock := range l.locks() {
			if !lock.inDo { // still in use: nobody may have it before it expires
				releasing.Go(func() {
					if err := lock.end(ctx, ErrClosed); err != nil {
						l.log.Warn("pgxlock: release failed; the lock is left to its end", "key", lock.key, "error", err)
					}
				})
			}
		}
		releasing.Wait()
	})
	return cmp.Or(err, released, l.backend.close(ctx), until(ctx, l.telling.Wait))
}

// until waits for wait to return, or for ctx to end.
func until(ctx context.Context, wait func()) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return lockerr.ContextError(ctx)
	}
}

// grace returns a context that ends a moment after ctx.
func grace(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(closeGrace, func() { cancel(lockerr.ContextError(ctx)) })
	})
	return longer, func() {
		stop()
		cancel(nil)
	}
}

// locks returns what is held now.
func (l *Locker) locks() []*Lock {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make([]*Lock, 0, len(l.held))
	for lock := range l.held {
		held = append(held, lock)
	}
	return held
}

// forget takes a lock that ended out of what is held and renewed.
func (l *Locker) forget(lock *Lock) {
	l.mu.Lock()
	delete(l.held, lock)
	l.mu.Unlock()
	l.backend.drop(lock)
}

// fail makes the error that a method returns.
func (l *Locker) fail(op, key string, err error) error {
	return fail(op, key, l.Kind(), err)
}
