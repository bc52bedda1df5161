//go:build unix

package systemtest_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// These tests are about waiting between real processes.

// A turn is one grant, told by the child that had it.
type turn struct {
	Worker   int
	Token    int64
	From, To int64 // nanoseconds since 1970
}

// contend makes so many workers wait for the key, each so often, after the child was
// told to begin.
func contend(workers, rounds int) func(context.Context, string, string, func(any) error) error {
	return func(ctx context.Context, url, key string, report func(any) error) error {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		defer pool.Close()
		locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: testkit.TTL, Backoff: testkit.Seldom})
		if err != nil {
			return err
		}
		// A process that listens later gets fewer turns at first.
		if err := testkit.HearOf(ctx, pool, locks); err != nil {
			return err
		}
		if err := report("ready"); err != nil {
			return err
		}
		if err := untilTold(); err != nil {
			return err
		}
		turns := make(chan turn, workers*rounds)
		failed := make(chan error, workers)
		var all sync.WaitGroup
		for worker := range workers {
			all.Go(func() {
				for range rounds {
					if err := locks.Do(ctx, key, func(_ context.Context, lock *pgxlock.Lock) error {
						from := time.Now().UnixNano()
						time.Sleep(100 * time.Microsecond) // the work
						turns <- turn{worker, lock.Token(), from, time.Now().UnixNano()}
						return nil
					}); err != nil {
						failed <- err
						return
					}
				}
			})
		}
		all.Wait()
		close(turns)
		close(failed)
		for err := range failed {
			return err
		}
		var told []turn
		for t := range turns {
			told = append(told, t)
		}
		if err := report(told); err != nil {
			return err
		}
		return locks.Close(ctx)
	}
}

// startAll starts so many children, and tells them to begin together.
func startAll(t *testing.T, db *pgtest.DB, what, key string, processes int) []*child {
	t.Helper()
	var children []*child
	for range processes {
		children = append(children, startChild(t, what, db.URL, key))
	}
	for _, c := range children {
		var ready string
		c.report(t, &ready)
	}
	for _, c := range children {
		c.tell(t)
	}
	return children
}

// contending starts so many children that contend for the key, which nobody has before
// all of them wait: who came earlier would have had turns that others could not.
func contending(t *testing.T, db *pgtest.DB, what, key string, processes int) []*child {
	t.Helper()
	holder := testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, holder, key)
	children := startAll(t, db, what, key, processes)
	testkit.UntilQueued(t, db, key, processes)
	testkit.Release(t, lock)
	return children
}

// told collects all turns, in the order of their tokens, and sees that they did not
// overlap.
func told(t *testing.T, children []*child) []turn {
	t.Helper()
	var turns []turn
	for i, c := range children {
		var mine []turn
		c.report(t, &mine)
		for _, turn := range mine {
			turn.Worker += 1000 * i
			turns = append(turns, turn)
		}
		c.end(t)
	}
	slices.SortFunc(turns, func(a, b turn) int { return int(a.Token - b.Token) })
	for i := 1; i < len(turns); i++ {
		if turns[i].From < turns[i-1].To {
			t.Errorf("token %d was held from %d, token %d until %d", turns[i].Token, turns[i].From, turns[i-1].Token, turns[i-1].To)
		}
	}
	return turns
}

// handOvers returns the times between the end of one turn and the next one's begin.
func handOvers(turns []turn) (median, p99, worst time.Duration) {
	var gaps []time.Duration
	for i := 1; i < len(turns); i++ {
		gaps = append(gaps, time.Duration(turns[i].From-turns[i-1].To))
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/2], gaps[len(gaps)*99/100], gaps[len(gaps)-1]
}

func TestSoakHundredsOfWaitersOfFourProcessesAreServedOnceEach(t *testing.T) {
	t.Parallel()
	workers := 50 // a child is made for 50, or for 200
	if pgtest.Soak(t, false, true) {
		workers = 200
	}
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	testkit.KeepTurns(t, db)
	notified := testkit.CountNotifications(t, db)
	for try := 1; ; try++ { // a busy machine may let some stand still for most of the time
		turns := told(t, contending(t, db, fmt.Sprintf("wait for a lease %d times", workers), "k", 4))
		if len(turns) != 4*workers {
			t.Errorf("%d grants", len(turns))
		}
		// What one process gets beyond a turn of 16 while the others wait, as long as all do.
		var runs, longest int
		for i, run := 1, 1; i < 3*workers && i < len(turns); i++ {
			if run++; turns[i].Worker/1000 != turns[i-1].Worker/1000 {
				run = 1
			}
			if run > 16 {
				runs++
			}
			longest = max(longest, run)
		}
		median, p99, worst := handOvers(turns)
		t.Logf("hand-over: median %s, 99 of 100 within %s, worst %s; the same process after its turn %d times, %d at most in a row; %d notifications",
			median, p99, worst, runs, longest, notified())
		testkit.NoTickets(t, db)
		if runs <= len(turns)/4 {
			return
		}
		if try == 3 {
			t.Fatalf("the same process was served after its turn %d times in %d", runs, len(turns))
		}
	}
}

func TestProcessesAndTheirWorkersTakeTurns(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, barges := range map[string]bool{"alone": false, "beside callers in SQL that do not queue": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.Roomy(t, testkit.Migrated(t), 30)
			testkit.KeepTurns(t, db)
			for try := 1; ; try++ { // a busy machine may let one stand still for most of the time
				least := takeTurns(t, db, barges)
				testkit.NoTickets(t, db)
				if least >= 25/4 { // a quarter of an equal share
					return
				}
				if try == 3 {
					t.Fatalf("one worker had %d turns when another one had 25", least)
				}
			}
		})
	}
}

// takeTurns has four workers of each of four processes take 25 turns each, and returns how
// many the least served one had when the first one had all of its own.
func takeTurns(t *testing.T, db *pgtest.DB, barges bool) (least int) {
	t.Helper()
	children := contending(t, db, "take turns with 4 workers", "k", 4)
	barged := 0
	stop := func() {}
	if barges {
		conn := db.Connect(t)
		stop = inBackground(func(ended func() bool) {
			for barged < 100 && !ended() {
				var granted bool
				err := conn.QueryRow(t.Context(), "select acquire_lock('k', 'sql', 60) from pg_sleep(0.005)").Scan(&granted)
				if err == nil && granted {
					barged++
					_, err = conn.Exec(t.Context(), "select release_lock('k', 'sql'); commit; select wake_lock_waiter('k')")
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	defer stop()
	turns := told(t, children)
	stop()
	if len(turns) != 4*4*25 {
		t.Errorf("%d grants", len(turns))
	}
	least = leastServed(turns, 25)
	median, p99, worst := handOvers(turns)
	t.Logf("hand-over: median %s, 99 of 100 within %s, worst %s; the least served had %d turns when the first had 25; SQL had %d in between",
		median, p99, worst, least, barged)
	return least
}

// leastServed returns how many turns the least served worker had when the first one
// had so many.
func leastServed(turns []turn, all int) int {
	counts := make(map[int]int)
	for _, turn := range turns {
		counts[turn.Worker]++
		if counts[turn.Worker] == all {
			break
		}
	}
	least := all
	for process := range 4 {
		for worker := range 4 {
			least = min(least, counts[1000*process+worker])
		}
	}
	return least
}

// inBackground runs do until stop is called, which waits for it.
func inBackground(do func(ended func() bool)) (stop func()) {
	ending, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		do(func() bool {
			select {
			case <-ending:
				return true
			default:
				return false
			}
		})
	}()
	return sync.OnceFunc(func() {
		close(ending)
		<-done
	})
}

// Who is killed while it waits, before or after it was woken, or frozen, delays the
// others by its turn at most, and not by a TTL.
func TestWaiterThatIsKilledOrFrozenDelaysTheOthersByItsTurn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, frozen := range map[string]bool{"killed": false, "frozen": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.Roomy(t, testkit.Migrated(t), 30)
			holder := testkit.NewLocker(t, db, nil)
			patient := testkit.Listening(t, db, "patient")
			woken := testkit.CountNotifications(t, db)
			wakeUps := 0 // most of a round
			// Now and then somebody comes by itself.
			for round := 0; round < 3 || frozen && wakeUps < 2 && round < 20; round++ {
				lock := testkit.Acquire(t, holder, "k")
				victim := startAll(t, db, "wait for a lease", "k", 1)[0]
				testkit.UntilQueued(t, db, "k", 1)
				// What it has asked the server for it could be granted while it is frozen: it must listen by now, not poll.
				pgtest.Until(t, "it was refused", func() bool {
					return testkit.Query[bool](t, db, `select exists (select from pg_stat_activity a join pgxlock_waiters w on a.application_name = 'pgxlock ' || left(w.owner, 50)
						where w.name = 'k' and w.client is not null and a.state = 'idle' and a.query like '%pgxlock_acquire_one%' and a.query_start > w.since
						  and a.state_change < clock_timestamp() - interval '300 ms')`) // and does not ask again soon
				})
				granted := testkit.Waits(t, patient, "k")
				testkit.UntilQueued(t, db, "k", 2)
				if frozen {
					victim.freeze(t)
				} else {
					victim.signal(t, syscall.SIGKILL)
					_ = victim.cmd.Wait()
				}
				began, before := time.Now(), woken()
				testkit.Release(t, lock)
				got := <-granted
				t.Logf("%s: granted after %s", name, time.Since(began))
				wakeUps = max(wakeUps, woken()-before)
				testkit.Release(t, got)
				if frozen {
					victim.thaw(t)
					var turns []turn
					victim.report(t, &turns)
					victim.end(t)
				}
			}
			if frozen && wakeUps < 2 {
				t.Error("nobody looked whether the first one slept through its turn")
			}
			testkit.NoTickets(t, db)
		})
	}
}
