package systemtest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestSharedTryDoesNotPassAWriterOfAnyLocker(t *testing.T) {
	testkit.EachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		readers, writers, third := newLocker("readers"), newLocker("writers"), newLocker("third")
		reading := testkit.Acquire(t, readers, "k", pgxlock.Shared)
		testkit.WantShare(t, readers, "k")
		testkit.WantShare(t, third, "k")

		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error, 1)
		go func() {
			_, err := writers.Acquire(ctx, "k")
			gaveUp <- err
		}()
		testkit.UntilQueued(t, db, "k", 1)
		testkit.WantNoShare(t, "the Locker that has it", readers, "k")
		testkit.WantNoShare(t, "the writer's Locker", writers, "k")
		testkit.WantNoShare(t, "a Locker that has nothing to do with it", third, "k")
		unused := testkit.WaitingKinds[map[pgxlock.Kind]string{pgxlock.KindLease: "leases", pgxlock.KindAdvisory: "advisory locks"}[third.Kind()]](t, db, "unused")
		testkit.WantNoShare(t, "a Locker that is not connected", unused, "k")

		cancel() // the writer is over, and keeps nobody out
		if err := <-gaveUp; !errors.Is(err, context.Canceled) {
			t.Errorf("the writer: %v", err)
		}
		testkit.UntilQueued(t, db, "k", 0)
		testkit.WantShare(t, readers, "k")
		testkit.WantShare(t, writers, "k")
		testkit.WantShare(t, third, "k")
		testkit.Release(t, reading)
	})
}

func TestSharedTryDoesNotPassAWriterInMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks := pgxlock.NewMemoryLocker()
		reading := testkit.Acquire(t, locks, "k", pgxlock.Shared)
		testkit.WantShare(t, locks, "k")
		granted := testkit.Waits(t, locks, "k")
		synctest.Wait()
		testkit.WantNoShare(t, "in memory", locks, "k")
		testkit.Release(t, reading)
		testkit.Release(t, <-granted)
		testkit.WantShare(t, locks, "k")
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Without the migrations there are no tickets, so that a try asks for none.
func TestSharedTryOfAnAdvisoryLockWorksWhereThereIsNoQueue(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 20)
	readers, others := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, nil)
	testkit.WantShare(t, others, "k")
	reading := testkit.Acquire(t, readers, "k", pgxlock.Shared)
	testkit.WantShare(t, others, "k")
	testkit.Release(t, reading)
}

// A queue that fails refuses no lock.
func TestSharedTryOfAnAdvisoryLockWorksWhereTheQueueFails(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	locks := testkit.NewAdvisory(t, db, nil)
	testkit.WantShare(t, locks, "k")
	db.Exec(t, "alter function pgxlock_waited_for(integer[], text[]) rename to pgxlock_was_waited_for")
	testkit.WantShare(t, locks, "k")
}
