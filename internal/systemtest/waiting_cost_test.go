package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// No ticket can be published: a waiter asks by Backoff, and now and then tries to publish.
func TestQueueThatFailsIsNotTriedAllTheTime(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	asks, watched := testkit.Counted(t, db, testkit.AcquireSQL)
	publishes, both := testkit.Counted(t, db, "-- Publishes the tickets")
	locks, others := testkit.NewLocker(t, watched, &pgxlock.LeaseConfig{Backoff: testkit.Seldom}), testkit.NewLocker(t, both, &pgxlock.LeaseConfig{Backoff: testkit.Seldom})
	testkit.Release(t, testkit.Acquire(t, locks, "connected"))
	testkit.Release(t, testkit.Acquire(t, others, "connected"))
	db.Exec(t, "alter function pgxlock_publish_batch rename to gone")
	began := time.Now()
	var waiting sync.WaitGroup
	for _, locks := range []*pgxlock.Locker{locks, others} {
		waiting.Go(func() { waitsFor3Seconds(t, locks) })
	}
	waiting.Wait()
	asked, _, _ := asks.Counts()
	published, _, _ := publishes.Counts()
	passed := time.Since(began)
	t.Logf("%d asked, %d published in %s", asked, published, passed)
	if most := int(10 * passed.Seconds()); asked > most || published > most {
		t.Errorf("asked %d times, published %d times in %s", asked, published, passed)
	}
	testkit.Release(t, lock)
}

// waitsFor3Seconds waits for k, which somebody else has: once more where this machine stands still
// until the server's first answer would come too late.
func waitsFor3Seconds(t *testing.T, locks *pgxlock.Locker) {
	t.Helper()
	err := pgxlock.ErrUnavailable
	for tries := 0; errors.Is(err, pgxlock.ErrUnavailable) && tries < 5; tries++ {
		_, err = locks.Acquire(t.Context(), "k", pgxlock.MaxWait(3*time.Second))
	}
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Error(err)
	}
}

// A prepared transaction holds an advisory lock: nobody can notify it.
func TestPreparedTransactionThatHasALockIsAHolderThatIsNotTold(t *testing.T) {
	pgtest.Long(t)
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

// A session with Tokens has ended while a transaction that fenced its lock is open: waiters are
// refused though nobody has the lock.
func TestFencedTransactionIsNotAskedForAllTheTime(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	db.Exec(t, "do $$ begin execute format('alter database %I set track_functions = ''all''', current_database()); end $$")
	calls := testkit.Calls(t, db, "pgxlock_advisory_batch")
	tells := testkit.Calls(t, db, "pgxlock_notify_holders")
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
	before, told, began := calls(), tells(), time.Now()
	waitsFor3Seconds(t, waiter)
	_ = waiter.Close(t.Context())
	testkit.UntilGone(t, db, "waiter")
	passed := time.Since(began)
	t.Logf("%d asked, %d told in %s", calls()-before, tells()-told, passed)
	if n := calls() - before; n > int64(33*passed.Seconds()) {
		t.Errorf("asked %d times in %s", n, passed)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestThousandsWaitOnThreeConnectionsAndHoldNothingOpen(t *testing.T) {
	t.Parallel()
	keys, waiters := 100, 5000
	if testing.Short() {
		keys, waiters = 5, 250
	}
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	db.Exec(t, "create table written as select generate_series(1, 1000) as n")
	holder := testkit.NewLocker(t, db, nil)
	var held []*pgxlock.Lock
	for i := range keys {
		held = append(held, testkit.Acquire(t, holder, fmt.Sprint("k", i)))
	}
	locks := testkit.Listening(t, db, "crowd")
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
	pgtest.Until(t, "all wait", func() bool {
		return testkit.Query[bool](t, db, "select coalesce(sum(waiters), 0) = $1 and count(*) = $2 from pgxlock_waiters where client is not null", waiters, keys)
	})
	if pids := testkit.Backends(t, db, "crowd"); len(pids) > 3 {
		t.Errorf("%d connections: %v", len(pids), pids)
	}
	// Both wait for sessions whose snapshot is older than they are.
	db.Exec(t, "create index concurrently on written (n)")
	db.Exec(t, "delete from written")
	db.Exec(t, "vacuum written")
	// But for the moments in which they refresh their tickets.
	pgtest.Until(t, "no session holds a snapshot open", func() bool {
		return testkit.Query[int](t, db, `select count(*) from pg_stat_activity where datname = current_database() and application_name = 'pgxlock crowd'
			and (backend_xmin is not null or state like 'idle in transaction%')`) == 0
	})
	for _, lock := range held {
		testkit.Release(t, lock)
	}
	all.Wait()
	if n := served.Load(); n != int64(waiters) {
		t.Errorf("%d were served", n)
	}
	testkit.NoTickets(t, db)
}

const wakeSQL = "-- Wakes, for each lock"

func TestReleaseLooksForWhoWaitsOnlyWhereSomebodyDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	wakes, watched := testkit.Counted(t, db, wakeSQL)
	holder, waiter := testkit.NewLocker(t, watched, nil), testkit.NewLocker(t, db, nil)
	looked := func() int { _, locks, _ := wakes.Counts(); return locks }
	for i := range 5 {
		testkit.Release(t, testkit.Acquire(t, holder, fmt.Sprint("k", i)))
	}
	if n := looked(); n != 0 {
		t.Errorf("%d checks for waiters, where there are none", n)
	}

	lock := testkit.Acquire(t, holder, "k")
	granted := testkit.Waits(t, waiter, "k")
	testkit.UntilQueued(t, db, "k", 1)
	began := time.Now()
	testkit.Release(t, lock)
	testkit.Release(t, <-granted)
	pgtest.Until(t, "it checks for waiters", func() bool { return looked() > 0 })
	if err := holder.Close(t.Context()); err != nil {
		t.Error(err)
	}
	// One more when the turn time is over, and again while who was woken has not come.
	if n, turns := looked(), int(time.Since(began)/testkit.WakeTimeout); n > 2+turns {
		t.Errorf("checked for waiters for %d locks within %d turns, want 1", n, turns)
	}
	testkit.NoTickets(t, db)
}
