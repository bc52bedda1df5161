package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"unicode/utf8"

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
	permits permits
}

// maxPermits is how many permits a semaphore may have: who asks for one may have to look
// at each.
const maxPermits = 10_000

// permits is the option that asks for one of so many locks.
type permits int

func (p permits) apply(o *options) error {
	o.Permits = int(p)
	return nil
}

func (permits) forAcquire() {}
func (permits) forDoSQLTx() {}
func (permits) forDoTx()    {}

// Semaphore returns a semaphore with n permits, 1 to 10,000. The Locker must be from
// [NewLeaseLocker] or [NewMemoryLocker]; with one from [NewAdvisoryLocker] the error
// matches [errors.ErrUnsupported].
//
// Permit 3 of the semaphore "jobs" is the lock "jobs#3". [Lock.Key] returns this name, and
// other programs see it: [Locker.Acquire] of "jobs#3" uses up a permit, and release_lock()
// in SQL can release it. A lock on the key "jobs" is independent of the semaphore. Waiters
// for a permit queue under the key "jobs#". Do not use that key for a lock: its waiters
// would be served before them.
//
// Processes may give one semaphore different numbers of permits; each process uses permits
// 1 to n of its own n. So while the number is being raised or lowered, there are at most as
// many holders as the greater number, and at most as many as the new number once the last
// holder beyond it has left. The Locker logs a warning when it sees that the numbers
// differ.
func (l *Locker) Semaphore(n int) (*Semaphore, error) {
	if err := missingReceiver(l); err != nil {
		return nil, l.fail("new", "", err)
	}
	switch {
	case n < 1 || n > maxPermits:
		return nil, l.fail("new", "", fmt.Errorf("a semaphore has 1 to %d permits, and not %d", maxPermits, n))
	case !l.takes(permits(n)):
		return nil, l.fail("new", "", fmt.Errorf("this kind of Locker has no semaphores; use NewLeaseLocker: %w", errors.ErrUnsupported))
	}
	return &Semaphore{l, permits(n)}, nil
}

// Permits returns the number of permits.
func (s *Semaphore) Permits() int {
	if s == nil {
		return 0
	}
	return int(s.permits)
}

// Acquire is [Locker.Acquire] for one of the permits. Waiters are served first come, first
// served, as with Locker.Acquire.
func (s *Semaphore) Acquire(ctx context.Context, key string, opts ...PermitOption) (*Lock, error) {
	return s.one(ctx, key, opts, func(queue string, opts []AcquireOption) (*Lock, error) { return s.locker.Acquire(ctx, queue, opts...) })
}

// TryAcquire is [Locker.TryAcquire] for one of the permits.
func (s *Semaphore) TryAcquire(ctx context.Context, key string, opts ...PermitOption) (*Lock, error) {
	return s.one(ctx, key, opts, func(queue string, opts []AcquireOption) (*Lock, error) {
		return s.locker.TryAcquire(ctx, queue, opts...)
	})
}

// Do is [Locker.Do] with one of the permits.
func (s *Semaphore) Do(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...PermitOption) error {
	_, err := s.one(ctx, key, opts, func(queue string, opts []AcquireOption) (*Lock, error) {
		return nil, s.locker.Do(ctx, queue, fn, opts...)
	})
	return err
}

// TryDo is [Locker.TryDo] with one of the permits.
func (s *Semaphore) TryDo(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...PermitOption) (ran bool, err error) {
	_, err = s.one(ctx, key, opts, func(queue string, opts []AcquireOption) (_ *Lock, err error) {
		ran, err = s.locker.TryDo(ctx, queue, fn, opts...)
		return nil, err
	})
	return ran, err
}

// one makes a call for one of the permits.
func (s *Semaphore) one(ctx context.Context, key string, opts []PermitOption, call func(queue string, opts []AcquireOption) (*Lock, error)) (*Lock, error) {
	if err := missing(ctx, s); err != nil {
		return nil, fail("acquire", key, 0, err)
	}
	if err := s.check(key); err != nil {
		return nil, s.locker.fail("acquire", key, err)
	}
	lock, err := call(key+lockkey.PermitMark, acquireOptions(opts, s.permits))
	if e, ok := err.(*Error); ok && e.Key == key+lockkey.PermitMark { //nolint:errorlint // what fn returned stays what it is
		e.Key = key
	}
	return lock, err
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
	most := lockkey.Permit(key+lockkey.PermitMark, int(s.permits))
	if err := s.locker.check(key); err != nil {
		return err
	}
	if n := utf8.RuneCountInString(most); n > lockkey.MaxText {
		return fmt.Errorf("the key is %d characters too long with # and the number of the permit; shorten it", n-lockkey.MaxText)
	}
	return nil
}
