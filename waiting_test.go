package pgxlock_test

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

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Two Lockers are here what two processes are: each has its own connections.

// seldom is a Backoff under which nothing happens in time that nobody is told.
func seldom(int) time.Duration { return time.Hour }

// waitingKinds are the kinds of Locker that wait for other processes. Nothing happens
// in time by their Backoff.
var waitingKinds = map[string]func(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker{
	"leases": func(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker {
		t.Helper()
		return newLocker(t, db, &pgxlock.LeaseConfig{Owner: owner, Backoff: seldom})
	},
	"advisory locks": func(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker {
		t.Helper()
		return newAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: owner, Backoff: seldom})
	},
}

// eachWaitingKind runs test with each of them; newLocker makes one that listens.
func eachWaitingKind(t *testing.T, test func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker)) {
	t.Helper()
	t.Parallel()
	for kind, newLocker := range waitingKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := roomy(t, migrated(t), 40)
			test(t, db, func(owner string) *pgxlock.Locker {
				t.Helper()
				locks := newLocker(t, db, owner)
				listen(t, db, locks, newLocker(t, db, "other"))
				return locks
			})
			noTickets(t, db)
		})
	}
}

// listening is a Lease Locker that hears of releases by others.
func listening(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker {
	t.Helper()
	locks := waitingKinds["leases"](t, db, owner)
	listen(t, db, locks, newLocker(t, db, nil))
	return locks
}

// listen makes locks wait for other, which makes it listen.
func listen(t *testing.T, db *pgtest.DB, locks, other *pgxlock.Locker) {
	t.Helper()
	key := fmt.Sprintf("listen %p", locks)
	lock := acquire(t, other, key)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := locks.Acquire(ctx, key); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("Acquire: %v", err)
		}
	}()
	untilQueued(t, db, key, 1)
	cancel()
	<-done
	release(t, lock)
	until(t, "its ticket is gone", func() bool { return tickets(t, db, key) == 0 })
}

// tickets counts those for a key, of either kind, whose processes listen.
func tickets(t *testing.T, db *pgtest.DB, key string) int {
	t.Helper()
	return query[int](t, db, "select count(*) from pgxlock_waiters where name in ($1, advisory_lock_key($1)::text) and client is not null", key)
}

// untilQueued waits until so many tickets stand in the queue of a key.
func untilQueued(t *testing.T, db *pgtest.DB, key string, n int) {
	t.Helper()
	until(t, fmt.Sprintf("%d tickets for %s", n, key), func() bool { return tickets(t, db, key) == n })
}

func noTickets(t *testing.T, db *pgtest.DB) {
	t.Helper()
	limit := time.Now().Add(5 * time.Second)
	until(t, "no ticket is left", func() bool {
		if time.Now().After(limit) {
			limit = limit.Add(time.Hour)
			t.Log(query[string](t, db, "select string_agg(concat_ws(' ', kind, name, ticket, client, owner, waiters, clock_timestamp() - since, live_until - clock_timestamp(), woken), e'\n') from pgxlock_waiters"))
		}
		return query[int](t, db, "select count(*) from pgxlock_waiters") == 0
	})
}

// waits acquires in the background.
func waits(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.Option) <-chan *pgxlock.Lock {
	t.Helper()
	granted := make(chan *pgxlock.Lock, 1)
	go func() {
		lock, err := locks.Acquire(t.Context(), key, opts...)
		if err != nil {
			t.Error(err)
		}
		granted <- lock
	}()
	return granted
}

// release releases, which must work.
func release(t *testing.T, lock *pgxlock.Lock) {
	t.Helper()
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// countNotifications counts the wake-ups that are sent, by stamps on tickets.
func countNotifications(t *testing.T, db *pgtest.DB) func() int {
	t.Helper()
	db.Exec(t, `create unlogged table stamps (n bigint);
		create function count_stamp() returns trigger language plpgsql as $$ begin insert into stamps values (new.ticket); return null; end $$;
		create trigger stamps after update on pgxlock_waiters for each row when (old.woken is null and new.woken is not null) execute function count_stamp()`)
	return func() int { return query[int](t, db, "select count(*) from stamps") }
}

func TestAReleaseWakesAWaiterOfAnotherProcess(t *testing.T) {
	eachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		first := newLocker("holder")
		second := newLocker("second")
		// Who waits may come by itself, with what it asks when it has a ticket or by its
		// look at all tickets: on a busy machine often.
		woken := countNotifications(t, db)
		for i := 0; woken() < 2; i++ {
			if i == 30 {
				t.Fatalf("woken %d times for %d releases", woken(), i)
			}
			lock := acquire(t, first, "k")
			granted := waits(t, second, "k")
			untilQueued(t, db, "k", 1)
			began := time.Now()
			release(t, lock)
			got := <-granted
			if i == 0 {
				t.Logf("granted %s after Release was called", time.Since(began))
			}
			release(t, got)
		}
	})
}

// turnTime is how long who is woken has to ask before others may go past it. On a busy
// machine that may not be enough.
const turnTime = 250 * time.Millisecond

func TestProcessesAreServedInTheOrderOfTheirTickets(t *testing.T) {
	eachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		holder := newLocker("holder")
		lock := acquire(t, holder, "k")
		var mu sync.Mutex
		var order []int
		var granted []time.Time
		var all sync.WaitGroup
		for i := range 5 {
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
			untilQueued(t, db, "k", i+1)
		}
		free := time.Now()
		release(t, lock)
		all.Wait()
		if len(order) != 5 {
			t.Fatalf("served: %v", order)
		}
		var slept [5]bool // through its turn, so that others may go past it
		for n, i := range order {
			for j := range i {
				if slices.Contains(order[:n], j) || slept[j] {
					continue
				}
				if slept[j] = true; granted[n].Sub(free) < turnTime {
					t.Errorf("served in the order %v: %d went past %d after %s", order, i, j, granted[n].Sub(free))
				}
			}
			free = granted[n] // or later
		}
	})
}

// One of two keeps asking as soon as it has released; it must not pass the other by.
func TestWhoJustHadTheLockDoesNotPassWhoWaits(t *testing.T) {
	eachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		greedy := newLocker("greedy")
		patient := newLocker("patient")
		lock := acquire(t, greedy, "k")
		granted := waits(t, patient, "k")
		untilQueued(t, db, "k", 1)
		until(t, "the holder knows", func() bool { return greedy.Wanted("k") })
		free := time.Now()
		release(t, lock)
		again := waits(t, greedy, "k")
		inTurn(t, free, granted, again)
	})
}

// inTurn releases what two who wait for the same lock are granted. It was free from then
// on; the second one may only come first if the first one slept through its turn.
func inTurn(t *testing.T, free time.Time, first, second <-chan *pgxlock.Lock) {
	t.Helper()
	var got *pgxlock.Lock
	select {
	case got = <-first:
	case got = <-second:
		if d := time.Since(free); d < turnTime {
			t.Errorf("the second one went past the first one after %s", d)
		}
		second = first
	}
	select {
	case <-second:
		t.Error("both have it")
	default:
	}
	release(t, got)
	release(t, <-second)
}

func TestATryPassesWhoWaits(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	locks := newLocker(t, db, nil)
	release(t, acquire(t, locks, "connected"))
	db.Exec(t, `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
		values (0, 'k', nextval('pgxlock_tickets'), 'somebody', 1, clock_timestamp(), clock_timestamp() + interval '1 hour')`)
	if _, err := locks.Acquire(t.Context(), "k", pgxlock.MaxWait(2*time.Second)); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("who waits: %v", err)
	}
	lock, err := locks.TryAcquire(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	release(t, lock)
}

// An SQL caller tells nobody, unless it says so.
func TestAReleaseInSQLIsNoticedAndWakesWithWakeLockWaiter(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	locks := listening(t, db, "waiter")
	woken := countNotifications(t, db)
	for _, statements := range []string{
		"select release_lock('k', 'sql')",
		"select release_lock('k', 'sql'); commit; select wake_lock_waiter('k')",
	} {
		before := woken()
		for range 3 {
			if !query[bool](t, db, "select acquire_lock('k', 'sql', 3600)") {
				t.Fatal("the key is held")
			}
			granted := waits(t, locks, "k")
			untilQueued(t, db, "k", 1)
			db.Exec(t, statements)
			release(t, <-granted)
		}
		if n, wakes := woken()-before, strings.Contains(statements, "wake"); wakes != (n > 0) {
			t.Errorf("%s: woken %d times", statements, n)
		}
	}
	noTickets(t, db)
}

func TestALeaseThatRunsOutIsGrantedToWhoWaits(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	locks := listening(t, db, "waiter")
	if !query[bool](t, db, "select acquire_lock('k', 'sql', 1)") {
		t.Fatal("the key is held")
	}
	release(t, <-waits(t, locks, "k"))
	noTickets(t, db)
}

// However a wait ends, its ticket goes.
func TestAWaitThatEndsLeavesNoTicket(t *testing.T) {
	eachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		lock := acquire(t, newLocker("holder"), "k")
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
		until(t, "all stand in line", func() bool { return locks.Waiting("k") == 10 })
		untilQueued(t, db, "k", 1)
		cancel()
		ended.Wait()
		noTickets(t, db)

		if _, err := locks.Acquire(t.Context(), "k", pgxlock.MaxWait(2*time.Second)); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("MaxWait: %v", err)
		}
		noTickets(t, db)

		ended.Go(func() {
			if _, err := locks.Acquire(t.Context(), "k"); !errors.Is(err, pgxlock.ErrClosed) {
				t.Errorf("closed: %v", err)
			}
		})
		untilQueued(t, db, "k", 1)
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
		ended.Wait()
		if n := query[int](t, db, "select count(*) from pgxlock_waiters"); n != 0 {
			t.Errorf("Close left %d tickets", n)
		}
		release(t, lock)
	})
}

// The first one's ticket is woken, and gives up at that moment.
func TestWhoGivesUpWhenWokenWakesTheNext(t *testing.T) {
	eachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		holder := newLocker("holder")
		quitter := newLocker("quitter")
		patient := newLocker("patient")
		for range 20 {
			lock := acquire(t, holder, "k")
			ctx, cancel := context.WithCancel(t.Context())
			var both sync.WaitGroup
			both.Go(func() {
				if got, err := quitter.Acquire(ctx, "k"); err == nil {
					release(t, got)
				}
			})
			untilQueued(t, db, "k", 1)
			granted := waits(t, patient, "k")
			untilQueued(t, db, "k", 2)
			both.Go(func() { release(t, lock) })
			cancel()
			release(t, <-granted)
			both.Wait()
			noTickets(t, db)
		}
	})
}

func TestAKilledListenerIsReplacedAndItsTicketsGoOnCounting(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	holder := newLocker(t, db, nil)
	locks := listening(t, db, "deaf")
	lock := acquire(t, holder, "k")
	granted := waits(t, locks, "k")
	untilQueued(t, db, "k", 1)
	was := query[int64](t, db, "select client from pgxlock_waiters where name = 'k'")
	db.Exec(t, "alter function pgxlock_waiter_key rename to unlisted") // which the next listener looks for
	if n := query[int](t, db, `select count(pg_terminate_backend(pid)) from pg_locks
		where locktype = 'advisory' and objsubid = 1 and granted and (classid::bigint << 32 | objid::bigint) = unlisted($1)`, was); n != 1 {
		t.Fatalf("%d listeners", n)
	}
	until(t, "the ticket tells that nobody listens", func() bool {
		return query[bool](t, db, "select exists (select from pgxlock_waiters where name = 'k' and client is null)")
	})
	db.Exec(t, "alter function unlisted rename to pgxlock_waiter_key")
	until(t, "the ticket tells where it listens now", func() bool {
		return query[bool](t, db, "select exists (select from pgxlock_waiters where name = 'k' and client <> $1)", was)
	})
	release(t, lock)
	release(t, <-granted)
	noTickets(t, db)
}

func TestThousandsWaitOnThreeConnectionsAndHoldNothingOpen(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 20)
	db.Exec(t, "create table written as select generate_series(1, 1000) as n")
	holder := newLocker(t, db, nil)
	var held []*pgxlock.Lock
	const keys, waiters = 100, 5000
	for i := range keys {
		held = append(held, acquire(t, holder, fmt.Sprint("k", i)))
	}
	locks := listening(t, db, "crowd")
	var served atomic.Int64
	var all sync.WaitGroup
	for i := range waiters {
		all.Go(func() {
			if err := locks.Do(t.Context(), fmt.Sprint("k", i%keys), func(context.Context, *pgxlock.Lock) error {
				served.Add(1)
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	until(t, "all wait", func() bool {
		standing := 0
		for i := range keys {
			standing += locks.Waiting(fmt.Sprint("k", i))
		}
		return standing == waiters && query[int](t, db, "select count(*) from pgxlock_waiters where client is not null") == keys
	})
	if pids := backends(t, db, "crowd"); len(pids) > 3 {
		t.Errorf("%d connections: %v", len(pids), pids)
	}
	// Both wait for whoever has a snapshot that is older than they are.
	db.Exec(t, "create index concurrently on written (n)")
	db.Exec(t, "delete from written")
	db.Exec(t, "vacuum written")
	// But for the moments in which they refresh their tickets.
	until(t, "no session holds a snapshot open", func() bool {
		return query[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and application_name = 'pgxlock crowd'
			and (backend_xmin is not null or state like 'idle in transaction%')`) == 0
	})
	for _, lock := range held {
		release(t, lock)
	}
	all.Wait()
	if n := served.Load(); n != waiters {
		t.Errorf("%d were served", n)
	}
	noTickets(t, db)
}

func TestNestedWaitsOfTwoProcessesThatWouldNeverEndFailOneOfThem(t *testing.T) {
	t.Parallel()
	db := roomy(t, migrated(t), 30)
	one := listening(t, db, "one")
	two := listening(t, db, "two")
	for name, pair := range map[string][2]*pgxlock.Locker{"two processes": {one, two}, "one process": {one, one}} {
		t.Run(name, func(t *testing.T) {
			var inside sync.WaitGroup
			inside.Add(2)
			var deadlocks atomic.Int32
			nested := func(locks *pgxlock.Locker, outer, inner string) error {
				return locks.Do(t.Context(), outer, func(ctx context.Context, _ *pgxlock.Lock) error {
					inside.Done()
					inside.Wait()
					return locks.Do(ctx, inner, func(context.Context, *pgxlock.Lock) error { return nil })
				})
			}
			var both sync.WaitGroup
			for i, locks := range pair {
				both.Go(func() {
					outer, inner := "a", "b"
					if i == 1 {
						outer, inner = inner, outer
					}
					err := nested(locks, outer, inner)
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
	noTickets(t, db)
}
