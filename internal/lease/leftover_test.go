package lease

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/usertx"
)

// asking waits until a batch of requests is about to be sent, and cannot be, because the
// test has the session. What its callers do then comes too late to keep it from being sent.
func asking(t *testing.T) {
	t.Helper()
	buf := make([]byte, 16<<20)
	pgtest.Until(t, "a batch is asked for", func() bool {
		for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(stack, "sync.(*Mutex).Lock") && strings.Contains(stack, "(*Table).ask(") {
				return true
			}
		}
		return false
	})
}

// Not parallel, because of asking.
func TestLeaseTryWaitsForALeftoverOfItsLocker(t *testing.T) {
	for name, permits := range map[string]int{"lease": 0, "permit": 1} {
		t.Run(name, func(t *testing.T) {
			db := newBatchDB(t)
			table := db.table(t, db.Pool)
			left, next := requested(table, "k#"), requested(table, "k#")
			next.lock.Holder = "another"
			left.permits, next.permits = permits, permits
			resume := pgtest.Occupy(t, table.requests)
			table.flow.ask(false, left, next)
			asking(t)
			gone, leave := context.WithCancel(t.Context())
			leave()
			if err := left.Await(gone, nil); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			resume()
			if err := next.Await(t.Context(), nil); err != nil {
				t.Fatalf("refused by a lease that nobody has: %v", err)
			}
			db.wantHeld(t, "", next.lock)
		})
	}
}

// A try does not wait for a transaction, no matter who has fenced it.
func TestLeaseTryIsRefusedByALeftoverThatAFenceKeeps(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	lock, err := try(t, table, "k")
	if err != nil {
		t.Fatal(err)
	}
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if err := table.Fence(t.Context(), usertx.Pgx(tx), lock); err != nil {
		t.Fatal(err)
	}
	_ = lock.Lose(errors.New("by a test"))
	table.Discard(lock)
	if _, err := try(t, table, "k"); !errors.Is(err, lockerr.ErrNotAcquired) {
		t.Errorf("beside an open fenced transaction: %v", err)
	}
	if !table.cleaning.Busy() {
		t.Error("it was refused when the release had been given up, and not at once")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	table.cleaning.Wait()
	next, err := try(t, table, "k")
	if err != nil {
		t.Fatal(err)
	}
	if next.Token <= lock.Token {
		t.Errorf("token %d after %d", next.Token, lock.Token)
	}
}

// A request for a permit of which no answer came is given back as each of the permits.
func TestManyLeftoversOfASemaphoreAreForgottenAtNoGreaterCostEachThanFew(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	jobs := lockkey.Name{Key: "k#"}
	each := func(leftovers int) time.Duration {
		best := time.Hour
		for range 10 {
			table := &Table{leftovers: make(map[lockkey.Name][]*leftover)}
			stays := table.addLeftover(&hold.Hold{Queue: jobs})
			for range leftovers {
				table.endLeftover(table.addLeftover(&hold.Hold{Queue: jobs}))
			}
			began := time.Now()
			table.forgetReturned()
			best = min(best, time.Since(began)/time.Duration(leftovers))
			if left := table.leftovers[jobs]; len(left) != 1 || left[0] != stays || len(table.returned) != 0 {
				t.Fatalf("left are %d of which the server has not answered", len(left))
			}
			table.endLeftover(stays)
			if table.forgetReturned(); len(table.leftovers) != 0 {
				t.Fatal("a leftover is not forgotten")
			}
		}
		return best
	}
	if few, many := max(each(1000), time.Microsecond), each(16000); many > 12*few { // it was 100 µs when each was looked for among all
		t.Errorf("%s each of few leftovers, %s of many", few, many)
	}
}
