package systemtest_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// askInTurn is what a SQL caller sends while it waits, as docs/sql-languages.md shows it.
const askInTurn = "select acquired, ticket, ask_again_ms from acquire_in_turn($1, $2, 30, $3)"

// acquireInTurn waits for the lease as a SQL caller does, and returns how often it asked.
func acquireInTurn(ctx context.Context, pool *pgxpool.Pool, key, holder string) (asked int, err error) {
	var acquired bool
	var ticket *int64
	var again *int
	for {
		asked++
		if err := pool.QueryRow(ctx, askInTurn, key, holder, ticket).Scan(&acquired, &ticket, &again); err != nil || acquired {
			return asked, err
		}
		time.Sleep(time.Duration(*again) * time.Millisecond)
	}
}

// releaseInTurn releases it, and wakes the next waiter.
func releaseInTurn(ctx context.Context, pool *pgxpool.Pool, key, holder string) error {
	var released bool
	err := pool.QueryRow(ctx, "select release_lock($1, $2)", key, holder).Scan(&released)
	if err == nil && !released {
		err = fmt.Errorf("%s had lost %s", holder, key)
	}
	if err == nil {
		_, err = pool.Exec(ctx, "select wake_lock_waiter($1)", key)
	}
	return err
}

// A stretch is what waiters of one key had while all of them waited for it all the time.
type stretch struct {
	turns []int           // of each waiter
	waits []time.Duration // from the call to the grant
	asked int             // by SQL callers
}

// contendInTurn makes so many SQL callers, and so many Lockers, acquire the key until they had so many
// turns together. The SQL callers are the first ones.
func contendInTurn(t *testing.T, db *pgtest.DB, key string, callers, lockers, turns int, work time.Duration) stretch {
	t.Helper()
	result := stretch{turns: make([]int, callers+lockers)}
	var inside, left atomic.Int32
	left.Store(int32(turns))
	var mu sync.Mutex
	served := func(who int, wait time.Duration, asked int) (more bool) {
		if inside.Add(1) != 1 {
			t.Errorf("%s is held twice", key)
		}
		time.Sleep(work)
		inside.Add(-1)
		more = left.Add(-1) > 0
		mu.Lock()
		defer mu.Unlock()
		if more {
			result.turns[who]++
			result.waits = append(result.waits, wait)
			result.asked += asked
		}
		return more
	}
	first := testkit.Acquire(t, testkit.NewLocker(t, db, nil), key)
	var free atomic.Pointer[time.Time] // waits count from then on
	since := func(began time.Time) time.Duration {
		if freed := *free.Load(); began.Before(freed) {
			began = freed
		}
		return time.Since(began)
	}
	var all sync.WaitGroup
	for who := range callers {
		all.Go(func() {
			for n, more := 0, true; more; n++ {
				holder, began := fmt.Sprint("sql:", who, ":", n), time.Now()
				asked, err := acquireInTurn(t.Context(), db.Pool, key, holder)
				if err == nil {
					more = served(who, since(began), asked)
					err = releaseInTurn(t.Context(), db.Pool, key, holder)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for who := callers; who < callers+lockers; who++ {
		locks := testkit.Listening(t, db, fmt.Sprint("go ", who))
		all.Go(func() {
			for more := true; more; {
				began := time.Now()
				if err := locks.Do(t.Context(), key, func(context.Context, *pgxlock.Lock) error {
					more = served(who, since(began), 0)
					return nil
				}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	pgtest.Until(t, "all of them wait", func() bool {
		return testkit.Query[int](t, db, "select count(*) from pgxlock_waiters where name = $1", key) == callers+lockers
	})
	now := time.Now()
	free.Store(&now)
	testkit.Release(t, first)
	all.Wait()
	testkit.NoTickets(t, db)
	slices.Sort(result.waits)
	var sum time.Duration
	for _, wait := range result.waits {
		sum += wait
	}
	n, grants := len(result.waits), 0
	for _, had := range result.turns[:callers] {
		grants += had
	}
	mean := sum / time.Duration(n)
	t.Logf("%d SQL callers and %d Lockers, work of %s: turns %v; wait: mean %s, 99 of 100 within %.1f times that, longest %.1f times; %.1f questions for a grant to a SQL caller",
		callers, lockers, work, result.turns, mean, float64(result.waits[n*99/100])/float64(mean), float64(result.waits[n-1])/float64(mean), float64(result.asked)/float64(max(grants, 1)))
	return result
}

// What SQL callers that wait in turn get beside Lockers: half an equal share at least.
func TestSQLCallersInTurnHaveTheirShareBesideLockers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, work := range []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond} {
		t.Run(fmt.Sprint("work of ", work), func(t *testing.T) {
			t.Parallel()
			db := testkit.Roomy(t, testkit.Migrated(t), 30)
			const callers, lockers, turns = 4, 4, 240
			for try := 1; ; try++ { // a busy machine may let one stand still for most of the time
				got := contendInTurn(t, db, "k", callers, lockers, turns, work)
				if slices.Min(got.turns) >= turns/(callers+lockers)/2 {
					return
				}
				if try == 3 {
					t.Fatalf("one had %d of %d turns", slices.Min(got.turns), turns)
				}
			}
		})
	}
}

// Its ticket would be ahead of the others for ever. No SQL caller is there that could have it woken.
func TestSQLCallerThatDiedDelaysLockersByItsTurn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.Listening(t, db, "patient")
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	if testkit.Query[bool](t, db, "select acquired from acquire_in_turn('k', 'dead')") {
		t.Fatal("granted")
	}
	db.Exec(t, "update pgxlock_waiters set live_until = 'infinity'")
	granted := testkit.Waits(t, locks, "k")
	testkit.UntilQueued(t, db, "k", 1)
	testkit.Release(t, lock)
	testkit.Release(t, <-granted)
	db.Exec(t, "select leave_queue('k', 'dead')")
	testkit.NoTickets(t, db)
}

// The client is cut off after the server has done what it asked for: what it was given is its own when it
// comes back, and nothing else is left behind.
func TestSQLCallerFindsWhatItWasGivenBeforeItWasCutOff(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	proxy, cut := testkit.Proxied(t, db)
	lose := func() {
		t.Helper()
		lost := proxy.Arm(t, testkit.LoseReply, "from acquire_in_turn")
		if asked, err := acquireInTurn(t.Context(), cut.Pool, "k", "sql"); err == nil {
			t.Fatalf("an answer after %d questions", asked)
		}
		lost.Happened(t)
	}
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	lose()
	ticket := testkit.Query[int64](t, db, "select ticket from pgxlock_waiters")
	if again := testkit.Query[int64](t, db, "select ticket from acquire_in_turn('k', 'sql')"); again != ticket {
		t.Errorf("ticket %d, then %d", ticket, again)
	}
	testkit.Release(t, lock)
	lose()
	token := testkit.Query[int64](t, db, "select fencing_token from distributed_locks where holder_id = 'sql'")
	if again := testkit.Query[int64](t, db, "select fencing_token from acquire_in_turn('k', 'sql', 30, $1)", ticket); again != token {
		t.Errorf("token %d, then %d", token, again)
	}
	testkit.NoTickets(t, db)
}

func TestSQLCallersWaitInTurnThroughAPooler(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	behindPoolers(t, nil, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		if mode == "session" {
			return // each of them has a connection of its own
		}
		db := &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres")+"&default_query_exec_mode=exec"), URL: pooler.URL("postgres"), Name: "postgres"}
		got := contendInTurn(t, db, "k", 6, 0, 60, time.Millisecond)
		if slices.Min(got.turns) == 0 {
			t.Errorf("turns: %v", got.turns)
		}
	})
}
