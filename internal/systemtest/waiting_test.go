package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestReleaseWakesAWaiterOfAnotherProcess(t *testing.T) {
	testkit.EachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		first := newLocker("holder")
		second := newLocker("second")
		// Who waits may come by itself, with what it asks when it has a ticket or by its
		// look at all tickets: on a busy machine often.
		woken := testkit.CountNotifications(t, db)
		for i := 0; woken() < 2; i++ {
			if i == 60 {
				t.Fatalf("woken %d times for %d releases", woken(), i)
			}
			lock := testkit.Acquire(t, first, "k")
			granted := testkit.Waits(t, second, "k")
			testkit.UntilQueued(t, db, "k", 1)
			began := time.Now()
			testkit.Release(t, lock)
			got := <-granted
			if i == 0 {
				t.Logf("granted %s after Release was called", time.Since(began))
			}
			testkit.Release(t, got)
		}
	})
}

func TestProcessesAreServedInTheOrderOfTheirTickets(t *testing.T) {
	waiters := 5
	if testing.Short() {
		waiters = 3
	}
	testkit.EachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		holder := newLocker("holder")
		lock := testkit.Acquire(t, holder, "k")
		var mu sync.Mutex
		var order []int
		var granted []time.Time
		var all sync.WaitGroup
		for i := range waiters {
			locks := newLocker(fmt.Sprint("p", i))
			all.Go(func() {
				if err := locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					mu.Lock()
					defer mu.Unlock()
					order, granted = append(order, i), append(granted, time.Now())
					return nil
				}); err != nil {
					t.Error(err)
				}
			})
			testkit.UntilQueued(t, db, "k", i+1)
		}
		free := time.Now()
		testkit.Release(t, lock)
		all.Wait()
		if len(order) != waiters {
			t.Fatalf("served: %v", order)
		}
		slept := make([]bool, waiters) // through its turn, so that others may go past it
		for n, i := range order {
			for j := range i {
				if slices.Contains(order[:n], j) || slept[j] {
					continue
				}
				if slept[j] = true; granted[n].Sub(free) < testkit.WakeTimeout {
					t.Errorf("served in the order %v: %d went past %d after %s", order, i, j, granted[n].Sub(free))
				}
			}
			free = granted[n] // or later
		}
	})
}

// Of the ticket ahead no process tries, and the lock becomes free without a release that wakes it.
// The server grants an advisory lock in no order of tickets, and its waiters poll: no ticket can keep them from it.
func TestWaiterPassesATicketThatNoProcessUses(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	locks := testkit.NewLocker(t, db, nil)
	jobs := testkit.Semaphore(t, locks, 1)
	for name, c := range map[string]struct {
		queue, hold, free string
		acquire           func(ctx context.Context) (*pgxlock.Lock, error)
	}{
		"lease":  {"0, 'k'", "acquire_lock('k', 'sql', 3600)", "release_lock('k', 'sql')", func(ctx context.Context) (*pgxlock.Lock, error) { return locks.Acquire(ctx, "k") }},
		"permit": {"0, 'jobs#'", "acquire_permit('jobs', 'sql', 1, 3600)", "release_lock('jobs#1', 'sql')", func(ctx context.Context) (*pgxlock.Lock, error) { return jobs.Acquire(ctx, "jobs") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			holder, _ := testkit.Backend(t, db)
			testkit.ExecOn(t, holder, "select "+c.hold)
			db.Exec(t, `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
				values (`+c.queue+`, nextval('pgxlock_tickets'), 'nobody', 1, clock_timestamp(), clock_timestamp() + interval '1 hour')`)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			granted := make(chan error, 1)
			go func() {
				lock, err := c.acquire(ctx)
				if err == nil {
					err = lock.Release(ctx)
				}
				granted <- err
			}()
			pgtest.Until(t, "it waits", func() bool {
				return testkit.Query[bool](t, db, "select count(*) = 2 from pgxlock_waiters where (kind, name) = ("+c.queue+"::text)")
			})
			testkit.ExecOn(t, holder, "select "+c.free)
			if err := <-granted; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestTryPassesWhoWaits(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	db.Exec(t, `create or replace function pgxlock_wake_timed_out(p_woken timestamptz) returns boolean language sql volatile
		return p_woken is not null and p_woken < clock_timestamp() - interval '1 hour'`) // a waiter would pass it as well
	locks := testkit.NewLocker(t, db, nil)
	testkit.Release(t, testkit.Acquire(t, locks, "connected"))
	db.Exec(t, `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
		values (0, 'k', nextval('pgxlock_tickets'), 'somebody', 1, clock_timestamp(), clock_timestamp() + interval '1 hour')`)
	testkit.WantBusy(t, locks, "k")
	lock, err := locks.TryAcquire(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	testkit.Release(t, lock)
}

// A release in SQL wakes nobody unless the caller asks for that.
func TestReleaseInSQLIsNoticedAndWakesWithWakeLockWaiter(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	locks := testkit.Listening(t, db, "waiter")
	woken := testkit.CountNotifications(t, db)
	for _, statements := range []string{
		"select release_lock('k', 'sql')",
		"select release_lock('k', 'sql'); commit; select wake_lock_waiter('k')",
	} {
		before, wakes := woken(), strings.Contains(statements, "wake")
		for round := 0; round < 3 || wakes && woken() == before && round < 20; round++ { // now and then it comes by itself
			if !testkit.Query[bool](t, db, "select acquire_lock('k', 'sql', 3600)") {
				t.Fatal("the key is held")
			}
			granted := testkit.Waits(t, locks, "k")
			testkit.UntilQueued(t, db, "k", 1)
			db.Exec(t, statements)
			testkit.Release(t, <-granted)
		}
		if n := woken() - before; wakes != (n > 0) {
			t.Errorf("%s: woken %d times", statements, n)
		}
	}
	testkit.NoTickets(t, db)
}

func TestLeaseThatRunsOutIsGrantedToWhoWaits(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	locks := testkit.Listening(t, db, "waiter")
	if !testkit.Query[bool](t, db, "select acquire_lock('k', 'sql', 1)") {
		t.Fatal("the key is held")
	}
	testkit.Release(t, <-testkit.Waits(t, locks, "k"))
	testkit.NoTickets(t, db)
}

// The ticket of a wait is removed however the wait ends.
func TestWaitThatEndsLeavesNoTicket(t *testing.T) {
	testkit.EachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		lock := testkit.Acquire(t, newLocker("holder"), "k")
		locks := newLocker("waiter")

		ctx, cancel := context.WithCancel(t.Context())
		var ended sync.WaitGroup
		for range 10 {
			ended.Go(func() {
				if _, err := locks.Acquire(ctx, "k"); !errors.Is(err, context.Canceled) || !errors.Is(err, pgxlock.ErrNotAcquired) {
					t.Errorf("cancelled: %v", err)
				}
			})
		}
		testkit.UntilQueued(t, db, "k", 1)
		testkit.UntilWaiting(t, db, "k", 10)
		cancel()
		ended.Wait()
		testkit.NoTickets(t, db)

		testkit.WantBusy(t, locks, "k")
		testkit.NoTickets(t, db)

		ended.Go(func() {
			if _, err := locks.Acquire(t.Context(), "k"); !errors.Is(err, pgxlock.ErrClosed) {
				t.Errorf("closed: %v", err)
			}
		})
		testkit.UntilQueued(t, db, "k", 1)
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
		ended.Wait()
		if n := testkit.Query[int](t, db, "select count(*) from pgxlock_waiters"); n != 0 {
			t.Errorf("Close left %d tickets", n)
		}
		testkit.Release(t, lock)
	})
}

// The first waiter gives up just when its ticket is woken.
func TestWaiterThatGivesUpWhenWokenWakesTheNext(t *testing.T) {
	pgtest.Long(t)
	testkit.EachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		holder := newLocker("holder")
		quitter := newLocker("quitter")
		patient := newLocker("patient")
		for range 20 {
			lock := testkit.Acquire(t, holder, "k")
			ctx, cancel := context.WithCancel(t.Context())
			var both sync.WaitGroup
			both.Go(func() {
				if got, err := quitter.Acquire(ctx, "k"); err == nil {
					testkit.Release(t, got)
				}
			})
			testkit.UntilQueued(t, db, "k", 1)
			granted := testkit.Waits(t, patient, "k")
			testkit.UntilQueued(t, db, "k", 2)
			both.Go(func() { testkit.Release(t, lock) })
			cancel()
			testkit.Release(t, <-granted)
			both.Wait()
			testkit.NoTickets(t, db)
		}
	})
}

func TestKilledListenerIsReplacedAndItsTicketsGoOnCounting(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	holder := testkit.NewLocker(t, db, nil)
	locks := testkit.Listening(t, db, "deaf")
	lock := testkit.Acquire(t, holder, "k")
	granted := testkit.Waits(t, locks, "k")
	testkit.UntilQueued(t, db, "k", 1)
	was := testkit.Query[int64](t, db, "select client from pgxlock_waiters where name = 'k'")
	db.Exec(t, "alter function pgxlock_waiter_key rename to unlisted") // which the next listener looks for
	if n := testkit.Query[int](t, db, `select count(pg_terminate_backend(pid)) from pg_locks
		where locktype = 'advisory' and objsubid = 1 and granted and (classid::bigint << 32 | objid::bigint) = unlisted($1)`, was); n != 1 {
		t.Fatalf("%d listeners", n)
	}
	pgtest.Until(t, "the ticket tells that nobody listens", func() bool {
		return testkit.Query[bool](t, db, "select exists (select from pgxlock_waiters where name = 'k' and client is null)")
	})
	db.Exec(t, "alter function unlisted rename to pgxlock_waiter_key")
	pgtest.Until(t, "the ticket tells where it listens now", func() bool {
		return testkit.Query[bool](t, db, "select exists (select from pgxlock_waiters where name = 'k' and client <> $1)", was)
	})
	testkit.Release(t, lock)
	testkit.Release(t, <-granted)
	testkit.NoTickets(t, db)
}

func TestNestedWaitsOfTwoProcessesThatWouldNeverEndFailOneOfThem(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	one := testkit.Listening(t, db, "one")
	two := testkit.Listening(t, db, "two")
	type do = func(context.Context, *pgxlock.Locker, string, func(context.Context, *pgxlock.Lock) error) error
	lease := func(ctx context.Context, locks *pgxlock.Locker, key string, fn func(context.Context, *pgxlock.Lock) error) error {
		return locks.Do(ctx, key, fn)
	}
	permit := func(ctx context.Context, locks *pgxlock.Locker, key string, fn func(context.Context, *pgxlock.Lock) error) error {
		s, err := locks.Semaphore(1)
		if err != nil {
			return err
		}
		return s.Do(ctx, key, fn)
	}
	for name, test := range map[string]struct {
		pair [2]*pgxlock.Locker
		do   [2]do // of the keys a and b
	}{
		"two processes":               {[2]*pgxlock.Locker{one, two}, [2]do{lease, lease}},
		"one process":                 {[2]*pgxlock.Locker{one, one}, [2]do{lease, lease}},
		"two processes, and a permit": {[2]*pgxlock.Locker{one, two}, [2]do{lease, permit}},
		"one process, and a permit":   {[2]*pgxlock.Locker{one, one}, [2]do{lease, permit}},
	} {
		t.Run(name, func(t *testing.T) {
			var inside sync.WaitGroup
			inside.Add(2)
			var deadlocks atomic.Int32
			var both sync.WaitGroup
			for i, locks := range test.pair {
				both.Go(func() {
					keys := [2]string{"a", "b"}
					inner := keys[1-i]
					err := test.do[i](t.Context(), locks, keys[i], func(ctx context.Context, _ *pgxlock.Lock) error {
						inside.Done()
						inside.Wait()
						return test.do[1-i](ctx, locks, inner, func(context.Context, *pgxlock.Lock) error { return nil })
					})
					if errors.Is(err, pgxlock.ErrDeadlock) {
						deadlocks.Add(1)
						if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Key != inner {
							t.Errorf("%v does not name the key %s", err, inner)
						}
					} else if err != nil {
						t.Error(err)
					}
				})
			}
			both.Wait()
			if n := deadlocks.Load(); n != 1 {
				t.Errorf("%d calls failed with ErrDeadlock, want one", n)
			}
		})
	}
	testkit.NoTickets(t, db)
}

// A waiter that holds another lock has a ticket, though its own process has the lock it wants.
func TestWaitForALockOfTheSameProcessEndsWithItsRelease(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Backoff: testkit.Seldom})
	woken := testkit.CountNotifications(t, db) // else the look at all tickets has found it
	for i := 0; woken() == 0; i++ {
		if i == 20 {
			t.Fatalf("nobody was woken for %d hand-overs", i)
		}
		k := fmt.Sprint("k", i)
		outer := testkit.Acquire(t, locks, "outer")
		lock := testkit.Acquire(t, locks, k)
		ctx, cancel := outer.Context(t.Context())
		granted := make(chan *pgxlock.Lock, 1)
		go func() {
			got, err := locks.Acquire(ctx, k)
			if err != nil {
				t.Error(err)
			}
			granted <- got
		}()
		testkit.UntilQueued(t, db, k, 1)
		testkit.Release(t, lock)
		testkit.Release(t, <-granted)
		cancel()
		testkit.Release(t, outer)
	}
}

// The pool of the caller has a callback for notifications of its own.
func TestPoolsOwnCallbackDoesNotTakeOurNotifications(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	config, err := pgxpool.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	var theirs atomic.Int32
	config.ConnConfig.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) { theirs.Add(1) }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Backoff: testkit.Seldom})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = locks.Close(context.Background()) })
	holder := testkit.NewLocker(t, db, nil)
	testkit.Listen(t, db, locks, holder)
	for range 6 {
		lock := testkit.Acquire(t, holder, "k")
		granted := testkit.Waits(t, locks, "k")
		testkit.UntilQueued(t, db, "k", 1)
		testkit.Release(t, lock)
		testkit.Release(t, <-granted)
	}
	if n := theirs.Load(); n > 0 {
		t.Errorf("%d notifications of ours went to the pool's callback", n)
	}
}

// The queue fails for good after a ticket was published.
func TestQueueThatFailsLaterKeepsNobodyFromAFreeLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for kind, newLocker := range map[string]func(t *testing.T, db *pgtest.DB) *pgxlock.Locker{
		"leases": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
			t.Helper()
			return testkit.NewLocker(t, db, nil)
		},
		"advisory locks": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
			t.Helper()
			return testkit.NewAdvisory(t, db, nil)
		},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := testkit.Roomy(t, testkit.Migrated(t), 20)
			holder, first, second := newLocker(t, db), newLocker(t, db), newLocker(t, db)
			lock := testkit.Acquire(t, holder, "k")
			granted := testkit.Waits(t, first, "k")
			testkit.UntilQueued(t, db, "k", 1)
			later := testkit.Waits(t, second, "k")
			testkit.UntilQueued(t, db, "k", 2)
			db.Exec(t, "alter function pgxlock_publish_batch rename to gone1; alter function pgxlock_wake_batch rename to gone2; alter function pgxlock_notify_holders rename to gone3")
			testkit.Release(t, lock)
			for range 2 { // in which order, nobody sees to now
				select {
				case got := <-granted:
					testkit.Release(t, got)
				case got := <-later:
					testkit.Release(t, got)
				}
			}
			db.Exec(t, "alter function gone1 rename to pgxlock_publish_batch; alter function gone2 rename to pgxlock_wake_batch; alter function gone3 rename to pgxlock_notify_holders")
		})
	}
}
