package systemtest_test

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver pgx

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What a lock leaves of the transaction that asks for it, and what it costs.

// A wait sets lock_timeout. Afterwards it is what it was, whoever set it where.
func TestAWaitLeavesSettingsAndOtherLocksAlone(t *testing.T) {
	t.Parallel()
	for _, value := range []string{"30s", "1d", "0", "500ms"} {
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
					for _, depth := range []int{0, 2} {
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

func TestALockTakesAsFewRoundTripsAsItCan(t *testing.T) {
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
			opts  []pgxlock.Option
			want  int64
		}{
			{pgx.ReadCommitted, "a", nil, 1},
			{pgx.ReadCommitted, "a", []pgxlock.Option{pgxlock.NoWait}, 1},
			{pgx.ReadCommitted, "busy", []pgxlock.Option{pgxlock.NoWait}, 1},
			{pgx.ReadCommitted, "a", []pgxlock.Option{testkit.LongWait}, 1},
			{pgx.ReadCommitted, "busy", []pgxlock.Option{brief}, 2},
			{pgx.ReadCommitted, "shared", []pgxlock.Option{pgxlock.Shared}, 1},
			{pgx.ReadUncommitted, "a", nil, 1}, // which is READ COMMITTED
			{pgx.ReadUncommitted, "a", []pgxlock.Option{testkit.LongWait}, 1},
			{pgx.RepeatableRead, "a", nil, 3},
			{pgx.RepeatableRead, "a", []pgxlock.Option{pgxlock.NoWait}, 2},
			{pgx.RepeatableRead, "a", []pgxlock.Option{testkit.LongWait}, 2},
			{pgx.Serializable, "a", nil, 3},
			{pgx.RepeatableRead, "a", []pgxlock.Option{stale}, 1},
			{pgx.Serializable, "a", []pgxlock.Option{stale, testkit.LongWait}, 1},
			{pgx.Serializable, "a", []pgxlock.Option{stale, pgxlock.NoWait}, 1},
			{pgx.Serializable, "busy", []pgxlock.Option{brief}, 2},
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
		if calls != 1 || trips != 1 || err != nil {
			t.Errorf("%v, after waiting: %d calls, %d round trips, %v", w, calls, trips, err)
		}
		x.rollback()
	}
	sent, db := metered(t, base)
	for _, test := range []struct {
		keys []string
		opts []pgxlock.Option
		want int64
	}{
		{nil, nil, 0},
		{[]string{"a", "b", "c"}, nil, 1},
		{[]string{"a", "b", "c"}, []pgxlock.Option{testkit.LongWait}, 1},
		{[]string{"a", "b", "c"}, []pgxlock.Option{pgxlock.NoWait}, 2},
		{[]string{"a", "busy", "c"}, []pgxlock.Option{pgxlock.NoWait}, 2},
		{[]string{"a", "busy", "c"}, []pgxlock.Option{brief}, 2},
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
func prepare(x *txn, opts ...pgxlock.Option) {
	x.t.Helper()
	x.must(fmt.Sprint("prepare ", opts), opts...)
	x.usable() // sends what pgx has put off
}

func TestASnapshotIsFoundStaleByEveryFunction(t *testing.T) {
	t.Parallel()
	db := quietServer(t)
	db.Exec(t, "create table t (n int)")
	for _, w := range []way{byLockTx, byLockAllTx, byLockSQLTx} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			for _, opts := range [][]pgxlock.Option{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
				// Nothing is committed but by ourselves: one lock after the other.
				quiet := w.beginTx(t, db, level)
				other := w.begin(t, db)
				other.exec("insert into t values (1)")
				quiet.must("a", opts...)
				quiet.exec("insert into t values (2)")
				quiet.exec("savepoint s; insert into t values (3); release s")
				quiet.must("b", opts...)
				other.rollback()
				quiet.must("c", opts...)

				before := quiet.state()
				db.Exec(t, "insert into t values (4)")
				err := quiet.lock(t.Context(), "k", opts...)
				if want := level != pgx.ReadCommitted; errors.Is(err, pgxlock.ErrStaleSnapshot) != want || err != nil && !want {
					t.Errorf("%v, %s, %v: %v; stale: %t", w, level, opts, err, want)
				}
				if err != nil {
					wantOneLine(t, err, "READ COMMITTED")
				}
				mode := pgxlock.Exclusive
				if len(opts) > 0 && opts[0] == pgxlock.Shared {
					mode = pgxlock.Shared
				}
				wantChanged(t, before, quiet.state(), "+ "+lockLine("k", mode)) // locked all the same, and usable
				quiet.must("d", append(opts, pgxlock.AllowStaleSnapshot(true))...)
				quiet.rollback()
			}

			// The wait itself is longest.
			holder, x := w.begin(t, db), w.beginTx(t, db, level)
			holder.must("k")
			holder.exec("insert into t values (5)")
			waiting := x.async("k", testkit.LongWait)
			untilWaiting(t, db, 1)
			holder.commit()
			err := <-waiting
			if want := level != pgx.ReadCommitted; errors.Is(err, pgxlock.ErrStaleSnapshot) != want {
				t.Errorf("%v, %s, after waiting: %v; stale: %t", w, level, err, want)
			}
			if sees := x.value("select count(*) from t where n = 5"); (sees == "0") != (err != nil) {
				t.Errorf("%v, %s: it sees %s rows, and was told %v", w, level, sees, err)
			}
			x.rollback()
			db.Exec(t, "truncate t")
		}
	}
}

func TestASnapshotThatIsOlderThanTheLockIsReported(t *testing.T) {
	t.Parallel()
	db := quietServer(t)
	db.Exec(t, "create table t (n int)")
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, test := range []struct {
			name   string
			before string // in another transaction, before the snapshot
			after  string // there, after the snapshot and before the lock
			own    string // in the transaction itself
			stale  bool
		}{
			{name: "nothing happened"},
			{name: "somebody only read", after: "select 1; commit"},
			{name: "somebody has begun to write", after: "insert into t values (1)"},
			{name: "somebody was writing, and is", before: "insert into t values (1)"},
			{name: "somebody has rolled back", before: "insert into t values (1)", after: "rollback"},
			{name: "somebody has begun, written and rolled back", after: "insert into t values (1); rollback"},
			{name: "own writes", own: "insert into t values (1); savepoint s; insert into t values (2); release s"},
			{name: "somebody was writing and has committed", before: "insert into t values (1)", after: "commit", stale: true},
			{name: "somebody has begun, written and committed", after: "insert into t values (1); commit", stale: true},
			{name: "in a savepoint", after: "savepoint s; insert into t values (1); release s; commit", stale: true},
			{name: "after own writes", own: "insert into t values (1)", after: "insert into t values (1); commit", stale: true},
		} {
			for _, opts := range [][]pgxlock.Option{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.AllowStaleSnapshot(true)}} {
				other := byLockTx.begin(t, db)
				if test.before != "" {
					other.exec(test.before)
					db.Exec(t, "insert into t values (0)") // a later id that has ended: the snapshot lists the other one
				}
				tx := byLockTx.beginTx(t, db, level)
				tx.exec("select 1 from t")
				if test.own != "" {
					tx.exec(test.own)
				}
				if test.after != "" {
					other.exec(test.after)
				}
				err := tx.lock(t.Context(), "k", opts...)
				want := test.stale && level != pgx.ReadCommitted && (len(opts) == 0 || opts[0] != pgxlock.AllowStaleSnapshot(true))
				if want != errors.Is(err, pgxlock.ErrStaleSnapshot) || !want && err != nil {
					t.Errorf("%s, %s, %v: %v", level, test.name, opts, err)
				}
				tx.must("k", pgxlock.AllowStaleSnapshot(true)) // it goes on
				tx.rollback()
				other.end()
			}
		}
	}
}

func withoutRelations(state string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(state, "\n"), func(line string) bool {
		return strings.HasPrefix(line, "relation ")
	}), "\n")
}

func TestAnUpgradeIsRefusedByEveryFunction(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, w way) {
		db := testkit.Roomy(t, pgtest.New(t), 1) // one transaction after the other on the same connection
		for _, opts := range [][]pgxlock.Option{nil, {pgxlock.NoWait}, {testkit.LongWait}} {
			x := w.begin(t, db)
			x.must("s", pgxlock.Shared)
			before := withoutRelations(x.state())
			for range 2 {
				x.wants(pgxlock.ErrDeadlock, "s", opts...)
				if err := x.lock(t.Context(), "s", opts...); errors.Is(err, pgxlock.ErrNotAcquired) {
					t.Errorf("%v is said to be busy", opts)
				}
			}
			wantOneLine(t, x.lock(t.Context(), "s", opts...), "shared")
			wantChanged(t, before, withoutRelations(x.state())) // to find out locks what it reads
			x.must("s", pgxlock.Shared)

			x.must("both")
			x.must("both", pgxlock.Shared)
			x.must("both", opts...)
			x.exec("savepoint s")
			x.must("undone", pgxlock.Shared)
			x.wants(pgxlock.ErrDeadlock, "undone", opts...)
			x.exec("rollback to s")
			x.must("undone", opts...)
			x.commit()

			next := w.begin(t, db)
			next.must("s", opts...)
			next.rollback()
		}
	})
	// A key that is held shared refuses the others with it.
	db := pgtest.New(t)
	x := byLockAllTx.begin(t, db)
	x.must("s", pgxlock.Shared)
	for _, opts := range [][]pgxlock.Option{nil, {pgxlock.NoWait}, {testkit.LongWait}} {
		if err := pgxlock.LockAllTx(t.Context(), x.pgx, []string{"a", "s", "b"}, opts...); !errors.Is(err, pgxlock.ErrDeadlock) {
			t.Errorf("%v: %v", opts, err)
		}
	}
	if n := testkit.AdvisoryCount(t, db); n != 1 {
		t.Errorf("%d locks, want that of s alone", n)
	}
}

// Whether an exclusive lock is an upgrade has to be asked once on a connection
// that has had the key shared, and not for ever.
func TestASharedLockOfThePastCostsOneQuestion(t *testing.T) {
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

func TestBadArgumentsOfLocksInTransactionsAreNamed(t *testing.T) {
	t.Parallel()
	var noTx *sql.Tx
	for name, err := range map[string]error{
		"LockTx":    pgxlock.LockTx(t.Context(), nil, "k"),
		"LockAllTx": pgxlock.LockAllTx(t.Context(), nil, []string{"k"}),
		"LockSQLTx": pgxlock.LockSQLTx(t.Context(), noTx, "k"),
	} {
		if err == nil {
			t.Errorf("%s: a nil transaction was locked", name)
			continue
		}
		wantOneLine(t, err, "lock", "tx is nil")
	}
	eachWay(t, func(t *testing.T, w way) {
		sent, db := metered(t, pgtest.New(t))
		x := w.begin(t, db)
		calls, trips := sent.during(func() {
			for key, says := range map[string]string{
				"": "the key is empty", "a\x00": "zero byte", "a\n\xff": "not valid UTF-8", strings.Repeat("🔒", 256): "256 characters",
			} {
				err := x.lock(t.Context(), key)
				wantOneLine(t, err, "lock", says)
				if e, ok := errors.AsType[*pgxlock.Error](err); ok && (e.Op != "lock" || e.Kind != pgxlock.KindAdvisory || w != byLockAllTx && e.Key != key) {
					t.Errorf("%#v", e)
				}
			}
			for _, test := range []struct {
				opt         pgxlock.Option
				says        string
				unsupported bool
			}{
				{nil, "an option is nil", false},
				{pgxlock.Mode(7), "Mode(7)", false},
				{pgxlock.TTL(time.Minute), "TTL(1m0s)", true},
				{pgxlock.Metadata("pod-7\nA"), "no meaning", true},
				{pgxlock.Schema("locks"), `Schema("locks")`, true},
				{pgxlock.Retention(time.Hour), "Retention(1h0m0s)", true},
				{pgxlock.Retries(2), "Retries(2)", true},
				{pgxlock.TxOptions{IsoLevel: pgx.Serializable}, "no meaning", true},
			} {
				err := x.lock(t.Context(), "k", test.opt)
				wantOneLine(t, err, "lock", test.says)
				if errors.Is(err, errors.ErrUnsupported) != test.unsupported {
					t.Errorf("%v is ErrUnsupported: %t", err, !test.unsupported)
				}
			}
		})
		if calls != 0 || trips != 0 {
			t.Errorf("%d calls, %d round trips", calls, trips)
		}
		x.must("k")
		_ = x.try("select 1/0")
		err := x.lock(t.Context(), "k")
		wantServerError(t, err, "25P02")
		wantOneLine(t, err, "roll back")
		x.rollback()
		want := pgx.ErrTxClosed
		if w == byLockSQLTx {
			want = sql.ErrTxDone
		}
		for _, opts := range [][]pgxlock.Option{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
			err := x.lock(t.Context(), "k", opts...)
			if !errors.Is(err, want) {
				t.Errorf("%v: %v, want %v", opts, err, want)
			}
			wantOneLine(t, err, "lock")
		}
	})
	db := pgtest.New(t)
	err := pgxlock.LockAllTx(t.Context(), testkit.Begin(t, db, pgx.TxOptions{}), []string{"fine", "a\nb\xff"})
	wantOneLine(t, err, "not valid UTF-8", `"a\nb\xff"`)
	if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Key != "" {
		t.Errorf("%#v", err)
	}
}

// Of an option that is refused the reader has to know which one it is, and not
// what was to be stored with the lock.
func TestARefusedOptionIsCalledByItsName(t *testing.T) {
	t.Parallel()
	for opt, says := range map[pgxlock.Option]string{
		pgxlock.Shared: "Shared", pgxlock.NoWait: "MaxWait(0s)", pgxlock.TTL(time.Minute): "TTL(1m0s)",
		pgxlock.Retries(2): "Retries(2)", pgxlock.Retention(time.Hour): "Retention(1h0m0s)",
		pgxlock.AllowStaleSnapshot(true): "AllowStaleSnapshot(true)",
		pgxlock.Metadata("pod-7"):        "Metadata",
		pgxlock.TxOptions{}:              "TxOptions",
	} {
		_, err := pgxlock.PurgeClaims(t.Context(), unconnected(t), 0, opt)
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%v, want ErrUnsupported", err)
		}
		wantOneLine(t, err, says)
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
	if err := pgxlock.LockSQLTx(t.Context(), tx, "k", pgxlock.MaxWait(time.Minute)); err != nil {
		t.Error(err)
	}
	testkit.WantFree(t, db, "k", false)
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	testkit.WantFree(t, db, "k", true)
}
