package systemtest_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// storm runs waits that are cancelled, until stop is called. Their contexts end so that
// some of the grants come too late. A lock that comes in time is released.
func storm(t *testing.T, acquire func(context.Context) (*pgxlock.Lock, error)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var waits sync.WaitGroup
	for range 6 {
		waits.Go(func() {
			for ctx.Err() == nil {
				short, end := context.WithTimeout(ctx, time.Duration(rand.Int64N(int64(3*time.Millisecond))))
				lock, err := acquire(short)
				end()
				if err == nil {
					err = lock.Release(t.Context())
				} else if errors.Is(err, pgxlock.ErrNotAcquired) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
					err = nil
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	return func() {
		cancel()
		waits.Wait()
	}
}

// What cancelled waits leave behind is in nobody's way: as soon as no call is waiting,
// and nobody has the lock, a try succeeds.
func TestSoakTriesDoNotCollideWithWhatCancelledWaitsOfTheirLockerLeave(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	lease := func(t *testing.T) *pgxlock.Locker { return testkit.NewLocker(t, db, nil) }
	for name, c := range map[string]struct {
		locker func(t *testing.T) *pgxlock.Locker
		waits  pgxlock.Mode
	}{
		"lease":                             {lease, pgxlock.Exclusive},
		"shared lease":                      {lease, pgxlock.Shared},
		"advisory lock":                     {func(t *testing.T) *pgxlock.Locker { return testkit.NewAdvisory(t, db, nil) }, pgxlock.Exclusive},
		"shared advisory lock":              {func(t *testing.T) *pgxlock.Locker { return testkit.NewAdvisory(t, db, nil) }, pgxlock.Shared},
		"advisory lock with a token":        {func(t *testing.T) *pgxlock.Locker { return withTokens(t, db, "tokens") }, pgxlock.Exclusive},
		"shared advisory lock with a token": {func(t *testing.T) *pgxlock.Locker { return withTokens(t, db, "tokens") }, pgxlock.Shared},
		"lock in memory":                    {func(*testing.T) *pgxlock.Locker { return pgxlock.NewMemoryLocker() }, pgxlock.Exclusive},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locks, key := c.locker(t), "k"+name
			collide(t, func(ctx context.Context) (*pgxlock.Lock, error) { return locks.Acquire(ctx, key, c.waits) },
				func(ctx context.Context) (*pgxlock.Lock, error) { return locks.TryAcquire(ctx, key) })
		})
	}
}

func TestSoakTriesForAPermitDoNotCollideWithWhatCancelledWaitsOfTheirLockerLeave(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	for name, locks := range map[string]*pgxlock.Locker{"lease": testkit.NewLocker(t, db, nil), "memory": pgxlock.NewMemoryLocker()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			permits, err := locks.Semaphore(1)
			if err != nil {
				t.Fatal(err)
			}
			collide(t, func(ctx context.Context) (*pgxlock.Lock, error) { return permits.Acquire(ctx, "k") },
				func(ctx context.Context) (*pgxlock.Lock, error) { return permits.TryAcquire(ctx, "k") })
		})
	}
}

// collide holds the lock while waits for it are cancelled, and releases it. When the last
// call has returned, it tries.
func collide(t *testing.T, wait, try func(context.Context) (*pgxlock.Lock, error)) {
	t.Helper()
	var busy, tries int
	var longest time.Duration
	for end := time.Now().Add(pgtest.Soak(t, 2*time.Second, 30*time.Second)); time.Now().Before(end); {
		lock, err := try(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		stop := storm(t, wait)
		time.Sleep(time.Duration(rand.Int64N(int64(3 * time.Millisecond))))
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Duration(rand.Int64N(int64(3 * time.Millisecond))))
		stop() // no call has the lock, or waits for it, from here on
		began := time.Now()
		lock, err = try(t.Context())
		tries++
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			busy++
			for err != nil {
				lock, err = try(t.Context())
			}
			longest = max(longest, time.Since(began))
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if busy > 0 {
		t.Errorf("%d of %d tries were refused though nobody had the lock or waited for it, for up to %s", busy, tries, longest)
	}
}
