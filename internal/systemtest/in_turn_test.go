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

// A sqlCaller sends these statements, as docs/sql-leases.md shows them: $1 the key, $2 the holder, $3 the ticket.
type sqlCaller struct {
	ask, release string
	queue        string // what it adds to the key
	takes        int
}

var exclusively = sqlCaller{"select acquired, ticket, ask_again_ms from acquire_in_turn($1, $2, 30, $3)", "select release_lock($1, $2)", "", 1}

// acquire waits as a SQL caller does, and returns how often it asked.
func (s sqlCaller) acquire(ctx context.Context, pool *pgxpool.Pool, key, holder string) (asked int, err error) {
	var acquired bool
	var ticket *int64
	var again *int
	for {
		asked++
		if err := pool.QueryRow(ctx, s.ask, key, holder, ticket).Scan(&acquired, &ticket, &again); err != nil || acquired {
			return asked, err
		}
		time.Sleep(time.Duration(*again) * time.Millisecond)
	}
}

// contender is a caller that waits so.
func (s sqlCaller) contender(t *testing.T, db *pgtest.DB, key, name string) contender {
	turn := func(n int, inside func()) (asked int, err error) {
		holder := fmt.Sprint(name, ":", n)
		if asked, err = s.acquire(t.Context(), db.Pool, key, holder); err != nil {
			return asked, err
		}
		inside()
		var released bool
		if err = db.Pool.QueryRow(t.Context(), s.release, key, holder).Scan(&released); err == nil && !released {
			err = fmt.Errorf("%s had lost %s", holder, key)
		}
		if err == nil {
			_, err = db.Pool.Exec(t.Context(), "select wake_lock_waiter($1)", key+s.queue)
		}
		return asked, err
	}
	return contender{s.takes, turn}
}

// A contender acquires, calls a function, and releases, once a turn. It says how often it asked, if it does.
type contender struct {
	takes int // of what there is of the key
	turn  func(n int, inside func()) (asked int, err error)
}

// A stretch is what waiters of one key had while all of them waited for it all the time.
type stretch struct {
	turns []int           // of each waiter
	waits []time.Duration // from the call to the grant
	asked int             // by SQL callers

	most, longest float64 // how many times the mean wait 99 of 100 waits were at most, and the longest
}

// contendInTurn makes all contenders acquire the key until they had so many turns together. The first one holds all
// that there is until the others are in its queue.
func contendInTurn(t *testing.T, db *pgtest.DB, queue string, first contender, all []contender, turns int, work time.Duration) stretch {
	t.Helper()
	result := stretch{turns: make([]int, len(all))}
	var inside, left atomic.Int32
	left.Store(int32(turns))
	var mu sync.Mutex
	served := func(who int, wait time.Duration) (more bool) {
		if took := inside.Add(int32(all[who].takes)); took > int32(first.takes) {
			t.Errorf("%d of %d are held", took, first.takes)
		}
		time.Sleep(work)
		inside.Add(-int32(all[who].takes))
		more = left.Add(-1) > 0
		mu.Lock()
		defer mu.Unlock()
		if more {
			result.turns[who]++
			result.waits = append(result.waits, wait)
		}
		return more
	}
	began, free := make(chan error, 2), make(chan struct{})
	var freed time.Time // waits count from then on
	var waiting sync.WaitGroup
	waiting.Go(func() {
		_, err := first.turn(0, func() {
			began <- nil
			<-free
		})
		began <- err
	})
	if err := <-began; err != nil {
		t.Fatal(err)
	}
	for who, c := range all {
		waiting.Go(func() {
			for n, more := 1, true; more; n++ {
				began := time.Now()
				asked, err := c.turn(n, func() {
					if began.Before(freed) {
						began = freed
					}
					more = served(who, time.Since(began))
				})
				if err != nil {
					t.Error(err)
					return
				}
				if more {
					mu.Lock()
					result.asked += asked
					mu.Unlock()
				}
			}
		})
	}
	pgtest.Until(t, "all of them wait", func() bool {
		return testkit.Query[int](t, db, "select count(*) from pgxlock_waiters where name = $1", queue) == len(all)
	})
	freed = time.Now()
	close(free)
	waiting.Wait()
	if err := <-began; err != nil {
		t.Error(err)
	}
	testkit.NoTickets(t, db)
	slices.Sort(result.waits)
	var sum time.Duration
	for _, wait := range result.waits {
		sum += wait
	}
	n := len(result.waits)
	mean := sum / time.Duration(n)
	result.most, result.longest = float64(result.waits[n*99/100])/float64(mean), float64(result.waits[n-1])/float64(mean)
	t.Logf("work of %s: turns %v; wait: mean %s, 99 of 100 within %.1f times that, longest %.1f times; %d questions of SQL callers",
		work, result.turns, mean, result.most, result.longest, result.asked)
	return result
}

// untilFair repeats a stretch until each waiter had half an equal share at least, and no wait was much longer than the
// mean: a busy machine may let one stand still for most of the time.
func untilFair(t *testing.T, contend func() stretch) {
	t.Helper()
	for try := 1; ; try++ {
		got := contend()
		least := len(got.waits) / len(got.turns) / 2
		if slices.Min(got.turns) >= least && got.most <= 3 && got.longest <= 6 {
			return
		}
		if try == 3 {
			t.Fatalf("turns %v of at least %d; 99 of 100 waits within %.1f times the mean, at most 3; the longest %.1f times, at most 6", got.turns, least, got.most, got.longest)
		}
	}
}

// lockers are contenders that are Lockers, each with a way to hold the key while a function runs.
func lockers(t *testing.T, db *pgtest.DB, n, takes int, do func(locks *pgxlock.Locker, fn func()) error) (all []contender) {
	for range n {
		locks := testkit.Listening(t, db, fmt.Sprint("go ", takes))
		all = append(all, contender{takes, func(_ int, inside func()) (int, error) { return 0, do(locks, inside) }})
	}
	return all
}

// doing is [pgxlock.Locker.Do] for lockers.
func doing(t *testing.T, key string, opts ...pgxlock.AcquireOption) func(*pgxlock.Locker, func()) error {
	return func(locks *pgxlock.Locker, fn func()) error {
		return locks.Do(t.Context(), key, func(context.Context, *pgxlock.Lock) error {
			fn()
			return nil
		}, opts...)
	}
}

// A mixture is SQL callers and Lockers that want the same.
type mixture struct {
	callers []sqlCaller
	lockers func(t *testing.T, db *pgtest.DB) []contender
	all     sqlCaller // takes all that there is
}

// eachOf is how many there are of each of a mixture.
const eachOf = 2

var mixtures = func() map[string]mixture {
	const permits = 3
	permitsInTurn := func(n int) sqlCaller {
		return sqlCaller{
			fmt.Sprintf("select acquired, ticket, ask_again_ms from acquire_permits_in_turn($1, $2, %d, %d, 30, $3)", permits, n),
			fmt.Sprintf("select release_all_locks($2) = %d and $1::text is not null", n), "#", n,
		}
	}
	acquiringN := func(t *testing.T, n int) func(*pgxlock.Locker, func()) error {
		return func(locks *pgxlock.Locker, fn func()) error {
			s, err := locks.Semaphore(permits)
			if err != nil {
				return err
			}
			held, err := s.AcquireN(t.Context(), "k", n)
			if err != nil {
				return err
			}
			fn()
			return held.Release(t.Context())
		}
	}
	shared := sqlCaller{"select acquired, ticket, ask_again_ms from acquire_shared_in_turn($1, $2, 30, $3)", "select release_shared_lock($1, $2)", "", 1}
	writer := exclusively
	writer.takes = 2 * eachOf // readers
	return map[string]mixture{
		"leases": {
			[]sqlCaller{exclusively, exclusively},
			func(t *testing.T, db *pgtest.DB) []contender { return lockers(t, db, 2*eachOf, 1, doing(t, "k")) },
			exclusively,
		},
		"shares": {
			[]sqlCaller{writer, shared},
			func(t *testing.T, db *pgtest.DB) []contender {
				return append(lockers(t, db, eachOf, writer.takes, doing(t, "k")), lockers(t, db, eachOf, 1, doing(t, "k", pgxlock.Shared))...)
			},
			writer,
		},
		"permits": {
			[]sqlCaller{permitsInTurn(1), permitsInTurn(2)},
			func(t *testing.T, db *pgtest.DB) []contender {
				return append(lockers(t, db, eachOf, 1, acquiringN(t, 1)), lockers(t, db, eachOf, 2, acquiringN(t, 2))...)
			},
			permitsInTurn(permits),
		},
	}
}()

// contend makes all of them, the SQL callers on sqlDB and the Lockers on db, want so many turns together.
func (m mixture) contend(t *testing.T, sqlDB, db *pgtest.DB, turns int, work time.Duration) {
	t.Helper()
	var all []contender
	for i, caller := range m.callers {
		for j := range eachOf {
			all = append(all, caller.contender(t, sqlDB, "k", fmt.Sprint("sql:", i, ":", j)))
		}
	}
	all = append(all, m.lockers(t, db)...)
	untilFair(t, func() stretch {
		return contendInTurn(t, db, "k"+m.all.queue, m.all.contender(t, db, "k", "first"), all, turns, work)
	})
}

func TestSQLCallersInTurnHaveTheirShareBesideLockers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, m := range mixtures {
		for _, work := range []time.Duration{0, 5 * time.Millisecond, 20 * time.Millisecond} {
			t.Run(fmt.Sprint(name, ", work of ", work), func(t *testing.T) {
				t.Parallel()
				db := testkit.Roomy(t, testkit.Migrated(t), 30)
				m.contend(t, db, db, 240, work)
			})
		}
	}
}

// Its ticket would be ahead of the others for ever. No SQL caller is there that could have it woken.
func TestSQLCallerThatDiedDelaysLockersByItsTurn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for ask, lockers := range map[string]func(t *testing.T, locks *pgxlock.Locker) <-chan *pgxlock.Lock{
		"acquire_in_turn('k', 'dead')":        func(t *testing.T, locks *pgxlock.Locker) <-chan *pgxlock.Lock { return testkit.Waits(t, locks, "k") },
		"acquire_shared_in_turn('k', 'dead')": func(t *testing.T, locks *pgxlock.Locker) <-chan *pgxlock.Lock { return testkit.Waits(t, locks, "k") },
		"acquire_permits_in_turn('k', 'dead', 1)": func(t *testing.T, locks *pgxlock.Locker) <-chan *pgxlock.Lock {
			return testkit.WaitsForPermit(t, testkit.Semaphore(t, locks, 1), "k")
		},
	} {
		t.Run(ask, func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			locks := testkit.Listening(t, db, "patient")
			first := <-lockers(t, testkit.NewLocker(t, db, nil))
			if testkit.Query[bool](t, db, "select acquired from "+ask) {
				t.Fatal("granted")
			}
			db.Exec(t, "update pgxlock_waiters set live_until = 'infinity'")
			granted := lockers(t, locks)
			pgtest.Until(t, "a Locker is behind it", func() bool { return testkit.Query[int](t, db, "select count(*) from pgxlock_waiters") == 2 })
			testkit.Release(t, first)
			testkit.Release(t, <-granted)
			if left := testkit.Query[int](t, db, "select count(*) from lock_holders"); left != 0 {
				t.Errorf("%d holders are left", left)
			}
			db.Exec(t, "select leave_queue(name, 'dead') from pgxlock_waiters")
			testkit.NoTickets(t, db)
		})
	}
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
		if asked, err := exclusively.acquire(t.Context(), cut.Pool, "k", "sql"); err == nil {
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

func TestSQLCallersHaveTheirShareThroughAPooler(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	db = testkit.Roomy(t, db, 30)
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		if mode == "session" {
			return // each of them has a connection of its own
		}
		pooled := &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres")+"&default_query_exec_mode=exec"), URL: pooler.URL("postgres"), Name: "postgres"}
		for name, m := range mixtures {
			t.Run(name, func(t *testing.T) { m.contend(t, pooled, db, 120, 5*time.Millisecond) })
		}
		wantClean(t, mode, pooler, db)
	})
}
