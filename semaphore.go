package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A semaphore of n permits is n locks: jobs#1 to jobs#n for the key jobs. So a permit is all
// that a lock is, and there are never more than n. Waiters for any of them form one line,
// which is called jobs#.

// A Semaphore lets up to so many holders in at once. Each of its permits is a lock of
// its own, with its own holder, TTL, token and metadata: that of a holder who dies is
// free when its TTL is over, and [Lock.Fence] protects writes. It is safe for
// concurrent use, and ends with its Locker. The zero value is of no use.
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
	o.permits = p
	return nil
}

// Semaphore returns a semaphore with so many permits, 1 to 10,000. For Lease and Memory
// Lockers; that of an Advisory Locker is an error with [errors.ErrUnsupported].
//
// Permit 3 of the semaphore "jobs" is the lock "jobs#3", which is what [Lock.Key] says and
// what other programs see: so a permit can be used up by [Locker.Acquire] of that key, and
// given back by release_lock() in SQL. Somebody's lock on the key "jobs" is another
// lock. The line of those who wait for a permit is that of the key "jobs#", which had
// better be no lock: whoever waits for that would stand before them.
//
// Processes that give a semaphore different numbers of permits are each taken at their
// word: one that says n is granted none beyond the n-th, whoever holds those. So while the
// number is being raised or lowered there are at most as many holders as the greater
// number, and as many as the new one when the last holder beyond it has left. The
// Locker logs a warning when it sees that numbers differ.
func (l *Locker) Semaphore(n int) (*Semaphore, error) {
	if err := missingReceiver(l); err != nil {
		return nil, l.fail("new", "", err)
	}
	switch {
	case n < 1 || n > maxPermits:
		return nil, l.fail("new", "", fmt.Errorf("a semaphore has 1 to %d permits, and not %d", maxPermits, n))
	case !l.backend.takes(permits(n)):
		return nil, l.fail("new", "", fmt.Errorf("there are no semaphores of this kind; use the Locker of NewLeaseLocker: %w", errors.ErrUnsupported))
	}
	return &Semaphore{l, permits(n)}, nil
}

// Permits returns how many there are.
func (s *Semaphore) Permits() int {
	if s == nil {
		return 0
	}
	return int(s.permits)
}

// Acquire is [Locker.Acquire] for one of the permits. Who waits is served in turn.
func (s *Semaphore) Acquire(ctx context.Context, key string, opts ...Option) (*Lock, error) {
	return s.one(ctx, key, opts, func(queue string, opts []Option) (*Lock, error) { return s.locker.Acquire(ctx, queue, opts...) })
}

// TryAcquire is [Locker.TryAcquire] for one of the permits.
func (s *Semaphore) TryAcquire(ctx context.Context, key string, opts ...Option) (*Lock, error) {
	return s.one(ctx, key, opts, func(queue string, opts []Option) (*Lock, error) { return s.locker.TryAcquire(ctx, queue, opts...) })
}

// Do is [Locker.Do] with one of the permits.
func (s *Semaphore) Do(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...Option) error {
	_, err := s.one(ctx, key, opts, func(queue string, opts []Option) (*Lock, error) { return nil, s.locker.Do(ctx, queue, fn, opts...) })
	return err
}

// TryDo is [Locker.TryDo] with one of the permits.
func (s *Semaphore) TryDo(ctx context.Context, key string, fn func(context.Context, *Lock) error, opts ...Option) (ran bool, err error) {
	_, err = s.one(ctx, key, opts, func(queue string, opts []Option) (_ *Lock, err error) {
		ran, err = s.locker.TryDo(ctx, queue, fn, opts...)
		return nil, err
	})
	return ran, err
}

// one makes a call for one of the permits.
func (s *Semaphore) one(ctx context.Context, key string, opts []Option, call func(queue string, opts []Option) (*Lock, error)) (*Lock, error) {
	if err := missing(ctx, s); err != nil {
		return nil, fail("acquire", key, 0, err)
	}
	if err := s.check(key); err != nil {
		return nil, s.locker.fail("acquire", key, err)
	}
	lock, err := call(key+permitMark, append(opts[:len(opts):len(opts)], s.permits))
	if e, ok := err.(*Error); ok && e.Key == key+permitMark { //nolint:errorlint // what fn returned stays what it is
		e.Key = key
	}
	return lock, err
}

// Holders returns who holds the permits now, in the order of their numbers.
func (s *Semaphore) Holders(ctx context.Context, key string) ([]Holder, error) {
	if err := missing(ctx, s); err != nil {
		return nil, fail("holders", key, 0, err)
	}
	if err := s.check(key); err != nil {
		return nil, s.locker.fail("holders", key, err)
	}
	keys := make([]string, s.permits)
	for i := range keys {
		keys[i] = permitKey(key+permitMark, i+1)
	}
	return s.locker.holders(ctx, key, keys)
}

func (s *Semaphore) check(key string) error {
	most := permitKey(key+permitMark, int(s.permits))
	if err := s.locker.backend.check(key); err != nil {
		return err
	}
	if n := utf8.RuneCountInString(most); n > lockkey.MaxText {
		return fmt.Errorf("the key has %d characters too many, as # and the number of a permit are added to it; shorten it", n-lockkey.MaxText)
	}
	return nil
}

// permitMark stands between the key of a semaphore and the number of a permit.
const permitMark = "#"

// permitKey is the key of one permit.
func permitKey(queue string, n int) string { return queue + strconv.Itoa(n) }

// semaphoreOf is the key of the semaphore whose permits those in a queue wait for.
func semaphoreOf(queue string) string { return strings.TrimSuffix(queue, permitMark) }

// isSemaphore reports whether callers may wait for a permit under the name.
func isSemaphore(name lockkey.Name) bool { return strings.HasSuffix(name.Key, permitMark) }
