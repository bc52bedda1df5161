package systemtest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/internal/usertx"
)

// These tests are about leases, fences and claims of programs on database/sql. Those
// with lib/pq are in examples/stacks.

// beginSQLTx begins a transaction, rolled back when the test is over.
func beginSQLTx(t *testing.T, db *pgtest.DB, level pgx.TxIsoLevel) *sql.Tx {
	t.Helper()
	return byLockSQLTx.beginTx(t, db, level).sql
}

func TestFenceInASQLTxPinsTheLeaseUntilItsTransactionEnds(t *testing.T) {
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

func TestFenceInASQLTxTellsItsErrorsApart(t *testing.T) {
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

func TestClaimIsFirstInOneCommittedSQLTx(t *testing.T) {
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
	if n, err := pgxlock.PurgeClaimsSQLTx(t.Context(), late, 0, pgxlock.Schema("public")); err != nil || n != 0 {
		t.Errorf("purged %d, %v, want none: the claim has a retention", n, err)
	}
	db.Exec(t, "update pgxlock_claims set expires_at = null")
	if n, err := pgxlock.PurgeClaimsSQLTx(t.Context(), late, 0); err != nil || n != 1 {
		t.Errorf("purged %d, %v, want 1", n, err)
	}
	claim(late, true)
	_, err := pgxlock.ClaimSQLTx(t.Context(), nil, "k")
	wantClaimRefused(t, err, "claim", "tx is nil")
	_, err = pgxlock.PurgeClaimsSQLTx(t.Context(), nil, 0)
	wantClaimRefused(t, err, "purge claims", "tx is nil")
	_, err = pgxlock.PurgeClaimsSQLTx(t.Context(), late, -1)
	wantClaimRefused(t, err, "purge claims", "olderThan")
	if err := late.Rollback(); err != nil {
		t.Fatal(err)
	}
	t.Run("refused", func(t *testing.T) { sqlTxIsRefused(t, db) })
	t.Run("hidden", func(t *testing.T) { hiddenUpgradeIsRefused(t, db) })
	t.Run("literals", func(t *testing.T) { literalsReachTheServer(t, db) })
	_, err = pgxlock.ClaimSQLTx(t.Context(), beginSQLTx(t, pgtest.New(t), ""), "k")
	if !errors.Is(err, pgxlock.ErrSchema) {
		t.Errorf("without the migrations: %v, want ErrSchema", err)
	}
}

// sqlTxIsRefused uses transactions in which nothing would be protected.
func sqlTxIsRefused(t *testing.T, db *pgtest.DB) {
	t.Helper()
	locks := testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, locks, "refused")
	over, ended := beginSQLTx(t, db, ""), beginSQLTx(t, db, "")
	if _, err := ended.ExecContext(t.Context(), "commit"); err != nil {
		t.Fatal(err)
	}
	if err := over.Commit(); err != nil {
		t.Fatal(err)
	}
	calls := map[string]func(pgxlock.SQLTx) error{
		"LockSQLTx":    func(tx pgxlock.SQLTx) error { return pgxlock.LockSQLTx(t.Context(), tx, "k") },
		"LockAllSQLTx": func(tx pgxlock.SQLTx) error { return pgxlock.LockAllSQLTx(t.Context(), tx, []string{"a", "b"}) },
		"MaxWait": func(tx pgxlock.SQLTx) error {
			return pgxlock.LockAllSQLTx(t.Context(), tx, []string{"a", "b"}, testkit.LongWait)
		},
		"FenceSQL": func(tx pgxlock.SQLTx) error { return lock.FenceSQL(t.Context(), tx) },
		"ClaimSQLTx": func(tx pgxlock.SQLTx) error {
			_, err := pgxlock.ClaimSQLTx(t.Context(), tx, "refused")
			return err
		},
		"AnswerSQLTx": func(tx pgxlock.SQLTx) error {
			_, err := pgxlock.AnswerSQLTx(t.Context(), tx, "refused", nil, func() ([]byte, error) { return nil, nil })
			return err
		},
		"Locks.FenceSQL": func(tx pgxlock.SQLTx) error { return pgxlock.Locks{lock}.FenceSQL(t.Context(), tx) },
	}
	do := func(tx pgxlock.SQLTx) error { // which it rolls back
		begin := func(context.Context) (pgxlock.SQLTx, error) { return tx, nil }
		return pgxlock.DoSQLTx(t.Context(), locks, "k", begin, func(context.Context, pgxlock.SQLTx, *pgxlock.Lock) error { return nil })
	}
	wantOneLine(t, do(nil), "begin returned neither a transaction nor an error")
	wantOneLine(t, do(over), "tx was committed or rolled back; pass a transaction that is open")
	purge := func(tx pgxlock.SQLTx) error { // needs no transaction: nothing that it does would end
		_, err := pgxlock.PurgeClaimsSQLTx(t.Context(), tx, time.Hour)
		return err
	}
	wantOneLine(t, purge(nil), "purge claims", "tx is nil")
	wantOneLine(t, purge(over), "purge claims", "tx was committed or rolled back; pass a transaction that is open")
	for name, call := range calls {
		wantOneLine(t, call(nil), "tx is nil; pass the transaction")
		for says, test := range map[string]struct {
			tx   pgxlock.SQLTx
			want error
		}{
			"tx was committed or rolled back; pass a transaction that is open":             {over, sql.ErrTxDone},
			"tx is in no transaction: a statement sent through it has ended it, or none w": {ended, nil},
			"tx is of systemtest_test.otherTx; locks need PostgreSQL, and the driver of":   {otherTx{over}, errors.ErrUnsupported},
		} {
			err := call(test.tx)
			if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op == "" || test.want != nil && !errors.Is(err, test.want) {
				t.Errorf("%s: %v, want %v", name, err, test.want)
			}
			wantOneLine(t, err, says)
		}
	}
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_claims where claim_key = 'refused'"); n != 0 {
		t.Error("a claim was made outside a transaction")
	}
	wantOneLine(t, do(ended), "tx is in no transaction")
	both := []string{"a", "b"}
	tx, other := beginSQLTx(t, db, ""), beginSQLTx(t, db, "")
	if err := pgxlock.LockSQLTx(t.Context(), other, "b"); err != nil {
		t.Fatal(err)
	}
	if err := pgxlock.LockAllSQLTx(t.Context(), tx, both, pgxlock.NoWait); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("one of both is locked: %v, want ErrNotAcquired", err)
	}
	if n := testkit.AdvisoryCount(t, db); n != 1 {
		t.Errorf("%d locks, want that of b alone", n)
	}
	if err := errors.Join(other.Rollback(), pgxlock.LockAllSQLTx(t.Context(), tx, both, pgxlock.NoWait), lock.FenceSQL(t.Context(), tx), tx.Rollback()); err != nil {
		t.Error(err)
	}
}

// hiddenUpgradeIsRefused locks in a transaction that is not known again.
func hiddenUpgradeIsRefused(t *testing.T, db *pgtest.DB) {
	t.Helper()
	hidden := struct{ pgxlock.SQLTx }{beginSQLTx(t, db, "")}
	if err := pgxlock.LockSQLTx(t.Context(), hidden, "shared", pgxlock.Shared); err != nil {
		t.Fatal(err)
	}
	for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}} {
		if err := pgxlock.LockSQLTx(t.Context(), hidden, "shared", opts...); !errors.Is(err, pgxlock.ErrDeadlock) {
			t.Errorf("an upgrade with %v: %v, want ErrDeadlock", opts, err)
		}
	}
	err := errors.Join(pgxlock.LockSQLTx(t.Context(), hidden, "another"), pgxlock.LockSQLTx(t.Context(), hidden, "another", pgxlock.Shared), hidden.Commit())
	if err != nil {
		t.Error(err)
	}
}

// An otherTx is a transaction of another driver, which knows nothing of PostgreSQL.
type otherTx struct{ pgxlock.SQLTx }

func (otherTx) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	return nil, errors.New(`near "SAVEPOINT": not understood`)
}

// literalsReachTheServer sends texts under settings that change how the server reads them.
func literalsReachTheServer(t *testing.T, db *pgtest.DB) {
	t.Helper()
	conn := db.Connect(t).PgConn()
	ask := func(query string) (string, error) {
		results, err := conn.Exec(t.Context(), query).ReadAll()
		if err != nil {
			return "", err
		}
		return string(results[len(results)-1].Rows[0][0]), nil
	}
	texts := []string{
		"order:42", "o'key", `back\slash\`, `\'; drop table pgxlock_claims; --`, "a?b", `a\?b`, "$1", "$$", "$tag$", "a\nb; select 1", "%s",
		":name", "é", "世界", "🔒", "表'", "'\u0080", "' or ''='", "",
	}
	random := rapid.String()
	for i := range 40 {
		texts = append(texts, random.Example(i))
	}
	const hex = "select encode(convert_to($1::text, 'UTF8'), 'hex')"
	for _, setting := range []string{"standard_conforming_strings = off", "backslash_quote = on", "escape_string_warning = off"} {
		for _, encoding := range []string{"UTF8", "LATIN1", "SJIS", "GBK", "BIG5", "UHC", "GB18030", "JOHAB", "SQL_ASCII"} {
			if _, err := ask("set " + setting + "; set client_encoding = " + encoding + "; select 1"); err != nil {
				t.Fatal(err)
			}
			for _, text := range texts {
				got, err := ask(usertx.Written("-- $1\n"+hex, text))
				if refused := strings.ContainsRune(text, 0); refused != (err != nil) || !refused && got != fmt.Sprintf("%x", text) {
					t.Errorf("%s, %s: %q arrives as %s: %v", setting, encoding, text, got, err)
				}
			}
			for _, text := range []string{"\xff", "a\x80'", "\xbf\\'", "\xed\xa0\x80", "a\x00b", "\x00"} { // no UTF-8; a zero byte
				if got, err := ask(usertx.Written(hex, text)); err == nil {
					t.Errorf("%s, %s: %q arrives as %s, want an error", setting, encoding, text, got)
				}
			}
		}
		if _, err := ask("reset all; select 1"); err != nil {
			t.Fatal(err)
		}
	}
}

// A lock that is taken through a *sql.DB or a *sql.Conn would be free at once: such a call does not compile.
func TestSQLTxIsATransactionAlone(t *testing.T) {
	t.Parallel()
	for of, want := range map[reflect.Type]bool{
		reflect.TypeFor[*sql.Tx]():                     true,
		reflect.TypeFor[struct{ *sql.Tx }]():           true, // bun.Tx
		reflect.TypeFor[*struct{ *sql.Tx }]():          true, // *sqlx.Tx
		reflect.TypeFor[*sql.DB]():                     false,
		reflect.TypeFor[*sql.Conn]():                   false,
		reflect.TypeFor[*struct{ *sql.DB }]():          false, // *sqlx.DB, *bun.DB
		reflect.TypeFor[interface{ Commit() error }](): false,
	} {
		if got := of.Implements(reflect.TypeFor[pgxlock.SQLTx]()); got != want {
			t.Errorf("%s: %t, want %t", of, got, want)
		}
	}
}
