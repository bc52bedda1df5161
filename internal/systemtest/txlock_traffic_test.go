package systemtest_test

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver pgx

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// These tests cover what a lock in a transaction sends, and what it leaves unchanged there.

// A wait sets lock_timeout. Afterwards it is what it was, no matter who set it where.
func TestWaitLeavesSettingsAndOtherLocksAlone(t *testing.T) {
	t.Parallel()
	values, depths := []string{"30s", "1d", "0", "500ms"}, []int{2, 0}
	if testing.Short() {
		values, depths = values[:1], depths[:1]
	}
	for _, value := range values {
		t.Run(value, func(t *testing.T) {
			t.Parallel()
			base := pgtest.New(t)
			for _, by := range []string{"the role", "the session", "the transaction", "set local"} {
				if by == "the role" {
					base.Exec(t, fmt.Sprintf("alter role current_user in database %s set lock_timeout = '%s'", base.Name, value))
				} else {
					base.Exec(t, fmt.Sprintf("alter role current_user in database %s reset lock_timeout", base.Name))
				}
				db := testkit.Roomy(t, base, 4) // with connections that know it
				for _, w := range []way{byLockTx, byLockSQLTx} {
					for _, depth := range depths {
						for _, outcome := range []string{"refused at once", "refused", "granted", "granted after waiting"} {
							t.Run(fmt.Sprint(by, ", ", w, ", ", depth, " savepoints, ", outcome), func(t *testing.T) {
								waitUnchanged(t, db, w, by, value, depth, outcome)
							})
						}
					}
				}
			}
		})
	}
}

// waitUnchanged locks in a transaction whose lock_timeout somebody has set, and
// checks what has changed.
func waitUnchanged(t *testing.T, db *pgtest.DB, w way, by, value string, depth int, outcome string) {
	holder, x := w.begin(t, db), w.begin(t, db)
	defer func() { _ = holder.try("rollback"); _ = x.try("rollback") }()
	first := x.settings()
	set := map[string]string{"the transaction": "set ", "set local": "set local "}[by]
	if by == "the session" {
		x.exec("commit")
		x.exec("set lock_timeout = '" + value + "'")
		first = x.settings()
		x.exec("begin")
	}
	if set != "" {
		x.exec(set + "lock_timeout = '" + value + "'")
	}
	for i := range depth {
		x.exec(fmt.Sprint("savepoint s", i))
		if set != "" && i == 0 {
			x.exec(set + "lock_timeout = '7s'; " + set + "lock_timeout = '" + value + "'")
		}
	}
	x.exec("create temp table written (n int)") // draws a transaction id, and locks
	x.exec("select pg_advisory_xact_lock(42)")
	x.state()
	before := x.state()
	var err error
	var want []string
	switch outcome {
	case "refused at once":
		holder.must("k")
		err = x.lock(t.Context(), "k", pgxlock.NoWait)
	case "refused":
		holder.must("k")
		err = x.lock(t.Context(), "k", pgxlock.MaxWait(5*time.Millisecond))
	case "granted":
		err = x.lock(t.Context(), "k", testkit.LongWait)
		want = []string{"+ " + lockLine("k", pgxlock.Exclusive)}
	case "granted after waiting":
		holder.must("k")
		waiting := x.async("k", testkit.LongWait)
		untilWaiting(t, db, 1)
		holder.commit()
		err = <-waiting
		want = []string{"+ " + lockLine("k", pgxlock.Exclusive)}
	}
	if strings.HasPrefix(outcome, "refused") != errors.Is(err, pgxlock.ErrNotAcquired) || err != nil && want != nil {
		t.Fatal(err)
	}
	wantChanged(t, before, x.state(), want...)
	x.exec("insert into written values (1)")
	x.exec("drop table written")
	for i := range depth {
		x.exec(fmt.Sprint("release s", depth-1-i))
	}
	x.exec("commit")
	if by == "the transaction" { // what is set there without "local" stays
		if x.value("current_setting('lock_timeout')::interval = '"+value+"'::interval") != "true" {
			t.Errorf("after the commit lock_timeout is %s", x.value("current_setting('lock_timeout')"))
		}
	} else {
		wantChanged(t, first, x.settings())
	}
	x.exec("reset lock_timeout")
}

func TestLockTakesAsFewRoundTripsAsItCan(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	base := quietServer(t)
	holder := byLockTx.begin(t, base)
	holder.must("busy")
	stale := pgxlock.AllowStaleSnapshot(true)
	brief := pgxlock.MaxWait(5 * time.Millisecond)
	for _, w := range []way{byLockTx, byLockSQLTx} {
		sent, db := metered(t, base)
		for _, test := range []struct {
			level pgx.TxIsoLevel
			key   string
			opts  []pgxlock.LockTxOption
			want  int64
		}{
			{pgx.ReadCommitted, "a", nil, 1},
			{pgx.ReadCommitted, "a", []pgxlock.LockTxOption{pgxlock.NoWait}, 1},
			{pgx.ReadCommitted, "busy", []pgxlock.LockTxOption{pgxlock.NoWait}, 1},
			{pgx.ReadCommitted, "a", []pgxlock.LockTxOption{testkit.LongWait}, 1},
			{pgx.ReadCommitted, "busy", []pgxlock.LockTxOption{brief}, 2},
			{pgx.ReadCommitted, "shared", []pgxlock.LockTxOption{pgxlock.Shared}, 1},
			{pgx.ReadUncommitted, "a", nil, 1}, // which is READ COMMITTED
			{pgx.ReadUncommitted, "a", []pgxlock.LockTxOption{testkit.LongWait}, 1},
			{pgx.RepeatableRead, "a", nil, 3},
			{pgx.RepeatableRead, "a", []pgxlock.LockTxOption{pgxlock.NoWait}, 2},
			{pgx.RepeatableRead, "a", []pgxlock.LockTxOption{testkit.LongWait}, 2},
			{pgx.Serializable, "a", nil, 3},
			{pgx.RepeatableRead, "a", []pgxlock.LockTxOption{stale}, 1},
			{pgx.Serializable, "a", []pgxlock.LockTxOption{stale, testkit.LongWait}, 1},
			{pgx.Serializable, "a", []pgxlock.LockTxOption{stale, pgxlock.NoWait}, 1},
			{pgx.Serializable, "busy", []pgxlock.LockTxOption{brief}, 2},
		} {
			x := w.beginTx(t, db, test.level)
			prepare(x, test.opts...)
			var err error
			calls, trips := sent.during(func() { err = x.lock(t.Context(), test.key, test.opts...) })
			if calls != test.want || trips != test.want {
				t.Errorf("%v, %s, %q, %v: %d calls, %d round trips; want %d", w, test.level, test.key, test.opts, calls, trips, test.want)
			}
			if errors.Is(err, pgxlock.ErrNotAcquired) != (test.key == "busy") || err != nil && test.key != "busy" {
				t.Errorf("%v, %s, %q, %v: %v", w, test.level, test.key, test.opts, err)
			}
			x.rollback()
		}
		other, x := w.begin(t, base), w.begin(t, db) // after waiting
		other.must("k")
		prepare(x, testkit.LongWait)
		var err error
		calls, trips := sent.during(func() {
			waiting := x.async("k", testkit.LongWait)
			untilWaiting(t, base, 1)
			other.commit()
			err = <-waiting
		})
		if calls != 2 || trips != 2 || err != nil {
			t.Errorf("%v, after waiting: %d calls, %d round trips, %v", w, calls, trips, err)
		}
		x.rollback()
		if n := sent.failed.Load(); n != 0 {
			t.Errorf("%v: the server wrote %d errors to its log; a refusal is none", w, n)
		}
	}
	sent, db := metered(t, base)
	for _, test := range []struct {
		keys []string
		opts []pgxlock.LockTxOption
		want int64
	}{
		{nil, nil, 0},
		{[]string{"a", "b", "c"}, nil, 1},
		{[]string{"a", "b", "c"}, []pgxlock.LockTxOption{testkit.LongWait}, 1},
		{[]string{"a", "b", "c"}, []pgxlock.LockTxOption{pgxlock.NoWait}, 1},
		{[]string{"a", "busy", "c"}, []pgxlock.LockTxOption{pgxlock.NoWait}, 1},
		{[]string{"a", "busy", "c"}, []pgxlock.LockTxOption{brief}, 1},
	} {
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		if err := pgxlock.LockAllTx(t.Context(), tx, []string{"d", "e"}, test.opts...); err != nil {
			t.Fatal(err)
		}
		calls, trips := sent.during(func() { _ = pgxlock.LockAllTx(t.Context(), tx, test.keys, test.opts...) })
		if calls != test.want || trips != test.want {
			t.Errorf("LockAllTx %q %v: %d calls, %d round trips; want %d", test.keys, test.opts, calls, trips, test.want)
		}
		testkit.Rollback(t, tx)
	}
}

// prepare makes the connection know the statements, which pgx forgets again when
// one of them fails.
func prepare(x *txn, opts ...pgxlock.LockTxOption) {
	x.t.Helper()
	x.must(fmt.Sprint("prepare ", opts), opts...)
	if x.way == byLockTx {
		if err := pgxlock.LockAllTx(x.t.Context(), x.pgx, []string{"prepare one", "prepare two"}, opts...); err != nil {
			x.t.Fatal(err)
		}
	}
	x.usable() // sends what pgx has put off
}

// Whether an exclusive lock is an upgrade has to be asked once on a connection
// that has had the key shared, and not for ever.
func TestSharedLockOfThePastCostsOneQuestion(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	sent, db := metered(t, testkit.Roomy(t, pgtest.New(t), 1))
	for _, want := range []int64{2, 1, 1} {
		x := byLockTx.begin(t, db)
		if want == 2 {
			x.must("k", pgxlock.Shared)
			x.commit()
			x = byLockTx.begin(t, db)
		}
		if calls, _ := sent.during(func() { x.must("k") }); calls != want {
			t.Errorf("%d calls, want %d", calls, want)
		}
		x.commit()
	}
}

func TestLockSQLTxWorksOnAPoolOfDatabaseSQL(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	handle, err := sql.Open("pgx", db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	tx, err := handle.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := pgxlock.LockSQLTx(t.Context(), tx, "k", testkit.LongWait); err != nil {
		t.Error(err)
	}
	testkit.WantFree(t, db, "k", false)
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	testkit.WantFree(t, db, "k", true)
}
