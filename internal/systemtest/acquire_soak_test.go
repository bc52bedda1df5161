package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Sessions end while calls are under way. Whatever an acquire ends with, it is not the loss of
// a lock that its caller never had.
func TestSoakAcquireNeverLosesWhatItHasNotReturned(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for kind, newOne := range map[string]func(*testing.T, *pgtest.DB) *pgxlock.Locker{
		"lease": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
			return testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "dies"})
		},
		"advisory": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
			return testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "dies"})
		},
		"advisory with tokens": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
			return testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "dies", Tokens: true})
		},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			locks := newOne(t, db)
			ctx, stop := context.WithCancel(t.Context())
			var calls atomic.Int32
			var all sync.WaitGroup
			defer all.Wait()
			defer stop()
			for caller := range 6 {
				own := fmt.Sprint("own ", caller)

				all.Go(func() {
					for round := 0; ctx.Err() == nil; round++ {
						var err error
						var got pgxlock.Locks
						switch round % 5 {
						case 0:
							err = one(&got)(locks.Acquire(ctx, "shared by all"))
						case 1:
							err = one(&got)(locks.TryAcquire(ctx, own))
						case 2:
							got, err = locks.AcquireAll(ctx, []string{own, "shared by all"})
						case 3:
							err = one(&got)(locks.Acquire(ctx, "group", pgxlock.Shared))
						case 4:
							ran := false
							err = locks.Do(ctx, own, func(context.Context, *pgxlock.Lock) error { ran = true; return nil })
							if ran {
								err = nil // then the loss may be told
							}
						}
						calls.Add(1)
						switch {
						case errors.Is(err, pgxlock.ErrLost):
							t.Errorf("call %d: %v", round%5, err)
						case err != nil && ctx.Err() == nil && !errors.Is(err, pgxlock.ErrUnavailable) && !errors.Is(err, pgxlock.ErrNotAcquired):
							t.Errorf("call %d: %v is neither ErrUnavailable nor ErrNotAcquired", round%5, err)
						}
						_ = got.Release(t.Context())
					}
				})
			}
			ended, began := 0, time.Now()
			for ended == 0 || time.Since(began) < pgtest.Soak(t, 2*time.Second, time.Minute) {
				made := calls.Load()
				pgtest.Until(t, "calls are made", func() bool { return calls.Load() >= made+20 })
				ended += testkit.Query[int](t, db, "select count(pg_terminate_backend(pid)) from pg_stat_activity where application_name = 'pgxlock dies'")
			}
			stop()
			all.Wait()
			t.Logf("%d calls, %d sessions ended", calls.Load(), ended)
		})
	}
}

// one returns what puts the lock of a call beside others.
func one(into *pgxlock.Locks) func(*pgxlock.Lock, error) error {
	return func(lock *pgxlock.Lock, err error) error {
		if lock != nil {
			*into = pgxlock.Locks{lock}
		}
		return err
	}
}
