package systemtest_test

import (
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// These tests are about leases, fences and claims of programs on database/sql. Those
// with lib/pq are in examples/stacks.

// beginSQLTx begins a transaction, rolled back when the test is over.
func beginSQLTx(t *testing.T, db *pgtest.DB, level pgx.TxIsoLevel) *sql.Tx {
	t.Helper()
	return byLockSQLTx.beginTx(t, db, level).sql
}

func TestAFenceInASQLTxPinsTheLeaseUntilItsTransactionEnds(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	const key = `o'key "$1" \` // no part of a text
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), key)
	others := testkit.NewLocker(t, db, nil)
	tx := beginSQLTx(t, db, "")
	if err := lock.FenceSQL(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "update distributed_locks set expires_at = clock_timestamp() - interval '1 minute'")
	if _, err := others.TryAcquire(t.Context(), key); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("under the fence: %v, want ErrNotAcquired", err)
	}
	if _, err := tx.ExecContext(t.Context(), "create table written ()"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if _, err := others.TryAcquire(t.Context(), key); err != nil {
		t.Errorf("after the commit: %v", err)
	}
	if err := lock.FenceSQL(t.Context(), beginSQLTx(t, db, "")); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("after the take-over: %v, want ErrLost", err)
	}
	<-lock.Lost() // the fence made the Locker look
}

func TestLeaseBesideASQLDBTakesNoConnectionOfThePool(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	handle, err := sql.Open("pgx", db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	handle.SetMaxOpenConns(1)
	pool, err := pgxpool.New(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}, nil)
	tx, err := handle.BeginTx(t.Context(), nil) // has the only connection of the *sql.DB
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	lock := testkit.Acquire(t, locks, "k")
	if err := errors.Join(lock.FenceSQL(t.Context(), tx), lock.Renew(t.Context()), tx.Commit(), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
	if n := pool.Stat().NewConnsCount(); n != 0 {
		t.Errorf("the pool made %d connections, want none", n)
	}
	if n := handle.Stats().WaitCount; n != 0 {
		t.Errorf("%d waits for the connection of the *sql.DB, want none", n)
	}
}

func TestAFenceInASQLTxTellsItsErrorsApart(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, nil)
	older := beginSQLTx(t, db, pgx.RepeatableRead)
	if _, err := older.ExecContext(t.Context(), "select 1"); err != nil { // takes the snapshot
		t.Fatal(err)
	}
	lock := testkit.Acquire(t, locks, "k")
	readOnly := byLockSQLTx.begin(t, db)
	readOnly.exec("set transaction read only")
	empty := pgtest.New(t)
	ended := beginSQLTx(t, db, "")
	if err := ended.Rollback(); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		tx   *sql.Tx
		want error
		says string
	}{
		"older than the lock": {older, pgxlock.ErrStaleSnapshot, ""},
		"read only":           {readOnly.sql, pgxlock.ErrReadOnly, ""},
		"another database":    {beginSQLTx(t, empty, ""), pgxlock.ErrSchema, fmt.Sprintf("the lock is in database %q", db.Name)},
		"ended":               {ended, sql.ErrTxDone, ""},
		"nil":                 {nil, nil, "tx is nil"},
	} {
		err := lock.FenceSQL(t.Context(), test.tx)
		if err == nil || test.want != nil && !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
		wantOneLine(t, err, "fence", `"k"`, test.says)
	}
	under := beginSQLTx(t, db, pgx.RepeatableRead)
	if err := errors.Join(lock.Renew(t.Context()), lock.Err(), lock.FenceSQL(t.Context(), under), under.Rollback(), lock.Release(t.Context())); err != nil {
		t.Errorf("the lock itself: %v", err)
	}
	unsent := beginSQLTx(t, db, "")
	if err := lock.FenceSQL(t.Context(), unsent); !errors.Is(err, pgxlock.ErrReleased) {
		t.Errorf("a released lock: %v, want ErrReleased", err)
	}
	if _, err := unsent.ExecContext(t.Context(), "select 1"); err != nil {
		t.Errorf("something was sent for a released lock: %v", err)
	}
}

func TestManyLocksAreFencedInASQLTx(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks, err := testkit.NewLocker(t, db, nil).AcquireAll(t.Context(), []string{"b", "a"})
	if err != nil {
		t.Fatal(err)
	}
	tx := beginSQLTx(t, db, "")
	if err := locks.FenceSQL(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	for _, lock := range locks {
		_, err := db.Pool.Exec(t.Context(), "select release_lock($1, $2)", lock.Key(), lock.Holder())
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "55P03" {
			t.Errorf("%q is not pinned: %v", lock.Key(), err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "delete from distributed_locks where lock_name = 'b'")
	if err := locks.FenceSQL(t.Context(), beginSQLTx(t, db, "")); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("%v, want ErrLost", err)
	}
}

func TestOneCommittedSQLTxIsTheFirst(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	claim := func(tx *sql.Tx, want bool, opts ...pgxlock.ClaimTxOption) {
		t.Helper()
		first, err := pgxlock.ClaimSQLTx(t.Context(), tx, "k", opts...)
		if err != nil || first != want {
			t.Errorf("%t, %v, want %t", first, err, want)
		}
	}
	undone, done, late := beginSQLTx(t, db, ""), beginSQLTx(t, db, ""), beginSQLTx(t, db, "")
	claim(undone, true)
	for _, wait := range []pgxlock.ClaimTxOption{pgxlock.NoWait, pgxlock.MaxWait(20 * time.Millisecond)} {
		_, err := pgxlock.ClaimSQLTx(t.Context(), done, "k", wait)
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "claim" || !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("while another one's is undecided: %v, want ErrNotAcquired", err)
		}
	}
	if err := undone.Rollback(); err != nil {
		t.Fatal(err)
	}
	claim(done, true, pgxlock.Retention(time.Hour), pgxlock.Schema("public"))
	claim(done, true) // again
	if err := done.Commit(); err != nil {
		t.Fatal(err)
	}
	claim(late, false)
	claim(late, false, testkit.LongWait)
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_claims where expires_at is not null"); n != 1 {
		t.Errorf("%d claims with a retention, want 1", n)
	}
	_, err := pgxlock.ClaimSQLTx(t.Context(), nil, "k")
	wantClaimRefused(t, err, "claim", "tx is nil")
	_, err = pgxlock.ClaimSQLTx(t.Context(), beginSQLTx(t, pgtest.New(t), ""), "k")
	if !errors.Is(err, pgxlock.ErrSchema) {
		t.Errorf("without the migrations: %v, want ErrSchema", err)
	}
}
