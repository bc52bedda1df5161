package pgxlock_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// wantNoShare wants every kind of shared try to end without the lock.
func wantNoShare(t *testing.T, who string, locks *pgxlock.Locker, key string) {
	t.Helper()
	refused := func(call string, lock *pgxlock.Lock, err error) {
		t.Helper()
		if !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%s: %s passes a writer that waits: %v", who, call, err)
		}
		if lock != nil {
			testkit.Release(t, lock)
		}
	}
	lock, err := locks.TryAcquire(t.Context(), key, pgxlock.Shared)
	refused("TryAcquire", lock, err)
	lock, err = locks.Acquire(t.Context(), key, pgxlock.Shared, pgxlock.NoWait)
	refused("Acquire with NoWait", lock, err)
	ran, err := locks.TryDo(t.Context(), key, func(context.Context, *pgxlock.Lock) error { return nil }, pgxlock.Shared)
	if ran || err != nil {
		t.Errorf("%s: TryDo passes a writer that waits: %t, %v", who, ran, err)
	}
	all, err := locks.AcquireAll(t.Context(), []string{"a free key", key, "z free key"}, pgxlock.Shared, pgxlock.NoWait)
	refused("AcquireAll with NoWait", nil, err)
	if e, ok := errors.AsType[*pgxlock.Error](err); ok && e.Key != key {
		t.Errorf("%s: AcquireAll names %q", who, e.Key)
	}
	if err := all.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// shares releases what a shared try is granted, which it must be.
func shares(t *testing.T, locks *pgxlock.Locker, key string) {
	t.Helper()
	lock, err := locks.TryAcquire(t.Context(), key, pgxlock.Shared)
	if err != nil {
		t.Errorf("no writer waits: %v", err)
		return
	}
	testkit.Release(t, lock)
}

func TestSharedTryDoesNotPassAWriterOfAnyLocker(t *testing.T) {
	eachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		readers, writers, third := newLocker("readers"), newLocker("writers"), newLocker("third")
		reading := testkit.Acquire(t, readers, "k", pgxlock.Shared)
		shares(t, readers, "k")
		shares(t, third, "k")

		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error, 1)
		go func() {
			_, err := writers.Acquire(ctx, "k")
			gaveUp <- err
		}()
		testkit.UntilQueued(t, db, "k", 1)
		wantNoShare(t, "the Locker that has it", readers, "k")
		wantNoShare(t, "the writer's Locker", writers, "k")
		wantNoShare(t, "a Locker that has nothing to do with it", third, "k")
		unused := testkit.WaitingKinds[map[pgxlock.Kind]string{pgxlock.KindLease: "leases", pgxlock.KindAdvisory: "advisory locks"}[third.Kind()]](t, db, "unused")
		wantNoShare(t, "a Locker that is not connected", unused, "k")

		cancel() // the writer is over, and keeps nobody out
		if err := <-gaveUp; !errors.Is(err, context.Canceled) {
			t.Errorf("the writer: %v", err)
		}
		testkit.UntilQueued(t, db, "k", 0)
		shares(t, readers, "k")
		shares(t, writers, "k")
		shares(t, third, "k")
		testkit.Release(t, reading)
	})
}

// A writer that waits in the Locker of the try may have no ticket yet, or never get one.
func TestSharedTryDoesNotPassAWriterOfItsOwnLocker(t *testing.T) {
	eachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		locks := newLocker("both")
		reading := testkit.Acquire(t, locks, "k", pgxlock.Shared)
		granted := testkit.Waits(t, locks, "k")
		testkit.Until(t, "it stands in line", func() bool { return locks.Waiting("k") == 1 })
		wantNoShare(t, "its own Locker", locks, "k")
		testkit.Release(t, reading)
		testkit.Release(t, <-granted)
	})
}

func TestSharedTryDoesNotPassAWriterInMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks := pgxlock.NewMemoryLocker()
		reading := testkit.Acquire(t, locks, "k", pgxlock.Shared)
		shares(t, locks, "k")
		granted := testkit.Waits(t, locks, "k")
		synctest.Wait()
		wantNoShare(t, "in memory", locks, "k")
		testkit.Release(t, reading)
		testkit.Release(t, <-granted)
		shares(t, locks, "k")
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Where no tickets can be published none are asked for.
func TestSharedTryOfAnAdvisoryLockWorksWhereThereIsNoQueue(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 20)
	readers, others := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, nil)
	shares(t, others, "k")
	reading := testkit.Acquire(t, readers, "k", pgxlock.Shared)
	shares(t, others, "k")
	testkit.Release(t, reading)
}

// A queue that cannot be asked keeps nobody from a lock.
func TestSharedTryOfAnAdvisoryLockWorksWhereTheQueueFails(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	locks := testkit.NewAdvisory(t, db, nil)
	shares(t, locks, "k")
	db.Exec(t, "alter function pgxlock_waited_for(integer[], text[]) rename to pgxlock_was_waited_for")
	shares(t, locks, "k")
}
