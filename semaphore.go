package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A semaphore of n permits is n locks: jobs#1 to jobs#n for the key jobs. So a permit is all
// that a lock is, and there are never more than n. Waiters for any of them form one line,
// which is called jobs#.

// A Semaphore lets a limited number of holders in at once. Each of its permits is a lock of
// its own, with its own holder, TTL, token and metadata. The permit of a holder that died
// is free when its TTL is over, and [Lock.Fence] protects writes. A Semaphore is safe for
// concurrent use and ends with its Locker. The zero value is not usable.
type Semaphore struct {
	locker  *Locker
	permits int
}

// maxPermits is how many permits a semaphore may have: who asks for one may have to look
// at each.
const maxPermits = 10_000

// maxTogether is how many permits a call may acquire: each takes advisory locks of the server until
// the commit.
const maxTogether = batcher.MaxRequests

// permits is the option that asks for some of so many locks together.
type permits struct{ of, together int }

func (p permits) apply(o *options) error {
	o.Permits, o.Together = p.of, p.together
	return nil
}

func (permits) forAcquire() {}
func (permits) forDoSQLTx() {}
func (permits) forDoTx()    {}

// Semaphore returns a semaphore with n permits, 1 to 10,000. With a Locker from
// [NewAdvisoryLocker] the error matches [errors.ErrUnsupported].
//
// Permit 3 of the semaphore "jobs" is the lock "jobs#3", which [Lock.Key] returns and other
// programs see: [Locker.Acquire] of "jobs#3" uses up a permit, and release_lock() in SQL can
// release it. A lock on the key "jobs" is independent of the semaphore. Waiters for a permit
// queue under the key "jobs#". Do not use that key for a lock: its waiters would be served
// before them.
//
// Processes may give one semaphore different numbers of permits; each uses permits 1 to n of
// its own n. So while the number is being raised or lowered, there are at most as many holders
// as the greater number, and at most as many as the new number once the last holder beyond it
// has left. The Locker logs a warning when it sees that the numbers differ.
func (l *Locker) Semaphore(n int) (*Semaphore, error) {
	if err := missingReceiver(l); err != nil {
		return nil, l.fail("new", "", err)
	}
	switch {
	case n < 1 || n > maxPermits:
		return nil, l.fail("new", "", fmt.Errorf("a semaphore has 1 to %d permits, and not %d", maxPermits, n))
	case !l.takes(permits{}):
		return nil, l.fail("new", "", fmt.Errorf("this kind of Locker has no semaphores; use NewLeaseLocker: %w", errors.ErrUnsupported))
	}
	return &Semaphore{l, n}, nil
}

// Permits returns the number of permits.
func (s *Semaphore) Permits() int {
	if s == nil {
		return 0
	}
	return s.permits
}

// Acquire is [Locker.Acquire] for one of the permits.
func (s *Semaphore) Acquire(ctx context.Context, key string, opts ...PermitOption) (*Lock, error) {
	return ofPermits(ctx, s, key, 1, opts, func(queue string, opts []AcquireOption) (*Lock, error) {
		return s.locker.Acquire(ctx, queue, opts...)
	})
}

// TryAcquire is [Locker.TryAcquire] for one of the permits, but does not pass waiters.
func (s *Semaphore) TryAcquire(ctx context.Context, key string, opts ...PermitOption) (*Lock, error) {
	return ofPermits(ctx, s, key, 1, opts, func(queue string, opts []AcquireOption) (*Lock, error) {
		return s.locker.TryAcquire(ctx, queue, opts...)
	})
}

// AcquireN acquires n permits together, or none: 1 to [Semaphore.Permits], at most 256. It
// waits in the queue of Acquire until n are free at once. Waiters behind it wait as well, even
// if there are permits enough for them, so that smaller requests do not starve a larger one.
// Callers that acquire permits one by one can wait for each other for ever.
func (s *Semaphore) AcquireN(ctx context.Context, key string, n int, opts ...PermitOption) (Locks, error) {
	return s.acquireN(ctx, key, n, nil, opts)
}

// TryAcquireN is [Semaphore.TryAcquire] for n permits together, as of [Semaphore.AcquireN]. Two
// calls at once may both fail, because each has found some of the permits and not enough.
func (s *Semaphore) TryAcquireN(ctx context.Context, key string, n int, opts ...PermitOption) (Locks, error) {
	return s.acquireN(ctx, key, n, []AcquireOption{NoWait}, opts)
}

func (s *Semaphore) acquireN(ctx context.Context, key string, n int, defaults []AcquireOption, opts []PermitOption) (Locks, error) {
	return ofPermits(ctx, s, key, n, opts, func(queue string, opts []AcquireOption) (Locks, error) {
		l := s.locker
		if err := l.begin(ctx); err != nil {
			return nil, l.fail("acquire", queue, err)
		}
		defer l.calls.End()
		lock, rest, err := l.acquire(ctx, queue, false, defaults, opts)
		if err != nil {
			return nil, err
		}
		return append(Locks{lock}, rest...), nil
	})
}

// Do is [Locker.Do] with one of the permits.
func (s *Semaphore) Do(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...PermitOption) error {
	_, err := ofPermits(ctx, s, key, 1, opts, func(queue string, opts []AcquireOption) (*Lock, error) {
		return nil, s.locker.Do(ctx, queue, fn, opts...)
	})
	return err
}

// TryDo is [Locker.TryDo] with one of the permits.
func (s *Semaphore) TryDo(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...PermitOption) (ran bool, err error) {
	return ofPermits(ctx, s, key, 1, opts, func(queue string, opts []AcquireOption) (bool, error) {
		return s.locker.TryDo(ctx, queue, fn, opts...)
	})
}

// ofPermits makes a call for some of the permits.
func ofPermits[T any](ctx context.Context, s *Semaphore, key string, together int, opts []PermitOption, call func(queue string, opts []AcquireOption) (T, error)) (got T, err error) {
	if err := missing(ctx, s); err != nil {
		return got, fail("acquire", key, 0, err)
	}
	if err := s.check(key); err != nil {
		return got, s.locker.fail("acquire", key, err)
	}
	if most := min(s.permits, maxTogether); together < 1 || together > most {
		return got, s.locker.fail("acquire", key, fmt.Errorf("a call acquires 1 to %d of the %d permits, and not %d", most, s.permits, together))
	}
	got, err = call(key+lockkey.PermitMark, acquireOptions(opts, permits{s.permits, together}))
	if e, ok := err.(*Error); ok && e.Key == key+lockkey.PermitMark { //nolint:errorlint // what fn returned stays what it is
		e.Key = key
	}
	return got, err
}

// acquireOptions returns the options of an acquire that are opts and those that follow.
func acquireOptions(opts []PermitOption, more ...AcquireOption) []AcquireOption {
	all := make([]AcquireOption, 0, len(opts)+len(more))
	for _, opt := range opts {
		all = append(all, opt)
	}
	return append(all, more...)
}

// Holders returns the current holders of permits, in the order of the permits' numbers.
func (s *Semaphore) Holders(ctx context.Context, key string) ([]Holder, error) {
	if err := missing(ctx, s); err != nil {
		return nil, fail("holders", key, 0, err)
	}
	if err := s.check(key); err != nil {
		return nil, s.locker.fail("holders", key, err)
	}
	keys := make([]string, s.permits)
	for i := range keys {
		keys[i] = lockkey.Permit(key+lockkey.PermitMark, i+1)
	}
	return s.locker.holders(ctx, key, keys)
}

func (s *Semaphore) check(key string) error {
	most := lockkey.Permit(key+lockkey.PermitMark, s.permits)
	if err := s.locker.check(key); err != nil {
		return err
	}
	if n := utf8.RuneCountInString(most); n > lockkey.MaxText {
		return fmt.Errorf("the key is %d characters too long with # and the number of the permit; shorten it", n-lockkey.MaxText)
	}
	return nil
}
