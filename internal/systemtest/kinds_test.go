package systemtest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/locktest"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestLeasesDoWhatEveryKindDoes(t *testing.T) {
	t.Parallel()
	locktest.Run(t, func(t *testing.T) *pgxlock.Locker {
		locks, err := pgxlock.NewLeaseLocker(testkit.Migrated(t).Pool, &pgxlock.LeaseConfig{TTL: time.Hour, Observe: kept(t).Observe})
		if err != nil {
			t.Fatal(err)
		}
		return locks
	})
}

func TestAdvisoryLocksDoWhatEveryKindDoes(t *testing.T) {
	t.Parallel()
	locktest.Run(t, func(t *testing.T) *pgxlock.Locker {
		return testkit.Advisory(t, pgtest.New(t).Pool, &pgxlock.AdvisoryConfig{Observe: kept(t).Observe}) // nothing is installed there
	})
}

// kept returns a ledger that is looked at when the test is over, and its Locker closed.
func kept(t *testing.T) *locktest.Ledger {
	l := &locktest.Ledger{}
	t.Cleanup(func() { l.Check(t) })
	return l
}

func TestLocksInMemoryDoWhatEveryKindDoes(t *testing.T) {
	t.Parallel()
	locktest.Run(t, func(*testing.T) *pgxlock.Locker { return pgxlock.NewMemoryLocker() })
}

// A program's own tests run in bubbles, where a wait costs nothing.
func TestLocksInMemoryWorkInABubble(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks := pgxlock.NewMemoryLocker()
		lock, err := locks.Acquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		_, err = locks.Acquire(t.Context(), "k", pgxlock.MaxWait(time.Hour))
		if !errors.Is(err, pgxlock.ErrNotAcquired) || time.Since(began) != time.Hour {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		granted := make(chan time.Time)
		go func() {
			if _, err := locks.Acquire(t.Context(), "k"); err != nil {
				t.Error(err)
			}
			granted <- time.Now()
		}()
		time.Sleep(time.Hour)
		freed := time.Now()
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if at := <-granted; !at.Equal(freed) {
			t.Errorf("granted %s after it was released", at.Sub(freed))
		}
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

func TestLockInMemoryFencesNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	locks := pgxlock.NewMemoryLocker()
	lock, err := locks.Acquire(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return lock.Fence(t.Context(), tx) })
	if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("Fence: %v", err)
	}
	if _, bounded := lock.Deadline(); bounded {
		t.Error("it has a deadline")
	}
}

func TestAdvisoryLocksWithTokensDoWhatEveryKindDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	locktest.Run(t, func(t *testing.T) *pgxlock.Locker {
		return testkit.Advisory(t, testkit.Migrated(t).Pool, &pgxlock.AdvisoryConfig{Tokens: true, Observe: kept(t).Observe})
	})
}
