//go:build unix

package systemtest_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// saturateUntilTold has 8 callers acquire the key all the time. The child reports how many
// turns they have had, first when they have had some and then whenever its parent asks.
func saturateUntilTold(newLocker func(*pgxpool.Pool) (*pgxlock.Locker, error)) func(context.Context, string, string, func(any) error) error {
	return func(ctx context.Context, url, key string, report func(any) error) error {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		defer pool.Close()
		locks, err := newLocker(pool)
		if err != nil {
			return err
		}
		saturated, cancel := context.WithCancel(ctx)
		defer cancel()
		var turns atomic.Int64
		ended := make(chan error, 1)
		go func() { ended <- testkit.Saturate(saturated, locks, key, 8, func() { turns.Add(1) }) }()
		for turns.Load() < 3 {
			time.Sleep(time.Millisecond)
		}
		for asked := error(nil); asked == nil; asked = untilTold() {
			if err := report(turns.Load()); err != nil {
				return err
			}
		}
		cancel()
		if err := <-ended; err != nil {
			return err
		}
		return locks.Close(ctx)
	}
}

func TestSaturatedProcessesShareALockFairly(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, what := range []string{"saturate an advisory lock", "saturate a lease"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := testkit.Roomy(t, testkit.Migrated(t), 20)
			children := []*child{startChild(t, what, db.URL, "k"), startChild(t, what, db.URL, "k")}
			before, turns := make([]int, len(children)), make([]int, len(children))
			for i, c := range children {
				c.report(t, &before[i])
			}
			for seconds := 2; seconds <= 20; seconds += 2 { // more where the machine let one stand still
				time.Sleep(2 * time.Second) // what is compared is who has the lock meanwhile
				for i, c := range children {
					c.tell(t)
					c.report(t, &turns[i])
					turns[i] -= before[i]
				}
				if testkit.Share(turns) >= testkit.Starved {
					break
				}
			}
			for _, c := range children {
				c.dismiss(t)
				c.end(t)
			}
			t.Logf("turns: %d", turns)
			if testkit.Share(turns) < testkit.Starved {
				t.Errorf("one of them had %.3f of an equal share: %d turns", testkit.Share(turns), turns)
			}
			testkit.NoTickets(t, db)
		})
	}
}
