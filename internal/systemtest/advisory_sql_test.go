package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// An advisory lock is a number that every program knows: a session that takes it, by
// whichever function of ours or of the server's, excludes all others (I10).

// numbered are keys of both spaces, of both signs, and such as would be the same
// if the spaces were mixed up or half of a number was lost.
var numbered = []string{
	"invoice:42", "k1", "#42", "é",
	pgxlock.RawKey(42), pgxlock.RawKey(0), pgxlock.RawKey(-1), pgxlock.RawKey(math.MinInt64), pgxlock.RawKey(math.MaxInt64),
	pgxlock.RawKey(7<<32 | 9), pgxlock.RawKey(-7<<32 | 9),
	pgxlock.RawKey2(0, 42), pgxlock.RawKey2(0, 0), pgxlock.RawKey2(-1, -1), pgxlock.RawKey2(7, 9), pgxlock.RawKey2(-7, 9), pgxlock.RawKey2(9, 7),
	pgxlock.RawKey2(math.MinInt32, math.MaxInt32), pgxlock.RawKey2(math.MaxInt32, math.MinInt32), pgxlock.RawKey2(math.MinInt32, 0),
}

// taker is one of the ways to take an advisory lock, without a wait. It returns nil
// if it is busy, else what gives it back.
type taker func(t *testing.T, key string, mode pgxlock.Mode) (giveBack func())

func byLocker(locks *pgxlock.Locker) taker {
	return func(t *testing.T, key string, mode pgxlock.Mode) func() {
		t.Helper()
		lock, err := locks.TryAcquire(t.Context(), key, mode)
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			return nil
		}
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := lock.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}

func byWay(w way, db *pgtest.DB) taker {
	return func(t *testing.T, key string, mode pgxlock.Mode) func() {
		t.Helper()
		x := w.begin(t, db)
		if err := x.lock(t.Context(), key, mode, pgxlock.NoWait); errors.Is(err, pgxlock.ErrNotAcquired) {
			x.rollback()
			return nil
		} else if err != nil {
			t.Fatal(err)
		}
		return x.commit
	}
}

// bySQL calls a function of the server's; what has no function to unlock it ends
// with its transaction.
func bySQL(db *pgtest.DB, try, unlock string) taker {
	return func(t *testing.T, key string, mode pgxlock.Mode) func() {
		t.Helper()
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		call := func(function string) (yes bool) {
			t.Helper()
			if mode == pgxlock.Shared {
				function += "_shared"
			}
			if err := tx.QueryRow(t.Context(), "select "+function+"("+testkit.SQLKey(key)+")").Scan(&yes); err != nil {
				t.Fatal(err)
			}
			return yes
		}
		giveBack := func() {
			if unlock != "" && !call(unlock) {
				t.Errorf("%s(%s): it was not held", unlock, testkit.SQLKey(key))
			}
			testkit.Commit(t, tx)
		}
		if !call(try) {
			testkit.Commit(t, tx)
			return nil
		}
		return giveBack
	}
}

func TestEveryHolderOfAnAdvisoryLockExcludesAllOthers(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	takers := func() map[string]taker {
		return map[string]taker{
			"NewAdvisoryLocker": byLocker(testkit.NewAdvisory(t, db, nil)),
			"LockTx":            byWay(byLockTx, db), "LockAllTx": byWay(byLockAllTx, db), "LockSQLTx": byWay(byLockSQLTx, db),
			"SQL, session":     bySQL(db, "pg_try_advisory_lock", "pg_advisory_unlock"),
			"SQL, transaction": bySQL(db, "pg_try_advisory_xact_lock", ""),
		}
	}
	modes := []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared}
	holders, others := takers(), takers()
	keys := numbered
	if testing.Short() {
		keys = []string{"invoice:42", pgxlock.RawKey2(7, 9)}
	}
	for _, key := range keys {
		for holder, take := range holders {
			for _, mode := range modes {
				giveBack := take(t, key, mode)
				if giveBack == nil {
					t.Fatalf("%q by %s: it is busy, and nobody has it", key, holder)
				}
				for other, try := range others {
					for _, theirs := range modes {
						theirBack := try(t, key, theirs)
						if both := mode == pgxlock.Shared && theirs == pgxlock.Shared; (theirBack != nil) != both {
							t.Errorf("%q is held by %s, %v: granted to %s, %v: %t", key, holder, mode, other, theirs, !both)
						}
						if theirBack != nil {
							theirBack()
						}
					}
				}
				giveBack()
			}
		}
	}
	if n := testkit.AdvisoryCount(t, db); n != 2 { // each Locker has its own
		t.Errorf("%d advisory locks are left, want 2", n)
	}
}

func TestNumbersOfLocksAreNotMixedUp(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "numbers"})
	var held []*pgxlock.Lock
	for _, key := range numbered { // all at once, since none is another
		held = append(held, testkit.Acquire(t, locks, key, pgxlock.NoWait))
	}
	for _, key := range numbered {
		if testkit.Query[bool](t, db, "select pg_try_advisory_xact_lock("+testkit.SQLKey(key)+")") {
			t.Errorf("%q is free for SQL", key)
		}
	}
	if n := testkit.HeldBy(t, db, "numbers"); n != len(numbered) {
		t.Errorf("%d locks in the server, want %d", n, len(numbered))
	}
	for _, lock := range held {
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if n := testkit.HeldBy(t, db, "numbers"); n != 0 {
		t.Errorf("%d locks are left in the server", n)
	}

	// Together they are taken in one order; a name and its number are one lock.
	twice := append(append([]string{pgxlock.RawKey(pgxlock.AdvisoryID("k1"))}, numbered...), numbered...)
	for name, opts := range map[string]struct {
		acquire []pgxlock.AcquireOption
		lockTx  []pgxlock.LockTxOption
	}{
		"no bound": {},
		"NoWait":   {[]pgxlock.AcquireOption{pgxlock.NoWait}, []pgxlock.LockTxOption{pgxlock.NoWait}},
		"MaxWait":  {[]pgxlock.AcquireOption{testkit.LongWait}, []pgxlock.LockTxOption{testkit.LongWait}},
	} {
		all, err := locks.AcquireAll(t.Context(), twice, opts.acquire...)
		if err != nil || len(all) != len(numbered) || testkit.HeldBy(t, db, "numbers") != len(numbered) {
			t.Errorf("%s: AcquireAll: %d locks, %v", name, len(all), err)
		}
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		if err := pgxlock.LockAllTx(t.Context(), tx, twice, pgxlock.NoWait); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%s: LockAllTx of what is held: %v", name, err)
		}
		if err := all.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if err := pgxlock.LockAllTx(t.Context(), tx, twice, opts.lockTx...); err != nil {
			t.Errorf("%s: LockAllTx: %v", name, err)
		}
		for _, key := range numbered {
			if testkit.Query[bool](t, db, "select pg_try_advisory_xact_lock_shared("+testkit.SQLKey(key)+")") {
				t.Errorf("%s: LockAllTx has left %q free", name, key)
			}
		}
		if n := testkit.AdvisoryCount(t, db); n != len(numbered)+1 {
			t.Errorf("%s: LockAllTx: %d locks in the server, want %d", name, n, len(numbered)+1)
		}
		testkit.Rollback(t, tx)
	}
}

// An upgrade is refused in both spaces, and only of the lock that is held shared.
func TestUpgradeIsRefusedInItsOwnSpaceOnly(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachWay(t, func(t *testing.T, w way) {
		db := testkit.Roomy(t, pgtest.New(t), 10)
		single, pair := pgxlock.RawKey(7<<32|9), pgxlock.RawKey2(7, 9)
		for _, keys := range [][2]string{{single, pair}, {pair, single}} {
			x := w.begin(t, db)
			x.must(keys[0], pgxlock.Shared)
			x.wants(pgxlock.ErrDeadlock, keys[0])
			x.must(keys[1], pgxlock.NoWait)
			x.rollback()
		}
	})
}

func TestWaitForAnAdvisoryLockOfSQLEndsWhenThatIsFree(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	locks := testkit.NewAdvisory(t, db, nil)
	keys := []string{"k", pgxlock.RawKey(-42), pgxlock.RawKey2(-4, 2)}
	if testing.Short() {
		keys = keys[:1]
	}
	for _, key := range keys {
		for _, session := range []bool{true, false} {
			sql := db.Connect(t)
			function := "pg_advisory_xact_lock"
			if session {
				function = "pg_advisory_lock"
			}
			lock := testkit.Acquire(t, locks, key)
			granted := make(chan error, 1)
			go func() {
				_, err := sql.Exec(t.Context(), "begin; select "+function+"("+testkit.SQLKey(key)+")")
				granted <- err
			}()
			untilWaiting(t, db, 1)
			if err := lock.Release(t.Context()); err != nil {
				t.Error(err)
			}
			if err := <-granted; err != nil {
				t.Fatal(err)
			}
			if _, err := locks.TryAcquire(t.Context(), key); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%q is held by SQL: %v", key, err)
			}
			acquired := make(chan *pgxlock.Lock, 1)
			go func() {
				lock, err := locks.Acquire(t.Context(), key, pgxlock.MaxWait(pgtest.Patience))
				if err != nil {
					t.Error(err)
				}
				acquired <- lock
			}()
			if _, err := sql.Exec(t.Context(), "commit; select pg_advisory_unlock_all()"); err != nil {
				t.Fatal(err)
			}
			if lock := <-acquired; lock != nil {
				if err := lock.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// Programs in other languages compute the number by this expression, where pgxlock
// is not installed.
func TestNameHasTheSameNumberInEveryEncoding(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.New(t)
	golden := map[string]int64{"invoice:42": 6688477336110245193, "é": 5375421630974772051}
	for key, want := range golden {
		if got := pgxlock.AdvisoryID(key); got != want {
			t.Errorf("AdvisoryID(%q) = %d, want %d", key, got, want)
		}
	}
	names := []string{"invoice:42", "naïve", "ÿ¡", " ", "k", "é"}
	for _, encoding := range []string{"UTF8", "LATIN1", "SQL_ASCII"} {
		t.Run(encoding, func(t *testing.T) {
			name := server.Name + "_" + strings.ToLower(encoding)
			server.Exec(t, "create database "+name+" template template0 encoding '"+encoding+"' lc_collate 'C' lc_ctype 'C'")
			t.Cleanup(func() {
				conn := pgtest.Connect(t, server.URL)
				if _, err := conn.Exec(context.Background(), "drop database "+name+" with (force)"); err != nil {
					t.Error(err)
				}
			})
			pool := server.NewPool(t, func(c *pgxpool.Config) {
				c.ConnConfig.Database = name
				c.ConnConfig.RuntimeParams["client_encoding"] = "UTF8" // which pgx does not say by itself
			})
			db := &pgtest.DB{Pool: pool, Name: name}
			locks := testkit.NewAdvisory(t, db, nil)
			const sha = `('x' || encode(substr(sha256(convert_to($1, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint`
			for _, key := range names {
				if got := testkit.Query[int64](t, db, "select "+sha, key); got != pgxlock.AdvisoryID(key) {
					t.Errorf("%q is %d in SQL, and %d in Go", key, got, pgxlock.AdvisoryID(key))
				}
				lock := testkit.Acquire(t, locks, key)
				if testkit.Query[bool](t, db, "select pg_try_advisory_xact_lock("+sha+")", key) {
					t.Errorf("%q is free for SQL", key)
				}
				if found, err := locks.Holders(t.Context(), key); err != nil || len(found) != 1 || found[0].ID != lock.Holder() {
					t.Errorf("%q: Holders: %v, %v", key, found, err)
				}
				if err := lock.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
			install(t, db, "")
			for _, key := range names {
				if got := testkit.Query[int64](t, db, "select advisory_lock_key($1)", key); got != pgxlock.AdvisoryID(key) {
					t.Errorf("advisory_lock_key(%q) is %d, and %d in Go", key, got, pgxlock.AdvisoryID(key))
				}
			}
		})
	}
}

func TestNumbersAreLocksOnlyWhereNumbersAre(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	lease, memory := testkit.NewLocker(t, db, nil), pgxlock.NewMemoryLocker()
	locks, others := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, nil)
	tx := testkit.Begin(t, db, pgx.TxOptions{}) // what is refused leaves it as it was
	for key, shown := range map[string]string{pgxlock.RawKey(42): "#42", pgxlock.RawKey(math.MinInt64): "#-9223372036854775808", pgxlock.RawKey2(-4, 2): "#-4,2"} {
		for kind, locks := range map[string]*pgxlock.Locker{"lease": lease, "memory": memory} {
			_, err := locks.TryAcquire(t.Context(), key)
			_, all := locks.AcquireAll(t.Context(), []string{"fine", key})
			_, holders := locks.Holders(t.Context(), key)
			for call, err := range map[string]error{"TryAcquire": err, "AcquireAll": all, "Holders": holders} {
				if !errors.Is(err, errors.ErrUnsupported) {
					t.Errorf("%s, %s: %v, want ErrUnsupported", kind, call, err)
				}
				wantOneLine(t, err, " "+shown+": ", "NewAdvisoryLocker", "LockTx")
			}
		}
		_, err := pgxlock.ClaimTx(t.Context(), tx, key)
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("ClaimTx: %v, want ErrUnsupported", err)
		}

		lock := testkit.Acquire(t, locks, key)
		_, err = others.TryAcquire(t.Context(), key)
		wantOneLine(t, err, "acquire "+shown+": not acquired")
		wantOneLine(t, pgxlock.LockTx(t.Context(), tx, key, pgxlock.NoWait), "lock "+shown+": not acquired")
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		wantOneLine(t, lock.Renew(t.Context()), "renew "+shown+": ")
	}

	// What RawKey does not make is no number: only a name may be meant.
	for _, key := range []string{"\x00#042", "\x00#+1", "\x00#", "\x00#1,", "\x00#9223372036854775808", "\x00#1,2147483648", "\x00#1,2,3", "\x00#-0", "\x0042"} {
		for call, err := range map[string]error{
			"NewAdvisoryLocker": func() error { _, err := locks.TryAcquire(t.Context(), key); return err }(),
			"LockTx":            pgxlock.LockTx(t.Context(), tx, key),
			"LockAllTx":         pgxlock.LockAllTx(t.Context(), tx, []string{"fine", key}),
		} {
			wantOneLine(t, err, "zero byte")
			if errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%s of %q: %v", call, key, err)
			}
		}
	}
	if got := fmt.Sprint(pgxlock.AdvisoryID(pgxlock.RawKey(-42)), pgxlock.AdvisoryID(pgxlock.RawKey2(1, -1))); got != "-42 8589934591" {
		t.Errorf("the numbers are %s", got)
	}
}
