package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Readers of one process overlap all the time; a writer of another one waits.
func TestReadersDoNotPassAWriterOfAnotherProcess(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	readers, writer := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, nil)
	testkit.Listen(t, db, readers, writer)
	writerWaits := func(key string) (reading *pgxlock.Lock, granted <-chan *pgxlock.Lock) {
		reading = testkit.Acquire(t, readers, key, pgxlock.Shared)
		granted = testkit.Waits(t, writer, key)
		testkit.UntilQueued(t, db, key, 1)
		testkit.UntilWanted(t, db, readers, key)
		return reading, granted
	}
	reading, granted := writerWaits("k")
	late := testkit.Waits(t, readers, "k", pgxlock.Shared)
	testkit.UntilQueued(t, db, "k", 2)
	free := time.Now()
	testkit.Release(t, reading)
	inTurn(t, free, granted, late)
	testkit.NoTickets(t, db)

	// With a key of its own: one that gives up has the writer woken, which has its turn
	// then, even though it is refused.
	reading, granted = writerWaits("other")
	testkit.WantBusy(t, readers, "other", pgxlock.Shared) // which came after the writer
	testkit.Release(t, reading)
	testkit.Release(t, <-granted)
	testkit.NoTickets(t, db)
}

// A woken waiter whose try failed did not miss its chance: it keeps its position before later
// waiters, however long the next chance takes.
func TestWriterThatWasWokenInVainIsNotPassed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	db.Exec(t, `create or replace function pgxlock_wake_timed_out(p_woken timestamptz) returns boolean language sql volatile
		return p_woken is not null and p_woken < clock_timestamp() - interval '1 hour'`) // a turn is over when the test says so
	readers, writer := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Backoff: testkit.Seldom})
	testkit.Listen(t, db, readers, writer)
	testkit.Listen(t, db, writer, readers)
	reading := testkit.Acquire(t, readers, "k", pgxlock.Shared)
	granted := testkit.Waits(t, writer, "k")
	testkit.UntilQueued(t, db, "k", 1)
	testkit.UntilWanted(t, db, readers, "k")
	for range 2 {
		if n := testkit.Query[int](t, db, "select count(*) from pgxlock_wake_batch('{1}', array[advisory_lock_key('k')::text], '{null}')"); n != 1 {
			t.Fatalf("woken: %d", n)
		}
		pgtest.Until(t, "the writer has tried", func() bool { return testkit.Query[bool](t, db, "select woken is null from pgxlock_waiters") })
	}
	db.Exec(t, "update pgxlock_waiters set woken = woken - interval '2 hours'") // of who had not
	late := testkit.Waits(t, readers, "k", pgxlock.Shared)
	pgtest.Until(t, "the one that came later waits, or has it", func() bool { return testkit.Tickets(t, db, "k") == 2 || len(late) == 1 })
	testkit.Release(t, reading)
	select {
	case lock := <-granted:
		testkit.Release(t, lock)
		testkit.Release(t, <-late)
	case lock := <-late:
		t.Error("a reader that came later went past the writer")
		testkit.Release(t, lock)
		testkit.Release(t, <-granted)
	}
	testkit.NoTickets(t, db)
}

// The server still has the session that holds the lock, and its process still listens, but the
// process no longer knows of the lock: its connection broke without a word.
func TestHolderThatCannotKnowIsNotToldAllTheTime(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	db.Exec(t, "do $$ begin execute format('alter database %I set track_functions = ''all''', current_database()); end $$")
	proxy, proxied := testkit.Proxied(t, db)
	lost, waiter := testkit.NewAdvisory(t, proxied, &pgxlock.AdvisoryConfig{Owner: "lost"}), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "waiter"})
	testkit.Listen(t, db, lost, waiter)
	lock, other := testkit.Acquire(t, lost, "k"), testkit.Acquire(t, lost, "other")
	cut := proxy.Arm(t, testkit.DelayRequest, "call of function")
	_ = other.Release(t.Context())
	cut.Happened(t)
	<-lock.Lost()
	if n := testkit.HeldBy(t, db, "lost"); n != 2 {
		t.Fatalf("the server's session has %d locks, want both", n)
	}
	tells, wakes := testkit.Calls(t, db, "pgxlock_notify_holders"), testkit.Calls(t, db, "pgxlock_wake_batch")
	told, woken, began := tells(), wakes(), time.Now()
	waitsFor3Seconds(t, waiter)
	cut.Resume()
	_ = waiter.Close(t.Context())
	_ = lost.Close(t.Context())
	testkit.UntilGone(t, db, "waiter", "lost")
	passed := time.Since(began)
	t.Logf("%d told, %d woken in %s", tells()-told, wakes()-woken, passed)
	if n := tells() - told; n > int64(33*passed.Seconds()) {
		t.Errorf("told %d times in %s", n, passed)
	}
}

// One of two Lockers acquires again as soon as it has released; it must not pass the other.
func TestFormerHolderDoesNotPassWaiters(t *testing.T) {
	testkit.EachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		greedy := newLocker("greedy")
		patient := newLocker("patient")
		lock := testkit.Acquire(t, greedy, "k")
		granted := testkit.Waits(t, patient, "k")
		testkit.UntilQueued(t, db, "k", 1)
		testkit.UntilWanted(t, db, greedy, "k")
		free := time.Now()
		testkit.Release(t, lock)
		again := testkit.Waits(t, greedy, "k")
		inTurn(t, free, granted, again)
	})
}

// inTurn releases the lock that two waiters are granted one after the other. The lock was free
// since free; the second waiter may be first only if the first one overran the wake timeout.
func inTurn(t *testing.T, free time.Time, first, second <-chan *pgxlock.Lock) {
	t.Helper()
	var got *pgxlock.Lock
	select {
	case got = <-first:
	case got = <-second:
		if d := time.Since(free); d < testkit.WakeTimeout {
			t.Errorf("the second one went past the first one after %s", d)
		}
		second = first
	}
	select {
	case <-second:
		t.Error("both have it")
	default:
	}
	testkit.Release(t, got)
	testkit.Release(t, <-second)
}

// A writer that waits in the Locker of the try may have no ticket yet, or never get one.
func TestSharedTryDoesNotPassAWriterOfItsOwnLocker(t *testing.T) {
	pgtest.Long(t)
	testkit.EachWaitingKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker) {
		locks := newLocker("both")
		reading := testkit.Acquire(t, locks, "k", pgxlock.Shared)
		granted := testkit.Waits(t, locks, "k")
		pgtest.Until(t, "it waits", func() bool {
			shared, err := locks.TryAcquire(t.Context(), "k", pgxlock.Shared)
			if err == nil {
				testkit.Release(t, shared)
			}
			return errors.Is(err, pgxlock.ErrNotAcquired)
		})
		testkit.WantNoShare(t, "its own Locker", locks, "k")
		testkit.Release(t, reading)
		testkit.Release(t, <-granted)
	})
}

// The release saw no ticket, because the waiter's, of the same process, was still being
// published. That waiter does not ask once its ticket is there: its own process has the lock.
func TestReleaseWakesThoseHereWhoseTicketItCouldNotSee(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	other, locks := testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "here", Backoff: testkit.Seldom})
	testkit.Listen(t, db, locks, other)
	commit := testkit.HoldReleases(t, db, "here")
	commit()
	db.Exec(t, `delete from gates;
		create trigger held before insert on pgxlock_waiters for each row execute function wait_at_gate('ticket')`)
	woken := testkit.CountNotifications(t, db)
	round := func() (n int) {
		lock := testkit.Acquire(t, other, "k")
		first := testkit.Waits(t, locks, "k")
		testkit.UntilQueued(t, db, "k", 1)
		second := testkit.Waits(t, locks, "k", pgxlock.Shared) // the lock is not left to a reader
		testkit.UntilWaiting(t, db, "k", 2)
		db.Exec(t, "insert into gates values ('release'), ('ticket')")
		testkit.Release(t, lock)
		lock = <-first
		testkit.UntilAtGate(t, db, 1) // the ticket of the second one
		released := make(chan error, 1)
		go func() { released <- lock.Release(t.Context()) }()
		testkit.UntilAtGate(t, db, 2)
		db.Exec(t, "delete from gates where name = 'ticket'")
		testkit.UntilQueued(t, db, "k", 1)
		pgtest.Until(t, "it has the answer for its ticket", func() bool {
			return testkit.Query[int](t, db, "select count(*) from pg_stat_activity where application_name = 'pgxlock here' and state = 'active' and wait_event is distinct from 'PgSleep'") == 0
		})
		before := woken()
		commit()
		if err := <-released; err != nil {
			t.Error(err)
		}
		lock = <-second
		n = woken() - before
		testkit.Release(t, lock)
		testkit.NoTickets(t, db)
		return n
	}
	n := round()
	for i := 0; n == 0 && i < 20; i++ { // one of its looks came first: there is one each second
		n = round()
	}
	if n != 1 {
		t.Errorf("woken %d times", n)
	}
}

// The notification by which the holder hears that others wait does not always arrive.
func TestLockerThatDoesNotHearThatOthersWaitHandsOverForAMomentOnly(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	deaf, other := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Backoff: testkit.Seldom})
	testkit.Listen(t, db, other, deaf)
	db.Exec(t, `create or replace function pgxlock_notify_holders(p_kinds int[], p_ids bigint[]) returns int[] language sql volatile
		return array_fill(1, array[cardinality(p_kinds)])`) // which notifies none
	for round := range 3 {
		key := fmt.Sprint("k", round) // once they know each other both have tickets
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		var turns atomic.Int64
		go func() { done <- testkit.Saturate(ctx, deaf, key, 8, func() error { turns.Add(1); return nil }) }()
		pgtest.Until(t, "callers hand it over", func() bool { return turns.Load() > 100 })
		granted := testkit.Waits(t, other, key)
		testkit.UntilQueued(t, db, key, 1)
		before := turns.Load()
		lock := pgtest.Receive(t, "one Locker hands the lock over to another one", granted)
		t.Logf("granted after %d turns of the others", turns.Load()-before)
		testkit.Release(t, lock)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	testkit.NoTickets(t, db)
}

// countBusy counts the calls that find their key busy, and wait.
func countBusy(n *atomic.Int64) func(context.Context, pgxlock.Event) {
	return func(_ context.Context, e pgxlock.Event) {
		if e.Op == pgxlock.EventBusy {
			n.Add(1)
		}
	}
}

func TestSessionServesAllHoldersAndWaiters(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	pool := db.NewPool(t)
	var asked, busy atomic.Int64
	locks := testkit.Advisory(t, pool, &pgxlock.AdvisoryConfig{Owner: "one", MaxLocks: 600, Observe: countBusy(&busy), Backoff: func(attempt int) time.Duration {
		if attempt == 0 {
			asked.Add(1)
		}
		return 50 * time.Millisecond
	}})
	if pids := testkit.Backends(t, db, "one"); len(pids) != 0 {
		t.Errorf("connected before the first use: %v", pids)
	}
	// What they wait for is held by somebody else, so that each asks the server.
	const holders, waiters, keys = 500, 1000, 20
	other := db.Connect(t)
	for i := range keys {
		if _, err := other.Exec(t.Context(), "select pg_advisory_lock($1)", pgxlock.AdvisoryID(fmt.Sprint("busy:", i))); err != nil {
			t.Fatal(err)
		}
	}
	held := testkit.AcquireMany(t, locks, holders)
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	var waiting sync.WaitGroup
	for i := range waiters {
		waiting.Go(func() {
			_, err := locks.Acquire(ctx, fmt.Sprint("busy:", i%keys))
			if !errors.Is(err, pgxlock.ErrNotAcquired) || !errors.Is(err, context.Canceled) {
				t.Errorf("a waiter that gave up: %v", err)
			}
		})
	}
	pgtest.Until(t, "all wait, and the first of each line was refused", func() bool {
		return busy.Load() == waiters && asked.Load() == keys
	})
	if pids := testkit.Backends(t, db, "one"); len(pids) != 1 {
		t.Errorf("connections: %v, want one", pids)
	}
	if n := pool.Stat().TotalConns(); n != 0 {
		t.Errorf("the caller's pool has %d connections, which it was never asked for", n)
	}
	if n := testkit.HeldBy(t, db, "one"); n != holders {
		t.Errorf("%d locks in the server, want %d", n, holders)
	}
	giveUp()
	waiting.Wait()
	for _, lock := range held {
		if err := lock.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	pgtest.Until(t, "the Locker's connection is gone", func() bool { return len(testkit.Backends(t, db, "one")) == 0 })
	if n := testkit.AdvisoryCount(t, db); n != keys {
		t.Errorf("%d locks are left in the server, want the %d of somebody else", n, keys)
	}
}

func TestWaitersForAdvisoryLocksHoldNothingOpen(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	db.Exec(t, "create table written as select generate_series(1, 1000) as n")
	var asked, busy atomic.Int64
	locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "waiter", Observe: countBusy(&busy), Backoff: func(int) time.Duration {
		asked.Add(1)
		return time.Millisecond
	}})
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	if err := pgxlock.LockTx(t.Context(), tx, "k"); err != nil {
		t.Fatal(err)
	}
	const waiters = 200
	var waiting sync.WaitGroup
	for range waiters {
		waiting.Go(func() {
			if err := locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil }); err != nil {
				t.Error(err)
			}
		})
	}
	pgtest.Until(t, "all wait", func() bool { return busy.Load() == waiters })

	// Seen between two of its statements, and never in a transaction of several.
	idle, snapshots := 0, 0
	for asked.Store(0); idle < 20 || asked.Load() < 100; {
		var state string
		var open, snapshot bool
		err := db.Pool.QueryRow(t.Context(), `select state, state like 'idle%' and xact_start is not null, state like 'idle%' and coalesce(backend_xid, backend_xmin) is not null
			from pg_stat_activity where application_name = 'pgxlock waiter' and datname = current_database()`).Scan(&state, &open, &snapshot)
		if err != nil {
			t.Fatal(err)
		}
		if open || strings.HasPrefix(state, "idle in transaction") {
			t.Fatalf("%s, in a transaction: %t", state, open)
		}
		if state == "idle" {
			idle++
		}
		if snapshot {
			snapshots++
		}
	}
	// The server looks at the snapshot a little later than at the state.
	if snapshots > idle/4 {
		t.Errorf("%d of the %d times that it was idle it had a snapshot", snapshots, idle)
	}
	testkit.Commit(t, tx)
	waiting.Wait()
}
