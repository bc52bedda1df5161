package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// wantClaim claims, which must give that answer.
func wantClaim(t *testing.T, tx pgx.Tx, want bool, key string, opts ...pgxlock.ClaimTxOption) {
	t.Helper()
	first, err := pgxlock.ClaimTx(t.Context(), tx, key, opts...)
	if err != nil {
		t.Fatalf("%q %v: %v", key, opts, err)
	}
	if first != want {
		t.Errorf("%q %v: %t, want %t", key, opts, first, want)
	}
}

// wantClaimed claims in a transaction that is rolled back, which must give that
// answer.
func wantClaimed(t *testing.T, db *pgtest.DB, want bool, key string) {
	t.Helper()
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, tx, want, key)
	testkit.Rollback(t, tx)
}

// claimLater claims in the background.
func claimLater(t *testing.T, tx pgx.Tx, key string, opts ...pgxlock.ClaimTxOption) <-chan claimed {
	t.Helper()
	result := make(chan claimed, 1)
	go func() {
		first, err := pgxlock.ClaimTx(t.Context(), tx, key, opts...)
		result <- claimed{first, err}
	}()
	return result
}

type claimed struct {
	first bool
	err   error
}

func nested(t *testing.T, tx pgx.Tx) pgx.Tx {
	t.Helper()
	inner, err := tx.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return inner
}

func TestClaimIsTrueOnlyOnceCommitted(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	for _, opts := range [][]pgxlock.ClaimTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Retention(time.Hour)}} {
		key := fmt.Sprint(opts)
		undone := testkit.Begin(t, db, pgx.TxOptions{})
		wantClaim(t, undone, true, key, opts...)
		testkit.Rollback(t, undone)

		done := testkit.Begin(t, db, pgx.TxOptions{})
		wantClaim(t, done, true, key, opts...)
		wantClaim(t, done, true, key, opts...) // still its own
		inner := nested(t, done)
		wantClaim(t, inner, true, key, opts...)
		testkit.Commit(t, inner)
		testkit.Commit(t, done)

		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			late := testkit.Begin(t, db, pgx.TxOptions{IsoLevel: level})
			wantClaim(t, late, false, key, opts...)
			wantClaim(t, late, true, key+string(level), opts...)
			testkit.Commit(t, late)
		}
	}
	t.Run("answers", func(t *testing.T) { requestsAreAnsweredOnce(t, db) })
}

func TestClaimInASavepointIsUndoneWithIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	outer := testkit.Begin(t, db, pgx.TxOptions{})
	inner := nested(t, outer)
	wantClaim(t, inner, true, "undone")
	wantClaim(t, inner, true, "undone by MaxWait", testkit.LongWait)
	testkit.Rollback(t, inner)
	inner = nested(t, outer)
	wantClaim(t, inner, true, "kept")
	testkit.Commit(t, inner)
	testkit.Commit(t, outer)
	for key, want := range map[string]bool{"undone": true, "undone by MaxWait": true, "kept": false} {
		wantClaimed(t, db, want, key)
	}
}

func TestClaimsAndLocksHaveNamesOfTheirOwn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	locked, claiming := testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{})
	if err := errors.Join(pgxlock.LockTx(t.Context(), locked, "k"), lock.Err()); err != nil {
		t.Fatal(err)
	}
	wantClaim(t, claiming, true, "k", pgxlock.NoWait)
	wantClaim(t, claiming, true, "K", pgxlock.NoWait)
	wantClaim(t, claiming, true, "k ", pgxlock.NoWait)
	wantClaim(t, claiming, true, strings.Repeat("🔒", 255), pgxlock.NoWait)
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_claims"); n != 0 {
		t.Errorf("%d claims are visible before the commit", n)
	}
	testkit.Commit(t, claiming)
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_claims where claimed_by is not null and expires_at is null"); n != 4 {
		t.Errorf("%d claims, want 4", n)
	}
}

func TestUndecidedClaimIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 10)
	for _, claimFirst := range []bool{true, false} { // or what has expired is claimed again
		for _, commits := range []bool{true, false} {
			for _, opts := range [][]pgxlock.ClaimTxOption{nil, {testkit.LongWait}} {
				key := fmt.Sprint(claimFirst, commits, opts)
				if !claimFirst {
					db.Exec(t, `insert into pgxlock_claims (claim_key, claimed_at, expires_at, claimed_by)
						values ($1, now() - interval '2 h', now() - interval '1 h', pg_current_xact_id())`, key)
				}
				one, two, hasty := testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{})
				wantClaim(t, one, true, key, pgxlock.Retention(time.Hour))
				waiting := claimLater(t, two, key, opts...)
				untilWaiting(t, db, 1)
				for _, bound := range []pgxlock.ClaimTxOption{pgxlock.NoWait, pgxlock.MaxWait(20 * time.Millisecond)} {
					first, err := pgxlock.ClaimTx(t.Context(), hasty, key, bound)
					if first || !errors.Is(err, pgxlock.ErrNotAcquired) {
						t.Errorf("%s, %v: %t, %v; want ErrNotAcquired", key, bound, first, err)
					}
				}
				if commits {
					testkit.Commit(t, one)
				} else {
					testkit.Rollback(t, one)
				}
				if got := <-waiting; got.err != nil || got.first == commits {
					t.Errorf("%s: %+v", key, got)
				}
				testkit.Commit(t, two)
				wantClaim(t, hasty, false, key, pgxlock.NoWait) // it can go on, and now it is decided
				wantClaim(t, hasty, true, key+" by the hasty one")
				testkit.Commit(t, hasty)
			}
		}
	}
}

// A claim that is refused leaves the caller's transaction as it was.
func TestRefusedClaimChangesNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "create table t (n int)")
	holder := testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, holder, true, "k")
	for _, timeout := range []string{"lock_timeout = '30s'", "lock_timeout = '1d'", "lock_timeout = 0", "lock_timeout = '500ms'"} {
		for _, local := range []string{"set ", "set local "} {
			for _, opt := range []pgxlock.ClaimTxOption{pgxlock.NoWait, pgxlock.MaxWait(20 * time.Millisecond), testkit.LongWait} {
				x := &txn{t: t, pgx: testkit.Begin(t, db, pgx.TxOptions{})}
				x.exec("do $$begin end$$") // loads the language, which has settings
				x.exec(local + timeout)
				x.exec("insert into t values (1)")
				before := x.settings()
				if opt == testkit.LongWait { // granted
					wantClaim(t, x.pgx, true, "free", opt)
				} else if first, err := pgxlock.ClaimTx(t.Context(), x.pgx, "k", opt); first || !errors.Is(err, pgxlock.ErrNotAcquired) {
					t.Errorf("%v: %t, %v", opt, first, err)
				}
				wantChanged(t, before, x.settings())
				x.exec("insert into t values (1)")
				x.exec("delete from pgxlock_claims where claim_key = 'free'")
				x.exec("reset lock_timeout")
				x.commit()
			}
		}
	}
	if n := testkit.Query[int](t, db, "select count(*) from t"); n != 4*2*3*2 {
		t.Errorf("%d rows were committed, want %d", n, 4*2*3*2)
	}
}

func TestClaimsWaitIsCutToWhatOtherTimeoutsLeave(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	holder := testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, holder, true, "k")
	for cut := false; !cut; { // a machine may be too busy for the 50 ms that are left; it is not so every time
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		if _, err := tx.Exec(t.Context(), "set local statement_timeout = '300ms'"); err != nil {
			t.Fatal(err)
		}
		first, err := pgxlock.ClaimTx(t.Context(), tx, "k", pgxlock.MaxWait(time.Hour))
		refused := errors.Is(err, pgxlock.ErrNotAcquired)
		if refused {
			_, err = tx.Exec(t.Context(), "set local statement_timeout = 0") // may be late, too
		}
		if cut = refused && err == nil; cut {
			usable(t, tx)
		} else if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "57014" {
			t.Fatalf("%t, %v; want ErrNotAcquired", first, err)
		}
		testkit.Rollback(t, tx)
	}
}

// MaxWait bounds the wait, however many have the key one after the other.
func TestMaxWaitBoundsAClaimAsAWhole(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 10)
	const wait = 2 * time.Second
	const claimInSavepoint = "savepoint s; select claim_once('k')"
	for range 100 {
		holder, waiter := testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{})
		if _, err := holder.Exec(t.Context(), claimInSavepoint); err != nil {
			t.Fatal(err)
		}
		waiting := make(chan error, 1)
		go func() {
			_, err := pgxlock.ClaimTx(t.Context(), waiter, "k", pgxlock.MaxWait(wait))
			_ = waiter.Rollback(t.Context())
			waiting <- err
		}()
		pgtest.Until(t, "it waits, or has waited already", func() bool {
			return len(waiting) > 0 || testkit.Query[bool](t, db, "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')")
		})
		// Each time when most of the bound is over, the holder gives the claim
		// back and takes it again.
		const most = 60 // one that is bounded ends after two, unless this machine stands still
		turns := 0
		for ; turns < most; turns++ {
			began := testkit.Query[time.Time](t, db, "select clock_timestamp()")
			pgtest.Until(t, "most of the bound is over, or it no longer waits", func() bool {
				return len(waiting) > 0 || testkit.Query[bool](t, db, "select clock_timestamp() >= $1", began.Add(wait*3/5))
			})
			if len(waiting) > 0 {
				break
			}
			if _, err := holder.Exec(t.Context(), "rollback to s; "+claimInSavepoint); err != nil {
				t.Fatal(err)
			}
		}
		testkit.Rollback(t, holder)
		err := <-waiting
		if err != nil && !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Fatal(err)
		}
		if turns == most {
			t.Fatalf("it waited for %d claims, 36 times as long as it might: %v", most, err)
		}
		if turns > 0 && err != nil {
			return // for two claims together, and no longer
		}
		// The waiter was faster than the holder, which it is not every time.
	}
	t.Error("nothing was tested")
}

func TestErrorsOfAClaimAreNotTakenForAnUndecidedOne(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 10)
	for _, opts := range [][]pgxlock.ClaimTxOption{nil, {testkit.LongWait}} {
		one, two := testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{})
		key := fmt.Sprint(opts)
		wantClaim(t, one, true, "a"+key)
		wantClaim(t, two, true, "b"+key)
		for tx, timeout := range map[pgx.Tx]string{one: "1h", two: "10ms"} {
			if _, err := tx.Exec(t.Context(), "set local deadlock_timeout = '"+timeout+"'"); err != nil {
				t.Fatal(err)
			}
		}
		waiting := claimLater(t, one, "b"+key, opts...)
		untilWaiting(t, db, 1)
		_, err := pgxlock.ClaimTx(t.Context(), two, "a"+key, opts...)
		wantServerError(t, err, "40P01")
		testkit.Rollback(t, two)
		if got := <-waiting; got.err != nil || !got.first {
			t.Errorf("the other one: %+v", got)
		}

		cancelled := testkit.Begin(t, db, pgx.TxOptions{})
		pid := cancelled.Conn().PgConn().PID()
		waiting = claimLater(t, cancelled, "a"+key, opts...)
		// It waits in short turns. A cancel that comes together with the end of one is lost.
		pgtest.Until(t, "its wait is cancelled", func() bool {
			db.Exec(t, "select pg_cancel_backend(pid) from pg_stat_activity where pid = $1 and wait_event_type = 'Lock'", pid)
			return len(waiting) > 0
		})
		wantServerError(t, (<-waiting).err, "57014")
		_, err = pgxlock.ClaimTx(t.Context(), cancelled, "c", opts...)
		wantServerError(t, err, "25P02")
		testkit.Commit(t, one)
	}

	holder, own := testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, holder, true, "k")
	if _, err := own.Exec(t.Context(), "set local lock_timeout = '20ms'"); err != nil {
		t.Fatal(err)
	}
	_, err := pgxlock.ClaimTx(t.Context(), own, "k")
	wantServerError(t, err, "55P03") // the session's own

	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		old := testkit.Begin(t, db, pgx.TxOptions{IsoLevel: level})
		usable(t, old) // takes the snapshot
		key := string(level)
		other := testkit.Begin(t, db, pgx.TxOptions{})
		wantClaim(t, other, true, key)
		testkit.Commit(t, other)
		_, err := pgxlock.ClaimTx(t.Context(), old, key)
		wantServerError(t, err, "40001")
	}
}

func TestContextThatEndsAClaimLeavesNoClaim(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 10)
	holder, tx := testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, holder, true, "k")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := pgxlock.ClaimTx(ended, tx, "k"); !errors.Is(err, context.Canceled) || errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("before the call: %v", err)
	}
	wantClaim(t, tx, true, "held before") // nothing was sent

	ctx, cancel := context.WithCancel(t.Context())
	pid := tx.Conn().PgConn().PID()
	waiting := make(chan error, 1)
	go func() { _, err := pgxlock.ClaimTx(ctx, tx, "k", testkit.LongWait); waiting <- err }()
	untilWaiting(t, db, 1)
	cancel()
	if err := <-waiting; !errors.Is(err, context.Canceled) || errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("during the wait: %v", err)
	}
	_ = tx.Rollback(t.Context())
	testkit.Rollback(t, holder)
	// pgx cancels the statement and closes the connection in the background: until the
	// server has ended the transaction, it holds the one claim and waits for the other.
	pgtest.Until(t, "the server has ended the transaction", func() bool {
		return testkit.Query[bool](t, db, "select not exists (select from pg_stat_activity where pid = $1)", pid)
	})
	next := testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, next, true, "k")
	wantClaim(t, next, true, "held before")
}

// Workers claim the same keys, at all levels and in savepoints, and change their
// minds. The first one writes, and only one of those is ever seen.
func TestSoakClaimIsFirstInOneCommittedTransaction(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const workers = 8
	db := testkit.Roomy(t, testkit.Migrated(t), workers+2)
	least := pgtest.Soak(t, 60, 3000)
	db.Exec(t, "create table done (key text, worker int)")
	var undone, conflicts atomic.Int32
	tested := func() bool { return undone.Load() > 0 && conflicts.Load() > 0 }
	var dice [workers]*rand.Rand
	for worker := range workers {
		dice[worker] = rand.New(rand.NewPCG(uint64(worker), 3))
	}
	keys := 0
	for ; (keys < least || !tested() && keys < 100*least) && !t.Failed(); keys++ {
		key := fmt.Sprint("order:", keys)
		var working sync.WaitGroup // they begin each key together: else they may never meet
		for worker := range workers {
			working.Go(func() {
				for decided := false; !decided; {
					var err error
					decided, err = claimAndWrite(t, dice[worker], db, key, worker)
					switch pgErr, ok := errors.AsType[*pgconn.PgError](err); {
					case err == nil && !decided:
						undone.Add(1)
					case errors.Is(err, pgxlock.ErrNotAcquired), ok && pgErr.Code == "40001":
						conflicts.Add(1)
					case err != nil:
						t.Errorf("worker %d, %q: %v", worker, key, err)
						return
					}
				}
			})
		}
		working.Wait()
	}
	if n := testkit.Query[int](t, db, "select count(*) from (select from done group by key having count(*) = 1) d"); n != keys {
		t.Errorf("%d of %d keys were done exactly once", n, keys)
	}
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_claims"); n != keys {
		t.Errorf("%d claims for %d keys", n, keys)
	}
	if !tested() {
		t.Errorf("%d rollbacks, %d conflicts: nothing was tested", undone.Load(), conflicts.Load())
	}
}

// claimAndWrite reports whether the key is done for, by this transaction or by
// another one.
func claimAndWrite(t *testing.T, dice *rand.Rand, db *pgtest.DB, key string, worker int) (decided bool, err error) {
	ctx := t.Context()
	level := []pgx.TxIsoLevel{"", "", pgx.RepeatableRead, pgx.Serializable}[dice.IntN(4)]
	opts := [][]pgxlock.ClaimTxOption{nil, {pgxlock.NoWait}, {pgxlock.MaxWait(time.Millisecond)}, {testkit.LongWait}}[dice.IntN(4)]
	outer, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		return false, err
	}
	defer func() { _ = outer.Rollback(context.WithoutCancel(ctx)) }()
	write := func(tx pgx.Tx) (bool, error) {
		first, err := pgxlock.ClaimTx(ctx, tx, key, opts...)
		if err == nil && first {
			_, err = tx.Exec(ctx, "insert into done values ($1, $2)", key, worker)
		}
		return first, err
	}
	if dice.IntN(3) == 0 { // first a claim that is undone
		inner, err := outer.Begin(ctx)
		if err != nil {
			return false, err
		}
		if _, err := write(inner); err != nil {
			return false, err
		}
		if err := inner.Rollback(ctx); err != nil {
			return false, err
		}
	}
	tx := outer
	if dice.IntN(2) == 0 {
		if tx, err = outer.Begin(ctx); err != nil {
			return false, err
		}
	}
	first, err := write(tx)
	if err != nil {
		return false, err
	}
	if !first {
		var n int
		if err := tx.QueryRow(ctx, "select count(*) from done where key = $1", key).Scan(&n); err != nil {
			return false, err
		}
		if n != 1 {
			t.Errorf("%q is said to be done, and %d rows of it are visible", key, n)
		}
		return true, nil
	}
	if dice.IntN(3) == 0 {
		return false, nil
	}
	if tx != outer {
		if err := tx.Commit(ctx); err != nil {
			return false, err
		}
	}
	return true, outer.Commit(ctx)
}

func TestRetentionEndsAClaim(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	claim := func(want bool, opts ...pgxlock.ClaimTxOption) {
		t.Helper()
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		wantClaim(t, tx, want, "k", opts...)
		testkit.Commit(t, tx)
	}
	claim(true, pgxlock.Retention(time.Hour))
	if !testkit.Query[bool](t, db, "select expires_at - claimed_at = interval '1 hour' from pgxlock_claims") {
		t.Error("the claim does not stand for an hour")
	}
	claim(false, pgxlock.Retention(time.Millisecond)) // changes nothing
	if !testkit.Query[bool](t, db, "select expires_at - claimed_at = interval '1 hour' from pgxlock_claims") {
		t.Error("a claim that was refused changed the one that stands")
	}
	db.Exec(t, "update pgxlock_claims set claimed_at = claimed_at - interval '1 hour', expires_at = clock_timestamp()")
	claim(true, pgxlock.Retention(time.Millisecond))
	pgtest.Until(t, "the retention is over", func() bool {
		return testkit.Query[bool](t, db, "select expires_at <= clock_timestamp() from pgxlock_claims")
	})
	claim(true) // for good
	claim(false)
	if !testkit.Query[bool](t, db, "select expires_at is null from pgxlock_claims") {
		t.Error("a claim without a retention expires")
	}
}

func TestClaimsAreFoundInTheSchemaThatIsNamedOrOnThePath(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	const odd = `we"ird schema`
	install(t, db, odd)
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	_, err := pgxlock.ClaimTx(t.Context(), tx, "k")
	wantSchemaError(t, err)
	if _, err = pgxlock.PurgeClaims(t.Context(), db.Pool, 0); err != nil {
		t.Errorf("the only one in the database: %v", err)
	}
	testkit.Rollback(t, tx)

	tx = testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, tx, true, "k", pgxlock.Schema(odd))
	wantClaim(t, tx, true, "k", testkit.LongWait, pgxlock.Schema(odd), pgxlock.Retention(time.Hour))
	testkit.Commit(t, tx)
	for range 2 { // it is answered, and read
		tx = testkit.Begin(t, db, pgx.TxOptions{})
		answer, err := pgxlock.AnswerTx(t.Context(), tx, "asked", nil, func() ([]byte, error) { return []byte("there"), nil }, pgxlock.Schema(odd))
		if err != nil || string(answer) != "there" {
			t.Errorf("%q, %v", answer, err)
		}
		testkit.Commit(t, tx)
	}
	_, err = pgxlock.AnswerTx(t.Context(), testkit.Begin(t, db, pgx.TxOptions{}), "asked", nil, func() ([]byte, error) { return nil, nil })
	wantSchemaError(t, err, "claim_request")
	onPath := withPath(t, db, `"we""ird schema"`)
	tx = testkit.Begin(t, onPath, pgx.TxOptions{})
	wantClaim(t, tx, false, "k")
	testkit.Commit(t, tx)
	if n, err := pgxlock.PurgeClaims(t.Context(), db.Pool, 0, pgxlock.Schema(odd)); n != 1 || err != nil {
		t.Errorf("%d claims purged: %v", n, err)
	}
	tx = testkit.Begin(t, onPath, pgx.TxOptions{})
	wantClaim(t, tx, true, "k")
	testkit.Commit(t, tx)
	if n, err := pgxlock.PurgeClaims(t.Context(), onPath.Pool, 0); n != 1 || err != nil {
		t.Errorf("%d claims purged: %v", n, err)
	}
	tx = testkit.Begin(t, db, pgx.TxOptions{})
	_, err = pgxlock.ClaimTx(t.Context(), tx, "k", pgxlock.Schema("nowhere"))
	wantSchemaError(t, err)
}

func TestClaimsNeedTheMigrations(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	_, err := pgxlock.ClaimTx(t.Context(), tx, "k")
	wantSchemaError(t, err, "claim_once", "search_path")
	wantOneLine(t, err, "claim", `"k"`)
	_, err = pgxlock.PurgeClaims(t.Context(), db.Pool, 0)
	wantSchemaError(t, err, "has no pgxlock")
	testkit.Rollback(t, tx)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	wantClaimed(t, db, true, "k")
}

func TestReadOnlyTransactionClaimsNothing(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	for _, opts := range [][]pgxlock.ClaimTxOption{nil, {pgxlock.NoWait}} {
		tx := testkit.Begin(t, db, pgx.TxOptions{AccessMode: pgx.ReadOnly})
		first, err := pgxlock.ClaimTx(t.Context(), tx, "k", opts...)
		if first || !errors.Is(err, pgxlock.ErrReadOnly) || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%t, %v; want ErrReadOnly", first, err)
		}
	}
}

func TestPurgeEndsOldClaimsInBatches(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	fill := func(n int, prefix, age, expires string) {
		t.Helper()
		db.Exec(t, fmt.Sprintf(`insert into pgxlock_claims (claim_key, claimed_at, expires_at, claimed_by)
			select '%s:' || i, now() - interval '%s', %s, pg_current_xact_id() from generate_series(1, %d) i`, prefix, age, expires, n))
	}
	fill(23_000, "old", "2 hours", "null")
	fill(4_000, "expired", "1 minute", "now() - interval '1 second'")
	fill(500, "young", "1 minute", "null")
	fill(500, "kept", "2 hours", "now() + interval '1 hour'")
	purges, traced := testkit.Counted(t, db, "purge_claims(")
	n, err := pgxlock.PurgeClaims(t.Context(), traced.Pool, time.Hour)
	if n != 27_000 || err != nil {
		t.Errorf("%d claims purged, want 27000: %v", n, err)
	}
	if n, _, _ := purges.Counts(); n != 3 {
		t.Errorf("%d transactions, want 3", n)
	}
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_claims where claim_key ~ '^(young|kept):'"); n != 1000 {
		t.Errorf("%d of 1000 claims that were to stay are left", n)
	}
	for key, want := range map[string]bool{"old:1": true, "expired:1": true, "young:1": false, "kept:1": false} {
		wantClaimed(t, db, want, key)
	}

	// A multiple of the batch, and nothing.
	db.Exec(t, "delete from pgxlock_claims")
	fill(20_000, "old", "2 hours", "null")
	for _, want := range []int64{20_000, 0} {
		if n, err := pgxlock.PurgeClaims(t.Context(), db.Pool, time.Hour); n != want || err != nil {
			t.Errorf("%d claims purged, want %d: %v", n, want, err)
		}
	}
}

func TestPurgeTellsHowFarItGot(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `insert into pgxlock_claims (claim_key, claimed_at, claimed_by)
		select i::text, now() - interval '1 hour', pg_current_xact_id() from generate_series(1, 15000) i`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	batches := 0
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = testkit.OnStatement("purge_claims(", func() {
			if batches++; batches == 2 {
				cancel()
			}
		})
	})
	n, err := pgxlock.PurgeClaims(ctx, pool, 0)
	if n != 10_000 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d claims purged: %v; want 10000 and context.Canceled", n, err)
	}
	wantOneLine(t, err, "purge claims")
	if left := testkit.Query[int](t, db, "select count(*) from pgxlock_claims"); left != 5000 {
		t.Errorf("%d claims are left, want 5000", left)
	}
}

func TestPurgeSkipsWhatSomebodyHasLocked(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `insert into pgxlock_claims (claim_key, claimed_at, claimed_by)
		select i::text, now() - interval '1 hour', pg_current_xact_id() from generate_series(1, 10) i`)
	other := testkit.Begin(t, db, pgx.TxOptions{})
	if _, err := other.Exec(t.Context(), "select from pgxlock_claims where claim_key in ('3', '7') for update"); err != nil {
		t.Fatal(err)
	}
	if n, err := pgxlock.PurgeClaims(t.Context(), db.Pool, 0); n != 8 || err != nil {
		t.Errorf("%d claims purged, want 8: %v", n, err)
	}
	testkit.Rollback(t, other)
	if n, err := pgxlock.PurgeClaims(t.Context(), db.Pool, 0); n != 2 || err != nil {
		t.Errorf("%d claims purged, want 2: %v", n, err)
	}
}

// wantClaimRefused checks that bad input ended in an *Error whose one line says
// what was wrong.
func wantClaimRefused(t *testing.T, err error, op string, words ...string) {
	t.Helper()
	e, ok := err.(*pgxlock.Error) //nolint:errorlint // this is what the functions return, not something inside it
	if !ok || e.Op != op || e.Kind != 0 {
		t.Fatalf("%#v, want an *Error of %q", err, op)
	}
	wantOneLine(t, err, words...)
}

func TestBadArgumentsOfClaimsAreNamed(t *testing.T) {
	t.Parallel()
	_, err := pgxlock.ClaimTx(t.Context(), nil, "k")
	wantClaimRefused(t, err, "claim", "tx is nil")
	_, err = pgxlock.PurgeClaims(t.Context(), nil, 0)
	wantClaimRefused(t, err, "purge claims", "the pool is nil")
	_, err = pgxlock.PurgeClaims(t.Context(), unconnected(t), -time.Second)
	wantClaimRefused(t, err, "purge claims", "olderThan is -1s")
	_, err = pgxlock.PurgeClaims(t.Context(), unconnected(t), 0, "")
	wantClaimRefused(t, err, "purge claims", "Schema is empty")

	db := testkit.Migrated(t)
	sent, through := metered(t, db)
	tx := testkit.Begin(t, through, pgx.TxOptions{})
	usable(t, tx)
	calls, trips := sent.during(func() {
		for key, says := range map[string]string{
			"": "the key is empty", "a\x00": "zero byte", "a\n\xff": "not valid UTF-8", strings.Repeat("k", 256): "256 characters",
		} {
			_, err := pgxlock.ClaimTx(t.Context(), tx, key)
			wantClaimRefused(t, err, "claim", says)
		}
		for _, test := range []struct {
			opt  pgxlock.ClaimTxOption
			says string
		}{
			{nil, "an option is nil"},
			{pgxlock.Retention(0), "Retention is 0s"},
			{pgxlock.Retention(-time.Second), "Retention is -1s"},
			{pgxlock.Retention(1<<63 - 1), "Retention is"},
			{pgxlock.Schema(""), "Schema is empty"},
			{pgxlock.Schema("pg_catalog"), "must not begin with pg_"},
			{pgxlock.Schema("a\nb\x00"), "zero bytes"},
			{pgxlock.Schema(strings.Repeat("s", 64)), "64 bytes"},
		} {
			_, err := pgxlock.ClaimTx(t.Context(), tx, "k", test.opt)
			wantClaimRefused(t, err, "claim", test.says)
		}
	})
	if calls != 0 || trips != 0 {
		t.Errorf("%d calls, %d round trips", calls, trips)
	}
	wantClaim(t, tx, true, "k")
	testkit.Commit(t, tx)
	_, err = pgxlock.ClaimTx(t.Context(), tx, "k")
	wantClaimRefused(t, err, "claim", "tx is closed")
	if !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("%v, want ErrTxClosed", err)
	}
}
