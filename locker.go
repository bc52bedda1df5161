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
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
)

// Kind is the kind of a Locker's locks, which is chosen once, with the Locker.
type Kind uint8

// The kinds of locks.
const (
	KindAdvisory Kind = iota + 1 // also that of the locks that LockTx takes
	KindLease
	KindMemory // a lock in this process
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

// A Locker hands out Locks of one Kind. Its locks share its connections: they are renewed and
// closed together, and advisory locks are lost together. It is safe for concurrent use. Make it
// with [NewLeaseLocker], [NewAdvisoryLocker] or [NewMemoryLocker]; the zero value is not
// usable.
type Locker struct {
	kind    Kind
	ttl     time.Duration // of a lease, unless a call asks for another
	space   string        // the namespace of its keys; "": none
	backend hold.Backend
	holds   hold.Group
	backoff func(attempt int) time.Duration
	log     *slog.Logger
	observe func(context.Context, Event) // nil: nobody
	telling batcher.Background           // what observe is told in goroutines of ours
	queue   *waitqueue.Queue
	leading leading

	calls     batcher.Calls
	closeOnce sync.Once
	closed    chan struct{} // closed when Close is through, after closeErr is set
	closeErr  error
}

// newLocker makes a Locker that still lacks its backend.
func newLocker(kind Kind, now clock.Clock, backoff func(int) time.Duration, log *slog.Logger) *Locker {
	l := &Locker{kind: kind, backoff: backoff, log: log, calls: batcher.NewCalls(), closed: make(chan struct{})}
	l.holds.Clock = now
	l.queue = waitqueue.New(waitqueue.Config{Closing: l.calls.Closing(), Holds: &l.holds, Backoff: backoff, Log: log})
	l.leading.locker = l
	return l
}

// now reads the clock of the Locker's holds.
func (l *Locker) now() time.Duration { return l.holds.Clock() }

// host is what the Locker gives a backend with a server.
func (l *Locker) host() hold.Host {
	return hold.Host{Clock: l.now, Log: l.log, Closing: l.calls.Closing(), Queue: l.queue}
}

// connect gives the Locker the queue of a server, in which it waits among other processes.
func (l *Locker) connect(s waitqueue.Server) {
	s.Leaders = &l.leading
	l.queue.Connect(s)
	l.leading.server, l.leading.listener = s, l.queue
}

// use completes the Locker.
func (l *Locker) use(b hold.Backend) { l.backend, l.holds.Backend = b, b }

// name returns which lock a key names.
func (l *Locker) name(key string) lockkey.Name {
	if l.kind == KindAdvisory {
		return lockkey.Name{ID: lockkey.IdentifyIn(l.space, key)}
	}
	return lockkey.Name{Key: key}
}

// check returns what is wrong with a key.
func (l *Locker) check(key string) error {
	if l.kind == KindAdvisory {
		return lockkey.CheckAdvisory(lockkey.In(l.space, key))
	}
	return lockkey.Check(key)
}

// takes reports whether this kind of Locker can honour an option of an acquire.
func (l *Locker) takes(opt AcquireOption) bool {
	switch opt.(type) {
	case TTL, Metadata, permits:
		return l.kind != KindAdvisory
	}
	return true
}

// options returns the defaults of an acquire.
func (l *Locker) options() options { return options{Request: hold.Request{TTL: l.ttl}} }

// Kind returns the kind of this Locker's locks.
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

// Acquire waits until the lock is granted, ctx ends or MaxWait is over. The context bounds only
// the wait: the Locker renews the lock after ctx has ended, until Release. Use [Lock.Context]
// for the work.
//
// On failure nothing is held, and the error is an [*Error] that wraps [ErrNotAcquired] if
// somebody else has the lock, [ErrDeadlock] if ctx comes from a lock on the same key or the
// wait is part of a cycle, [ErrClosed], [ErrSchema], [ErrReadOnly], [ErrUnavailable] or the
// server's error. It never wraps [ErrLost]: if the lock is lost before Acquire can return it,
// Acquire asks again, TryAcquire once more.
//
// Acquire waits for a connection that is slow to be made as long as for the lock: see
// docs/connections.md. If the attempt to connect fails, it returns the error at once, and it
// asks a server that is too slow for the 5 s of a statement ten times in all. After a server
// has said that the key is busy, Acquire keeps trying through such failures. An error that the
// server repeats, such as a wrong password, ends the wait.
func (l *Locker) Acquire(ctx context.Context, key string, opts ...AcquireOption) (*Lock, error) {
	if err := l.begin(ctx); err != nil {
		return nil, l.fail("acquire", key, err)
	}
	defer l.calls.End()
	lock, _, err := l.acquire(ctx, key, false, nil, opts)
	return lock, err
}

// TryAcquire is Acquire with [NoWait]: it tries once, and returns an error with
// [ErrNotAcquired] if the lock is held. It does not queue, so it may get the lock before
// waiters do. With [Shared] it also fails with ErrNotAcquired while a writer waits, in this
// Locker or in the queue of another process. For an advisory lock this check costs one more
// round trip and needs the migrations; if the queue cannot be read, it counts as empty. With
// [MaxWait] it waits that long, as Acquire does.
func (l *Locker) TryAcquire(ctx context.Context, key string, opts ...AcquireOption) (*Lock, error) {
	if err := l.begin(ctx); err != nil {
		return nil, l.fail("acquire", key, err)
	}
	defer l.calls.End()
	lock, _, err := l.acquire(ctx, key, false, []AcquireOption{NoWait}, opts)
	return lock, err
}

// Do acquires the lock, calls fn and releases the lock, also when fn panics. fn's context ends
// when the lock is lost, with cause [ErrLost], and when ctx ends. If Acquire fails, Do returns
// its error and does not call fn. Otherwise Do returns fn's error, joined with ErrLost if the
// lock was lost before fn returned.
func (l *Locker) Do(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...AcquireOption) error {
	_, err := l.do(ctx, key, fn, nil, opts)
	return err
}

// TryDo is Do for "skip if busy": if somebody else has the lock it returns false and no
// error, and does not call fn. With MaxWait it waits that long before it skips. If fn
// returns an ErrNotAcquired, TryDo returns it with ran = true.
func (l *Locker) TryDo(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...AcquireOption) (ran bool, err error) {
	ran, err = l.do(ctx, key, fn, []AcquireOption{NoWait}, opts)
	if busy, ok := errors.AsType[*hold.Busy](err); !ran && ok && busy.Ended == nil {
		return false, nil
	}
	return ran, err
}

func (l *Locker) do(ctx context.Context, key string, fn func(context.Context, *Lock) error, defaults, opts []AcquireOption) (ran bool, err error) {
	if err := l.begin(ctx); err != nil {
		return false, l.fail("acquire", key, err)
	}
	defer l.calls.End()
	if fn == nil {
		return false, l.fail("acquire", key, errors.New("fn is nil"))
	}
	lock, _, err := l.acquire(ctx, key, true, defaults, opts)
	if err != nil {
		return false, err
	}

	// Deferred, so that a panic and runtime.Goexit in fn release as well.
	defer func() {
		released := lock.Release(ctx)
		if errors.Is(released, ErrLost) && !errors.Is(err, ErrLost) {
			err = errors.Join(err, released)
		} else if released != nil {
			l.notReleased(&lock.hold, key, released)
		}
	}()
	work, cancel := lock.Context(ctx)
	defer cancel()
	return true, fn(work, lock)
}

// Close refuses new calls, ends every [Lock.Context] with cause [ErrClosed], waits for running
// Do calls until ctx ends, and then releases the other locks. If a Do is still running then,
// its lease is no longer renewed, and nobody gets it before it expires; its advisory lock ends
// with the session and is lost. In that case, and if ctx ended before everything was released,
// Close returns ctx's error. Do not call Close inside Do, which would wait for itself. A second
// Close waits for the first, until its own ctx ends. Calls that wait return [ErrClosed] at
// once; an Acquire of a lease whose context cannot end may first wait for the server's answer,
// 5 s, or on a slow server up to 30 s. Without Close, waiters of other processes may notice the
// last releases of a process that ends a second late.
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
	for _, h := range l.holds.Holds() {
		h.EndContexts(&Error{Op: "hold", Key: h.Key, Kind: l.kind, Err: ErrClosed})
	}
	err := batcher.Until(ctx, l.calls.Wait)
	l.leading.stop()

	ctx, cancel := grace(ctx)
	defer cancel()
	released := batcher.Until(ctx, func() {
		var releasing sync.WaitGroup
		for _, h := range l.holds.Holds() {
			releasing.Go(func() {
				if err := h.Close(ctx); err != nil {
					l.notReleased(h, h.Key, err)
				}
			})
		}
		releasing.Wait()
	})
	return cmp.Or(err, released, l.backend.Close(ctx), batcher.Until(ctx, l.telling.Wait))
}

// notReleased logs that the release of a lock failed. If the lock has expired meanwhile, there is
// nothing to say.
func (l *Locker) notReleased(h *hold.Hold, key string, err error) {
	if until, expires := h.Deadline(); !expires || time.Now().Before(until) {
		l.log.Warn("pgxlock: release failed; the lock ends with its TTL or its session", "key", key, "error", err)
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

// fail makes the error that a method returns.
func (l *Locker) fail(op, key string, err error) error {
	return fail(op, key, l.Kind(), err)
}
