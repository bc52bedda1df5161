package systemtest_test

import (
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestSnapshotIsFoundStaleByEveryFunction(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	sent, db := metered(t, quietServer(t))
	db.Exec(t, "create table t (n int)")
	for _, w := range []way{byLockTx, byLockAllTx, byLockSQLTx} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
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
	if n := sent.failed.Load(); n != 0 {
		t.Errorf("the server wrote %d errors to its log; a stale snapshot is none", n)
	}
}

func TestSnapshotThatIsOlderThanTheLockIsReported(t *testing.T) {
	pgtest.Long(t)
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
			for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.AllowStaleSnapshot(true)}} {
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

func TestUpgradeIsRefusedByEveryFunction(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 1) // one transaction after the other on the same connection
	eachWay(t, func(t *testing.T, w way) {
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}} {
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
	db = pgtest.New(t)
	x := byLockAllTx.begin(t, db)
	x.must("s", pgxlock.Shared)
	for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}} {
		if err := pgxlock.LockAllTx(t.Context(), x.pgx, []string{"a", "s", "b"}, opts...); !errors.Is(err, pgxlock.ErrDeadlock) {
			t.Errorf("%v: %v", opts, err)
		}
	}
	if n := testkit.AdvisoryCount(t, db); n != 1 {
		t.Errorf("%d locks, want that of s alone", n)
	}
}

func TestBadArgumentsOfLocksInTransactionsAreNamed(t *testing.T) {
	t.Parallel()
	var noTx *sql.Tx
	for name, err := range map[string]error{
		"LockTx":       pgxlock.LockTx(t.Context(), nil, "k"),
		"LockAllTx":    pgxlock.LockAllTx(t.Context(), nil, []string{"k"}),
		"LockSQLTx":    pgxlock.LockSQLTx(t.Context(), noTx, "k"),
		"LockAllSQLTx": pgxlock.LockAllSQLTx(t.Context(), nil, []string{"k"}),
	} {
		if err == nil {
			t.Errorf("%s: a nil transaction was locked", name)
			continue
		}
		wantOneLine(t, err, "lock", "tx is nil")
	}
	sent, db := metered(t, pgtest.New(t))
	eachWay(t, func(t *testing.T, w way) {
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
			wantOneLine(t, x.lock(t.Context(), "k", nil), "lock", "an option is nil")
			wantOneLine(t, x.lock(t.Context(), "k", pgxlock.Mode(7)), "lock", "Mode(7)")
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
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
			err := x.lock(t.Context(), "k", opts...)
			if !errors.Is(err, want) {
				t.Errorf("%v: %v, want %v", opts, err, want)
			}
			wantOneLine(t, err, "lock")
		}
	})
	err := pgxlock.LockAllTx(t.Context(), testkit.Begin(t, db, pgx.TxOptions{}), []string{"fine", "a\nb\xff"})
	wantOneLine(t, err, "not valid UTF-8", `"a\nb\xff"`)
	if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Key != "" {
		t.Errorf("%#v", err)
	}
}

// A statement of the caller's may end the transaction behind the driver's back. A lock would be
// granted then and be free at once.
func TestLockAfterTheTransactionEndedIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	eachWay(t, func(t *testing.T, w way) {
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
			x := w.begin(t, db)
			x.must("k", opts...)
			x.exec("commit")
			if err := x.lock(t.Context(), "k", opts...); err == nil {
				t.Errorf("%v: granted", opts)
			}
			x.end()
		}
	})
}
