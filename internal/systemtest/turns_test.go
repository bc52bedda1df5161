package systemtest_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Of an advisory lock a Locker may serve more, until it knows that others wait.
func TestTurnOfALeaseServesCallersOfALockerThenThoseOfTheNext(t *testing.T) {
	t.Parallel()
	const callers, sure, most = 18, 4, 16
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	testkit.KeepTurns(t, db)
	lock := testkit.Acquire(t, testkit.Listening(t, db, "holder"), "k")
	var mu sync.Mutex
	var order []int
	var all sync.WaitGroup
	for i, owner := range []string{"first", "second"} {
		locks := testkit.Listening(t, db, owner)
		for range callers {
			all.Go(func() {
				if err := locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					mu.Lock()
					defer mu.Unlock()
					order = append(order, i)
					return nil
				}); err != nil {
					t.Error(err)
				}
			})
		}
		testkit.UntilQueued(t, db, "k", i+1)
	}
	testkit.UntilWaiting(t, db, "k", 2*callers)
	testkit.Release(t, lock)
	all.Wait()
	first := slices.Index(order, 1)
	second := slices.Index(order[max(first, 0):], 0)
	if len(order) != 2*callers || first < sure || first > most || second < sure || second > most {
		t.Errorf("served: %v, want %d to %d callers of each Locker in turn", order, sure, most)
	}
	testkit.NoTickets(t, db)
}
