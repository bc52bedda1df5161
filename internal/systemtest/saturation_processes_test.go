//go:build unix

package systemtest_test

import (
	"bufio"
	"context"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// saturateUntilTold has 8 callers acquire the key all the time. The child reports when they
// have begun and when they have had turns, and counts the turns between two lines from its
// parent.
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
		told := bufio.NewReader(os.Stdin)
		saturated, cancel := context.WithCancel(ctx)
		defer cancel()
		var turns atomic.Int64
		ended := make(chan error, 1)
		go func() { ended <- testkit.Saturate(saturated, locks, key, 8, func() { turns.Add(1) }) }()
		for turns.Load() < 3 {
			time.Sleep(time.Millisecond)
		}
		if err := report("ready"); err != nil {
			return err
		}
		if _, err := told.ReadString('\n'); err != nil {
			return err
		}
		before := turns.Load()
		if _, err := told.ReadString('\n'); err != nil {
			return err
		}
		had := turns.Load() - before
		cancel()
		if err := <-ended; err != nil {
			return err
		}
		if err := locks.Close(ctx); err != nil {
			return err
		}
		return report(had)
	}
}

func TestSaturatedProcessesShareALockFairly(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"saturate an advisory lock", "saturate a lease"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db := testkit.Roomy(t, testkit.Migrated(t), 20)
			children := []*child{startChild(t, what, db.URL, "k"), startChild(t, what, db.URL, "k")}
			for _, c := range children {
				var ready string
				c.report(t, &ready)
			}
			for _, c := range children {
				c.tell(t)
			}
			time.Sleep(2 * time.Second) // what is compared is who has the lock meanwhile
			for _, c := range children {
				c.tell(t)
			}
			turns := make([]int, len(children))
			for i, c := range children {
				c.report(t, &turns[i])
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
