package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/locktesting"
)

// A program that was tested with locktesting meets the same errors and events on a server.
func TestLocktestingLosesLocksAsAServerDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	monitor := testkit.NewMonitor(t, db, nil)
	user := testkit.Query[string](t, db, "select current_user::text")
	for name, loss := range map[string]struct {
		ttl     time.Duration
		server  func(*testing.T, *pgxlock.Lock)
		control func(*locktesting.Control, string)
	}{
		"taken away": {
			time.Hour,
			func(t *testing.T, lock *pgxlock.Lock) {
				if !testkit.Query[bool](t, db, "select release_lock($1, $2)", lock.Key(), lock.Holder()) {
					t.Error("there was no lease")
				}
				_ = lock.Renew(t.Context()) // which notices it
			},
			func(control *locktesting.Control, key string) { control.Lose(key, nil) },
		},
		"evicted": {
			time.Hour,
			func(t *testing.T, lock *pgxlock.Lock) {
				if evicted, err := monitor.Evict(t.Context(), holder(t, monitor, lock.Key()), "for a test"); !evicted || err != nil {
					t.Error(evicted, err)
				}
				_ = lock.Renew(t.Context())
			},
			func(control *locktesting.Control, key string) {
				control.Lose(key, fmt.Errorf("%w by %s: for a test", pgxlock.ErrEvicted, user))
			},
		},
		"not renewed": {
			time.Second,
			func(t *testing.T, lock *pgxlock.Lock) {
				tx := testkit.Begin(t, db, pgx.TxOptions{})
				if _, err := tx.Exec(t.Context(), "select from distributed_locks where lock_name = $1 for update", lock.Key()); err != nil {
					t.Error(err)
				}
				pgtest.Receive(t, "the loss", lock.Lost())
				testkit.Rollback(t, tx)
			},
			func(control *locktesting.Control, key string) { control.Expire(key) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var onServer, inMemory recorder
			config := pgxlock.LeaseConfig{TTL: loss.ttl, Observe: onServer.observe}
			leases := testkit.NewLocker(t, db, &config)
			lease := grantedInTime(t, leases, name)
			loss.server(t, lease)
			want := reportLoss(t, leases, lease, &onServer)

			config.Observe = inMemory.observe
			synctest.Test(t, func(t *testing.T) { // where no lease expires before it is lost
				locks, control := locktesting.New(t, &config)
				lock := testkit.Acquire(t, locks, name)
				loss.control(control, name)
				if got := reportLoss(t, locks, lock, &inMemory); !slices.Equal(got, want) {
					t.Errorf("locktesting:\n%q\na server:\n%q", got, want)
				}
			})
		})
	}
}

// reportLoss returns all that a program receives about the loss of a lock, and closes the Locker.
func reportLoss(t *testing.T, locks *pgxlock.Locker, lock *pgxlock.Lock, r *recorder) (report []string) {
	t.Helper()
	pgtest.Receive(t, "the loss", lock.Lost())
	work, cancel := lock.Context(t.Context())
	defer cancel()
	add := func(what string, err error) {
		e, _ := errors.AsType[*pgxlock.Error](err)
		if e == nil {
			t.Fatalf("%s: %v", what, err)
		}
		report = append(report, fmt.Sprintf("%s: %v (%s of %s, a %T, lost %t, evicted %t)", what, err, e.Op, e.Key, e.Err, errors.Is(err, pgxlock.ErrLost), errors.Is(err, pgxlock.ErrEvicted)))
	}
	add("Err", lock.Err())
	add("the cause", context.Cause(work))
	add("Renew", lock.Renew(t.Context()))
	add("Release", lock.Release(t.Context()))
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Op == pgxlock.EventRenewed || e.Op == pgxlock.EventWait && e.Err != nil {
			continue // how many there are depends on the machine
		}
		report = append(report, fmt.Sprintf("%s %s of %s, TTL %s", e.Op, e.Result(), e.Key, e.TTL))
		if e.Op == pgxlock.EventLost {
			add("the event", e.Err)
		}
	}
	return report
}
