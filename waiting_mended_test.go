package pgxlock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// tracked counts the calls of a function by sessions that have reported them.
func tracked(t *testing.T, db *pgtest.DB, function string) func() int64 {
	t.Helper()
	return func() int64 {
		return testkit.Query[int64](t, db, "select coalesce(sum(calls), 0)::bigint from pg_stat_user_functions where funcname = $1", function)
	}
}

// untilReported waits until the connections of closed Lockers are gone: then what they
// called is counted.
func untilReported(t *testing.T, db *pgtest.DB, owners ...string) {
	t.Helper()
	for _, owner := range owners {
		testkit.Until(t, owner+" is gone", func() bool { return len(testkit.Backends(t, db, owner)) == 0 })
	}
}

// Who waits with a lock in hand has a place in the queue, though its lock is held here.
func TestAWaitForALockOfTheSameProcessEndsWithItsRelease(t *testing.T) {
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

// The pool's own callback for notifications.
func TestAPoolsOwnCallbackDoesNotTakeOurNotifications(t *testing.T) {
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
func TestAQueueThatFailsLaterKeepsNobodyFromAFreeLock(t *testing.T) {
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

// Nothing can be published: who waits asks by Backoff, and now and then.
func TestAQueueThatFailsIsNotTriedAllTheTime(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	asks, watched := testkit.Counted(t, db, testkit.AcquireSQL)
	publishes, both := testkit.Counted(t, db, "-- Publishes the tickets")
	locks, others := testkit.NewLocker(t, watched, &pgxlock.LeaseConfig{Backoff: testkit.Seldom}), testkit.NewLocker(t, both, &pgxlock.LeaseConfig{Backoff: testkit.Seldom})
	testkit.Release(t, testkit.Acquire(t, locks, "connected"))
	testkit.Release(t, testkit.Acquire(t, others, "connected"))
	db.Exec(t, "alter function pgxlock_publish_batch rename to gone")
	var waiting sync.WaitGroup
	for _, locks := range []*pgxlock.Locker{locks, others} {
		waiting.Go(func() {
			if _, err := locks.Acquire(t.Context(), "k", pgxlock.MaxWait(3*time.Second)); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Error(err)
			}
		})
	}
	waiting.Wait()
	asked, _, _ := asks.Counts()
	published, _, _ := publishes.Counts()
	t.Logf("%d asked, %d published in 3 s", asked, published)
	if asked > 30 || published > 30 {
		t.Errorf("asked %d times, published %d times in 3 s", asked, published)
	}
	testkit.Release(t, lock)
}

// A prepared transaction has an advisory lock: it cannot be told anything.
func TestAPreparedTransactionThatHasALockIsAHolderThatIsNotTold(t *testing.T) {
	t.Parallel()
	db := testkit.On(t, "", pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_prepared_transactions": "4"}}))
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	conn := db.Connect(t)
	for _, s := range []string{"begin", "select pg_advisory_xact_lock(" + testkit.SQLKey("k") + ")", "prepare transaction 'holder'"} {
		if _, err := conn.Exec(t.Context(), s); err != nil {
			t.Fatal(s, err)
		}
	}
	if got := testkit.Query[string](t, db, "select pgxlock_notify_holders('{1}', array["+testkit.SQLKey("k")+"])::text"); got != "{1}" {
		t.Errorf("holders: %s", got)
	}
	if _, err := conn.Exec(t.Context(), "rollback prepared 'holder'"); err != nil {
		t.Error(err)
	}
}

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
		testkit.Until(t, "the readers know", func() bool { return readers.Wanted(key) })
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
	// then, though it is in vain.
	reading, granted = writerWaits("other")
	if _, err := readers.Acquire(t.Context(), "other", pgxlock.Shared, pgxlock.MaxWait(200*time.Millisecond)); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatalf("a reader that came after the writer: %v", err)
	}
	testkit.Release(t, reading)
	testkit.Release(t, <-granted)
	testkit.NoTickets(t, db)
}

// Who was woken and asked in vain has not slept through its turn: it keeps its place before
// those who come later, however long the next chance takes.
func TestAWriterThatWasWokenInVainIsNotPassed(t *testing.T) {
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
	testkit.Until(t, "the readers know", func() bool { return readers.Wanted("k") })
	for range 2 {
		if n := testkit.Query[int](t, db, "select count(*) from pgxlock_wake_batch('{1}', array[advisory_lock_key('k')::text], '{null}')"); n != 1 {
			t.Fatalf("woken: %d", n)
		}
		testkit.Until(t, "the writer has tried", func() bool { return testkit.Query[bool](t, db, "select woken is null from pgxlock_waiters") })
	}
	db.Exec(t, "update pgxlock_waiters set woken = woken - interval '2 hours'") // of who had not
	late := testkit.Waits(t, readers, "k", pgxlock.Shared)
	testkit.Until(t, "the one that came later waits, or has it", func() bool { return testkit.Tickets(t, db, "k") == 2 || len(late) == 1 })
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

// A session that does not end has a lock, and its process, which still listens for it,
// does not know any more: its connection broke in silence.
func TestAHolderThatCannotKnowIsNotToldAllTheTime(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	db.Exec(t, "do $$ begin execute format('alter database %I set track_functions = ''all''', current_database()); end $$")
	lost, waiter := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "lost"}), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "waiter"})
	testkit.Listen(t, db, lost, waiter)
	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), "select pg_advisory_lock("+testkit.SQLKey("k")+")"); err != nil {
		t.Fatal(err)
	}
	lost.ListenFor(int32(conn.PgConn().PID()))
	testkit.Until(t, "it listens", func() bool {
		return testkit.Query[bool](t, db, "select exists (select from pg_stat_activity where state = 'idle' and query like '%pgxlock_holder_' || $1::int || '\"%')", conn.PgConn().PID())
	})
	tells, wakes := tracked(t, db, "pgxlock_notify_holders"), tracked(t, db, "pgxlock_wake_batch")
	told, woken := tells(), wakes()
	if _, err := waiter.Acquire(t.Context(), "k", pgxlock.MaxWait(3*time.Second)); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Error(err)
	}
	_ = waiter.Close(t.Context())
	_ = lost.Close(t.Context())
	untilReported(t, db, "waiter", "lost")
	t.Logf("%d told, %d woken in 3 s", tells()-told, wakes()-woken)
	if n := tells() - told; n > 100 {
		t.Errorf("told %d times in 3 s", n)
	}
}

// A session with Tokens has ended, and a transaction that fenced its lock goes on: who
// waits is refused though nobody has the lock.
func TestAFencedTransactionIsNotAskedForAllTheTime(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	db.Exec(t, "do $$ begin execute format('alter database %I set track_functions = ''all''', current_database()); end $$")
	calls := tracked(t, db, "pgxlock_advisory_batch")
	tells := tracked(t, db, "pgxlock_notify_holders")
	holder := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true, Owner: "holder"})
	waiter := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true, Owner: "waiter"})
	testkit.Release(t, testkit.Acquire(t, waiter, "connected"))
	lock := testkit.Acquire(t, holder, "k")
	tx, err := db.Connect(t).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	testkit.Release(t, lock)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	before, told := calls(), tells()
	if _, err := waiter.Acquire(ctx, "k"); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Error(err)
	}
	_ = waiter.Close(t.Context())
	untilReported(t, db, "waiter")
	t.Logf("%d asked, %d told in 3 s", calls()-before, tells()-told)
	if n := calls() - before; n > 100 {
		t.Errorf("asked %d times in 3 s", n)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Error(err)
	}
}
