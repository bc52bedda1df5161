package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// withTokens returns a Locker whose advisory locks have fencing tokens.
func withTokens(t *testing.T, db *pgtest.DB, owner string) *pgxlock.Locker {
	t.Helper()
	return testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true, Owner: owner})
}

func TestFenceOnASessionLockKeepsTheNextHolderOutUntilItsTransactionEnds(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks, others := withTokens(t, db, "first"), withTokens(t, db, "second")
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	if testing.Short() {
		levels = levels[:1]
	}
	for name, end := range map[string]func(*pgxlock.Lock){
		"released": func(lock *pgxlock.Lock) {
			if err := lock.Release(t.Context()); err != nil {
				t.Error(err)
			}
		},
		"its session ended": func(lock *pgxlock.Lock) {
			testkit.Terminate(t, db, "first")
			<-lock.Lost()
		},
	} {
		for _, mode := range []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared} {
			for _, level := range levels {
				key := string(level) + name + mode.String()
				lock := testkit.Acquire(t, locks, key, mode)
				tx := testkit.Begin(t, db, pgx.TxOptions{IsoLevel: level})
				if err := lock.Fence(t.Context(), tx); err != nil {
					t.Fatalf("%s: %v", key, err)
				}
				end(lock)
				if _, err := others.TryAcquire(t.Context(), key); !errors.Is(err, pgxlock.ErrNotAcquired) {
					t.Errorf("%s, and its transaction is open: %v", key, err)
				}
				if err := tx.Commit(t.Context()); err != nil {
					t.Errorf("%s: %v", key, err)
				}
				next := testkit.Acquire(t, others, key)
				if next.Token() <= lock.Token() {
					t.Errorf("%s: token %d after %d", key, next.Token(), lock.Token())
				}
				tx = testkit.Begin(t, db, pgx.TxOptions{IsoLevel: level})
				if err := lock.Fence(t.Context(), tx); !errors.Is(err, pgxlock.ErrLost) && !errors.Is(err, pgxlock.ErrReleased) {
					t.Errorf("%s: a zombie's fence: %v", key, err)
				}
				if err := tx.Rollback(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// A zombie does not know yet: the server must tell it.
func TestServerRefusesTheFenceOfASessionLockThatIsAnothers(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks, others := withTokens(t, db, "first"), withTokens(t, db, "second")
	lock := testkit.Acquire(t, locks, "k")
	const fence = "select assert_advisory_lock_held(1, $1, $2, $3)"
	session := testkit.Query[int64](t, db, "select session from pgxlock_advisory_locks")
	if token := testkit.Query[int64](t, db, fence, pgxlock.AdvisoryID("k"), session, lock.Token()); token != lock.Token() {
		t.Errorf("the holder's fence: %d", token)
	}
	testkit.Terminate(t, db, "first")
	next := testkit.Acquire(t, others, "k")
	_, err := db.Pool.Exec(t.Context(), fence, pgxlock.AdvisoryID("k"), session, lock.Token())
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "LK001" {
		t.Errorf("the zombie's fence: %v", err)
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if rows := testkit.Query[int](t, db, "select count(*) from pgxlock_advisory_locks"); rows != 0 {
		t.Errorf("%d rows are left", rows)
	}
}

func TestWorkOfDoTxIsFencedUnderASessionLock(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "create table written (token bigint)")
	locks := withTokens(t, db, "first")
	for _, meanwhile := range []func(*pgxlock.Lock){
		func(*pgxlock.Lock) {},
		func(lock *pgxlock.Lock) { // who has fenced may commit: nobody is granted the lock before
			testkit.Terminate(t, db, "first")
			<-lock.Lost()
		},
	} {
		err := locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
			meanwhile(lock)
			_, err := tx.Exec(context.WithoutCancel(ctx), "insert into written values ($1)", lock.Token())
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
	if n := testkit.Query[int](t, db, "select count(distinct token) from written where token > 0"); n != 2 {
		t.Errorf("%d tokens were written", n)
	}
}

func TestTokensOfSessionLocksNeedTheMigrations(t *testing.T) {
	t.Parallel()
	empty := pgtest.New(t)
	_, err := withTokens(t, empty, "first").TryAcquire(t.Context(), "k")
	if !errors.Is(err, pgxlock.ErrSchema) {
		t.Errorf("without tables: %v", err)
	}
	_, err = testkit.NewAdvisory(t, empty, &pgxlock.AdvisoryConfig{Schema: "locks"}).TryAcquire(t.Context(), "k")
	if !errors.Is(err, pgxlock.ErrSchema) {
		t.Errorf("a schema that was named and is not there: %v", err)
	}
	if _, err := pgxlock.NewAdvisoryLocker(empty.Pool, &pgxlock.AdvisoryConfig{Schema: "a\x00"}); err == nil || !strings.Contains(err.Error(), "AdvisoryConfig.Schema") {
		t.Errorf("a schema that cannot be: %v", err)
	}
}

func TestAdvisoryTokensAreNeverZeroUnderContention(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	locks := withTokens(t, testkit.Migrated(t), "contended")
	var callers sync.WaitGroup
	var mu sync.Mutex
	grants, zero := 0, 0
	last := make(map[string]int64)
	for range 8 {
		callers.Go(func() {
			for range 100 {
				key := fmt.Sprint("k", rand.IntN(12))
				lock, err := locks.Acquire(t.Context(), key)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				grants++
				if lock.Token() == 0 {
					zero++
				} else if lock.Token() <= last[key] {
					t.Errorf("token %d of %s after %d", lock.Token(), key, last[key])
				}
				last[key] = lock.Token()
				mu.Unlock()
				if err := lock.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
	if zero > 0 {
		t.Errorf("%d of %d locks have token 0", zero, grants)
	}
}
