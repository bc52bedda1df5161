package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestExclusiveLockInATransactionExcludesEverybody(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		for end, finish := range map[string]func(*txn){"commit": (*txn).commit, "rollback": (*txn).rollback} {
			holder := w.begin(t, db)
			holder.must("k")
			holder.must("k", pgxlock.NoWait) // again
			holder.must("k", pgxlock.Shared) // less
			for _, other := range []way{byLockTx, byLockAllTx, byLockSQLTx} {
				x := other.begin(t, db)
				x.wants(pgxlock.ErrNotAcquired, "k", pgxlock.NoWait)
				x.wants(pgxlock.ErrNotAcquired, "k", pgxlock.NoWait, pgxlock.Shared)
				x.wants(pgxlock.ErrNotAcquired, "k", pgxlock.MaxWait(-time.Second))
				x.wants(pgxlock.ErrNotAcquired, "k", pgxlock.MaxWait(1))
				x.must("another", pgxlock.NoWait)
				x.rollback()
			}
			testkit.WantFree(t, db, "k", false)
			finish(holder)
			testkit.WantFree(t, db, "k", true)
			next := w.begin(t, db)
			next.must("k", pgxlock.NoWait)
			next.rollback()
			if n := testkit.AdvisoryCount(t, db); n != 0 {
				t.Errorf("after %s %d advisory locks are left", end, n)
			}
		}
	})
}

func TestSharedLocksInTransactionsShareAndExcludeExclusiveOnes(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		one, two, writer := w.begin(t, db), w.begin(t, db), w.begin(t, db)
		one.must("k", pgxlock.Shared)
		two.must("k", pgxlock.Shared, pgxlock.NoWait)
		two.must("k", pgxlock.Shared, testkit.LongWait)
		writer.wants(pgxlock.ErrNotAcquired, "k", pgxlock.NoWait)
		one.commit()
		writer.wants(pgxlock.ErrNotAcquired, "k", pgxlock.NoWait)
		two.rollback()
		writer.must("k", pgxlock.NoWait)
	})
}

func TestQueuedExclusiveLockGoesBeforeLaterSharedOnes(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		for name, opts := range map[string][]pgxlock.LockTxOption{"no bound": nil, "MaxWait": {testkit.LongWait}} {
			reader, writer, late, hasty := w.begin(t, db), w.begin(t, db), w.begin(t, db), w.begin(t, db)
			reader.must("k", pgxlock.Shared)
			writing := writer.async("k", opts...)
			untilWaiting(t, db, 1)
			hasty.wants(pgxlock.ErrNotAcquired, "k", pgxlock.Shared, pgxlock.NoWait)
			reading := late.async("k", append(opts, pgxlock.Shared)...)
			untilWaiting(t, db, 2)
			reader.commit()
			if err := <-writing; err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			untilWaiting(t, db, 1) // the late reader still does
			writer.commit()
			if err := <-reading; err != nil {
				t.Errorf("%s: %v", name, err)
			}
			late.commit()
			hasty.commit()
		}
	})
}

func TestLockEndsWithTheOutermostSavepointThatIsRolledBack(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, opts := range map[string][]pgxlock.LockTxOption{"no bound": nil, "NoWait": {pgxlock.NoWait}, "MaxWait": {testkit.LongWait}} {
		outer := testkit.Begin(t, db, pgx.TxOptions{})
		if err := pgxlock.LockTx(t.Context(), outer, "outer", opts...); err != nil {
			t.Fatal(err)
		}
		for commit, want := range map[bool]bool{true: false, false: true} {
			nested, err := outer.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			inner, err := nested.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			key := fmt.Sprint(name, commit)
			if err := pgxlock.LockTx(t.Context(), inner, key, opts...); err != nil {
				t.Fatal(err)
			}
			testkit.WantFree(t, db, key, false)
			if err := inner.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			testkit.WantFree(t, db, key, false)
			if commit {
				err = nested.Commit(t.Context())
			} else {
				err = nested.Rollback(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			testkit.WantFree(t, db, key, want)
			testkit.WantFree(t, db, "outer", false)
		}
		if err := outer.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		testkit.WantFree(t, db, "outer", true)
	}
}

func TestLocksInTransactionsAndThoseOfSQLExcludeEachOther(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		for _, key := range []string{"invoice:42", "é", "a\nb 'c' $1", strings.Repeat("🔒", 255), "k1", "k2", "k3"} { // numbers of both signs
			for _, lock := range []string{"pg_advisory_xact_lock(advisory_lock_key($1))", "lock_tx($1)"} {
				sql := testkit.Begin(t, db, pgx.TxOptions{})
				if _, err := sql.Exec(t.Context(), "select "+lock, key); err != nil {
					t.Fatal(err)
				}
				x := w.begin(t, db)
				x.wants(pgxlock.ErrNotAcquired, key, pgxlock.NoWait)
				waiting := x.async(key, testkit.LongWait)
				untilWaiting(t, db, 1)
				if err := sql.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
				if err := <-waiting; err != nil {
					t.Errorf("%q after %s: %v", key, lock, err)
				}
				testkit.WantFree(t, db, key, false)
				if testkit.Query[bool](t, db, "select lock_tx($1, '0')", key) {
					t.Errorf("%q: lock_tx was granted what Go holds", key)
				}
				x.rollback()
				if !testkit.Query[bool](t, db, "select lock_tx($1, '0')", key) {
					t.Errorf("%q: lock_tx was refused what nobody holds", key)
				}
			}
		}
	})
}

func TestWaitIsGrantedWhenTheHolderHasEnded(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		if w != byLockTx {
			pgtest.Long(t)
		}
		for name, end := range map[string]func(*txn){
			"commit":   (*txn).commit,
			"rollback": (*txn).rollback,
			"its backend is terminated": func(x *txn) {
				db.Exec(t, "select pg_terminate_backend($1, 10000)", x.value("pg_backend_pid()"))
			},
		} {
			for _, opts := range [][]pgxlock.LockTxOption{nil, {testkit.LongWait}, {testkit.LongWait, pgxlock.Shared}} {
				holder, waiter := w.begin(t, db), w.begin(t, db)
				holder.must("k")
				waiter.exec("create table t ()")
				waiting := waiter.async("k", opts...)
				untilWaiting(t, db, 1)
				if len(waiting) > 0 {
					t.Fatalf("%s: granted while it was held: %v", name, <-waiting)
				}
				end(holder)
				if err := <-waiting; err != nil {
					t.Errorf("%s, %v: %v", name, opts, err)
				}
				waiter.exec("drop table t")
				waiter.commit()
			}
		}
	})
}

func TestRefusedLockLeavesTheTransactionsWrites(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	db.Exec(t, "create table t (n text)")
	eachWay(t, func(t *testing.T, w way) {
		db.Exec(t, "truncate t")
		holder := w.begin(t, db)
		holder.must("k")
		for i, opts := range [][]pgxlock.LockTxOption{{pgxlock.NoWait}, {pgxlock.MaxWait(20 * time.Millisecond)}, {pgxlock.MaxWait(1), pgxlock.Shared}} {
			x := w.begin(t, db)
			x.exec(fmt.Sprintf("insert into t values ('before %d')", i))
			for range 3 {
				x.wants(pgxlock.ErrNotAcquired, "k", opts...)
				x.exec(fmt.Sprintf("insert into t values ('after %d')", i))
			}
			x.must("another", opts...)
			x.commit()
			if n := testkit.Query[int](t, db, "select count(*) from t where n like '%' || $1", fmt.Sprint(i)); n != 4 {
				t.Errorf("%v: %d of 4 rows were committed", opts, n)
			}
		}
	})
}

// keysByNumber returns n keys in the order in which they are locked.
func keysByNumber(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprint("key:", i)
	}
	slices.SortFunc(keys, func(a, b string) int {
		if pgxlock.AdvisoryID(a) < pgxlock.AdvisoryID(b) {
			return -1
		}
		return 1
	})
	return keys
}

func TestLockAllTxLocksEachKeyOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for name, opts := range map[string][]pgxlock.LockTxOption{"no bound": nil, "NoWait": {pgxlock.NoWait}, "MaxWait": {testkit.LongWait}, "shared": {pgxlock.Shared}} {
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		for _, none := range [][]string{nil, {}} {
			if err := pgxlock.LockAllTx(t.Context(), tx, none, opts...); err != nil {
				t.Errorf("%s: no keys: %v", name, err)
			}
		}
		if n := testkit.AdvisoryCount(t, db); n != 0 {
			t.Errorf("%s: %d locks on no keys", name, n)
		}
		if err := pgxlock.LockAllTx(t.Context(), tx, []string{"a", "b", "a", "c", "b", "a"}, opts...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n := testkit.AdvisoryCount(t, db); n != 3 {
			t.Errorf("%s: %d locks on 3 keys", name, n)
		}
		for _, key := range []string{"a", "b", "c"} {
			testkit.WantFree(t, db, key, false)
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := pgxlock.LockAllTx(t.Context(), nil, nil); err == nil {
		t.Error("no keys, and no transaction either: no error")
	}
}

func TestLockAllTxLocksAllOrNone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	keys := keysByNumber(9)
	for _, busy := range []int{0, 4, 8} {
		holder := testkit.Begin(t, db, pgx.TxOptions{})
		if err := pgxlock.LockTx(t.Context(), holder, keys[busy]); err != nil {
			t.Fatal(err)
		}
		for _, opts := range [][]pgxlock.LockTxOption{{pgxlock.NoWait}, {pgxlock.MaxWait(20 * time.Millisecond)}, {pgxlock.NoWait, pgxlock.Shared}} {
			x := byLockAllTx.begin(t, db)
			before := x.state()
			if err := pgxlock.LockAllTx(t.Context(), x.pgx, keys, opts...); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%v with key %d busy: %v", opts, busy, err)
			}
			wantChanged(t, before, x.state())
			for i, key := range keys {
				testkit.WantFree(t, db, key, i != busy)
			}
			x.rollback()
		}
		if err := holder.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestMaxWaitBoundsLockAllTxAsAWhole(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 20)
	const wait, n = 400 * time.Millisecond, 6
	keys := keysByNumber(n)
	holders := make([]pgx.Tx, n)
	for i, key := range keys {
		holders[i] = testkit.Begin(t, db, pgx.TxOptions{})
		if err := pgxlock.LockTx(t.Context(), holders[i], key); err != nil {
			t.Fatal(err)
		}
	}
	x := byLockAllTx.begin(t, db)
	result := make(chan error, 1)
	go func() { result <- pgxlock.LockAllTx(t.Context(), x.pgx, keys, pgxlock.MaxWait(wait)) }()
	// Each key becomes free after half of the time: on all of them together it
	// would wait three times as long as it may.
	for i := range keys {
		id := uint64(pgxlock.AdvisoryID(keys[i]))
		pgtest.Until(t, "it has waited for one key for half of the time, or no longer waits", func() bool {
			return len(result) > 0 || testkit.Query[bool](t, db, `select exists (select from pg_locks where locktype = 'advisory' and not granted
				and classid = $1 and objid = $2 and waitstart <= clock_timestamp() - $3::interval)`, uint32(id>>32), uint32(id), wait/2)
		})
		if err := holders[i].Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-result; !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("after three times as long as it might wait: %v", err)
	}
	x.usable()
}

// Many lock the same few keys, each in an order of its own.
func TestSoakLockAllTxDoesNotDeadlock(t *testing.T) {
	t.Parallel()
	rounds := pgtest.Soak(t, 40, 2000)
	db := testkit.Roomy(t, pgtest.New(t), 10)
	keys := []string{"a", "b", "c", "d", "e", "f"}
	var inside [6]atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range rounds {
				mine := slices.Clone(keys)
				rand.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
				mine = append(mine[:1+rand.IntN(4)], mine[0]) // one of them twice
				tx, err := db.Pool.Begin(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				var opts []pgxlock.LockTxOption
				if rand.IntN(2) == 0 {
					opts = append(opts, testkit.LongWait)
				}
				if err := pgxlock.LockAllTx(t.Context(), tx, mine, opts...); err != nil {
					t.Error(err)
				}
				for _, key := range mine[:len(mine)-1] {
					if inside[slices.Index(keys, key)].Add(1) != 1 {
						t.Errorf("%q is held twice", key)
					}
				}
				for _, key := range mine[:len(mine)-1] {
					inside[slices.Index(keys, key)].Add(-1)
				}
				_ = tx.Rollback(t.Context())
			}
		})
	}
	wg.Wait()
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	if err := pgxlock.LockAllTx(t.Context(), tx, nil); err != nil {
		t.Errorf("no keys: %v", err)
	}
}

func TestFullLockTableIsNotABusyKey(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_locks_per_transaction": "10", "max_connections": "10"}})
	url := server.URL("postgres")
	db := &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
	keys := keysByNumber(5000)
	for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}} {
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		wantServerError(t, pgxlock.LockAllTx(t.Context(), tx, keys, opts...), "53200")
		_ = tx.Rollback(t.Context())
		for _, w := range []way{byLockTx, byLockSQLTx} {
			x := w.begin(t, db)
			var err error
			for i := 0; err == nil && i < len(keys); i++ {
				err = x.lock(t.Context(), keys[i], opts...)
			}
			wantServerError(t, err, "53200")
			x.end()
		}
	}
}

func TestDeadlockIsReportedToOneOfTheTwo(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		for _, opts := range [][]pgxlock.LockTxOption{nil, {testkit.LongWait}} {
			one, two := w.begin(t, db), w.begin(t, db)
			one.must("a")
			two.must("b")
			one.exec("set local deadlock_timeout = '1h'")
			two.exec("set local deadlock_timeout = '10ms'") // so that it is this one
			waiting := one.async("b", opts...)
			untilWaiting(t, db, 1)
			wantServerError(t, two.lock(t.Context(), "a", opts...), "40P01")
			two.rollback()
			if err := <-waiting; err != nil {
				t.Errorf("%v: the other one: %v", opts, err)
			}
			one.commit()
		}
	})
}

func TestCancelledWaitIsNotBusy(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		holder := w.begin(t, db)
		holder.must("k")
		for _, opts := range [][]pgxlock.LockTxOption{nil, {testkit.LongWait}} {
			x := w.begin(t, db)
			pid := x.value("pg_backend_pid()")
			waiting := x.async("k", opts...)
			untilWaiting(t, db, 1)
			db.Exec(t, "select pg_cancel_backend($1)", pid)
			wantServerError(t, <-waiting, "57014")
			wantServerError(t, x.lock(t.Context(), "k", opts...), "25P02") // aborted
			x.rollback()
		}
		x := w.begin(t, db)
		x.exec("set local statement_timeout = '20ms'")
		wantServerError(t, x.lock(t.Context(), "k"), "57014")
	})
}

func TestSessionsOwnLockTimeoutIsNotBusy(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	eachWay(t, func(t *testing.T, w way) {
		holder, x := w.begin(t, db), w.begin(t, db)
		holder.must("k")
		x.exec("set local lock_timeout = '20ms'")
		x.wants(pgxlock.ErrNotAcquired, "k", pgxlock.NoWait)
		waiting := x.async("k", testkit.LongWait) // MaxWait takes its place
		untilWaiting(t, db, 1)
		holder.commit()
		if err := <-waiting; err != nil {
			t.Error(err)
		}
		x.commit()

		holder, x = w.begin(t, db), w.begin(t, db)
		holder.must("k")
		x.exec("set local lock_timeout = '20ms'")
		wantServerError(t, x.lock(t.Context(), "k"), "55P03")
	})
}

func TestWaitIsCutToWhatOtherTimeoutsLeave(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 20)
	timeouts := []struct {
		setting string
		ms      int
	}{{"statement_timeout", 500}, {"statement_timeout", 20}}
	if testkit.Query[bool](t, db, "select exists (select from pg_settings where name = 'transaction_timeout')") { // since 17
		timeouts = append(timeouts, struct {
			setting string
			ms      int
		}{"transaction_timeout", 3000})
	}
	holder := byLockTx.begin(t, db)
	holder.must("k")
	eachWay(t, func(t *testing.T, w way) {
		for _, timeout := range timeouts {
			// A machine may be too busy for 20 ms, or for the last 50 ms of more; it is
			// not so every time, nor with a hundred times as long.
			var err error
			for try := range 50 {
				x := w.begin(t, db)
				x.exec("create temp table written () on commit drop")
				if err = x.try(fmt.Sprintf("set local %s = %d", timeout.setting, timeout.ms<<(try/7))); err == nil {
					err = x.lock(t.Context(), "k", pgxlock.MaxWait(time.Hour))
				}
				if errors.Is(err, pgxlock.ErrNotAcquired) {
					if err := errors.Join(x.try("set local statement_timeout = 0"), x.try("select from written")); err == nil {
						x.commit()
						break
					}
				}
				x.end()
			}
			if !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%v: %v, want ErrNotAcquired and a transaction that can go on", timeout, err)
			}
		}
	})
}

func TestContextThatEndsInTheWaitLeavesNothingLocked(t *testing.T) {
	t.Parallel()
	base := pgtest.New(t)
	base.Exec(t, "create table t (n int)")
	eachWay(t, func(t *testing.T, w way) {
		if w != byLockTx {
			pgtest.Long(t)
		}
		for _, test := range []struct {
			opts []pgxlock.LockTxOption
			asks bool // the pool's connections send a request to cancel, to which the server's answer is 57014
		}{{}, {asks: true}, {opts: []pgxlock.LockTxOption{testkit.LongWait}}, {[]pgxlock.LockTxOption{testkit.LongWait}, true}} {
			opts := test.opts
			pool := base.NewPool(t, func(c *pgxpool.Config) {
				c.MaxConns = 1 // one that does not come back is missed
				if test.asks {
					c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
						return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: pgtest.Patience}
					}
				}
			})
			db := &pgtest.DB{Pool: pool, URL: base.URL, Name: base.Name}
			holder, x := w.begin(t, base), w.begin(t, db)
			holder.must("k")
			x.must("held before")
			x.exec("insert into t values (1)")
			ctx, cancel := context.WithCancel(t.Context())
			waiting := make(chan error, 1)
			go func() { waiting <- x.lock(ctx, "k", opts...) }()
			untilWaiting(t, base, 1)
			cancel()
			err := <-waiting
			if !errors.Is(err, context.Canceled) || errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%v: %v, want context.Canceled", opts, err)
			}
			wantOneLine(t, err, "k")
			if err := x.try("select 1"); err == nil {
				t.Error("the transaction goes on on a connection of which nobody knows what it does")
			}
			x.end()
			pgtest.Until(t, "the server has rolled back", func() bool { return testkit.AdvisoryCount(t, base) == 1 })
			testkit.WantFree(t, base, "k", false)
			testkit.WantFree(t, base, "held before", true)
			holder.commit()
			again := w.begin(t, db) // the pool's only connection
			again.must("k", opts...)
			if n := again.value("select count(*) from t"); n != "0" {
				t.Errorf("%s rows of what was rolled back", n)
			}
			again.rollback()
		}
	})
}

func TestContextThatHasEndedSendsNothing(t *testing.T) {
	t.Parallel()
	sent, db := metered(t, pgtest.New(t))
	eachWay(t, func(t *testing.T, w way) {
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
			x := w.begin(t, db)
			x.must("a")
			x.must("shared", pgxlock.Shared)
			for _, key := range []string{"k", "shared"} {
				_, trips := sent.during(func() {
					if err := x.lock(ended, key, opts...); !errors.Is(err, context.Canceled) {
						t.Errorf("%v: %v", opts, err)
					}
				})
				if trips != 0 {
					t.Errorf("%v: %d round trips", opts, trips)
				}
			}
			x.must("b", opts...)
			x.commit()
		}
	})
}

func TestEveryQueryExecModeLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			base := testkit.Migrated(t)
			pool := base.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode; c.MaxConns = 10 })
			db := &pgtest.DB{Pool: pool, URL: base.URL, Name: base.Name}
			for _, w := range []way{byLockTx, byLockAllTx, byLockSQLTx} {
				for range 2 { // the second time from the cache
					holder, x := w.begin(t, db), w.begin(t, db)
					holder.must("k")
					holder.must("k2", pgxlock.NoWait)
					holder.must("k3", testkit.LongWait)
					before := x.state()
					x.wants(pgxlock.ErrNotAcquired, "k", pgxlock.NoWait)
					x.wants(pgxlock.ErrNotAcquired, "k2", pgxlock.NoWait, pgxlock.Shared)
					x.wants(pgxlock.ErrNotAcquired, "k3", pgxlock.MaxWait(20*time.Millisecond))
					wantChanged(t, before, x.state())
					waiting := x.async("k", testkit.LongWait)
					untilWaiting(t, base, 1)
					holder.commit()
					if err := <-waiting; err != nil {
						t.Error(err)
					}
					x.must("s", pgxlock.Shared)
					x.wants(pgxlock.ErrDeadlock, "s")
					x.usable()
					x.commit()
					r := w.beginTx(t, db, pgx.RepeatableRead)
					r.must("k", pgxlock.AllowStaleSnapshot(true))
					r.commit()
				}
			}
			for _, want := range []bool{true, false} {
				err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					first, err := pgxlock.ClaimTx(t.Context(), tx, "once", testkit.LongWait, pgxlock.Retention(time.Hour))
					if err == nil && first != want {
						t.Errorf("claimed: %t, want %t", first, want)
					}
					if err := pgxlock.LockAllTx(t.Context(), tx, []string{"x", "y"}, pgxlock.NoWait); err != nil {
						t.Error(err)
					}
					return err
				})
				if err != nil {
					t.Error(err)
				}
			}
			if n, err := pgxlock.PurgeClaims(t.Context(), pool, 0); n != 0 || err != nil {
				t.Errorf("%d claims purged that are to be kept: %v", n, err)
			}
		})
	}
}

// Nothing may be left of thousands of waits that end around the grant.
func TestSoakWaitLeavesNothingLockedWhateverEndsIt(t *testing.T) {
	t.Parallel()
	const workers = 8
	perWorker := pgtest.Soak(t, 200, 100_000/workers)
	base := pgtest.New(t)
	db := testkit.Roomy(t, base, workers)
	var mu sync.Mutex
	outcomes := make(map[string]int)
	var working sync.WaitGroup
	for worker := range workers {
		working.Go(func() {
			dice := rand.New(rand.NewPCG(uint64(worker), 7))
			for range perWorker {
				outcome := unrulyTx(t, dice, db)
				mu.Lock()
				outcomes[outcome]++
				mu.Unlock()
			}
		})
	}
	working.Wait()
	for _, outcome := range []string{"granted", "busy", "cancelled"} {
		if outcomes[outcome] == 0 {
			t.Errorf("nothing was %s: %v", outcome, outcomes)
		}
	}
	if n := outcomes["wrong"]; n > 0 {
		t.Errorf("%d calls ended otherwise", n)
	}
	pgtest.Until(t, "the server has rolled back what was cancelled", func() bool { return testkit.AdvisoryCount(t, base) == 0 })
	pgtest.Until(t, "the pool has its connections back", func() bool { return db.Pool.Stat().AcquiredConns() == 0 })
	all := make([]*pgxpool.Conn, workers)
	for range all {
		conn, err := db.Pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Release()
		var depth int
		if err := conn.QueryRow(t.Context(), "select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'").Scan(&depth); err != nil || depth != 0 {
			t.Errorf("a connection of the pool: %d locks, %v", depth, err)
		}
	}
}

// unrulyTx locks in a transaction, and something may come in between.
func unrulyTx(t *testing.T, dice *rand.Rand, db *pgtest.DB) string {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	soon := func() time.Duration { return time.Duration(dice.Int64N(int64(4 * time.Millisecond))) }
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Error(err)
		return "wrong"
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	var opts []pgxlock.LockTxOption
	switch dice.IntN(8) {
	case 0:
		defer time.AfterFunc(soon(), cancel).Stop()
	case 1:
		defer time.AfterFunc(soon(), cancel).Stop()
		opts = append(opts, pgxlock.MaxWait(soon()+1))
	case 2:
		opts = append(opts, pgxlock.NoWait)
	case 3:
		opts = append(opts, testkit.LongWait)
	default:
		opts = append(opts, pgxlock.MaxWait(soon()+1))
	}
	if dice.IntN(3) == 0 {
		opts = append(opts, pgxlock.Shared)
	}
	keys := []string{fmt.Sprint("key:", dice.IntN(3))}
	if dice.IntN(3) == 0 {
		keys = append(keys, fmt.Sprint("key:", dice.IntN(3)))
	}
	err = pgxlock.LockAllTx(ctx, tx, keys, opts...)
	switch {
	case ctx.Err() != nil && !errors.Is(err, pgxlock.ErrNotAcquired) && err != nil:
		return "cancelled"
	case err != nil && !errors.Is(err, pgxlock.ErrNotAcquired):
		t.Errorf("%v %v: %v", keys, opts, err)
		return "wrong"
	}
	if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
		t.Errorf("%v %v: afterwards: %v", keys, opts, err)
		return "wrong"
	}
	if err != nil {
		return "busy"
	}
	if dice.IntN(2) == 0 {
		if err := tx.Commit(t.Context()); err != nil {
			t.Error(err)
			return "wrong"
		}
	}
	return "granted"
}
