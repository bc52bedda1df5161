package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
)

// Rolling deployments: the schema is upgraded first, so that for a while programs of one
// version work on the schema of the next.

// schemas are the versions of the schema that there are, in order, as the files
// that bring them; the last one is not ours yet.
func schemas(t *testing.T) (files []string) {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.up.sql") // sorted
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		text, err := migrations.FS.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, string(text))
	}
	future, err := os.ReadFile("../../testdata/future.sql")
	if err != nil {
		t.Fatal(err)
	}
	return append(files, string(future))
}

// upgrade brings the next version, and comes again when a lock on a table was
// not to be had in time, as operators are told to.
func upgrade(t *testing.T, db *pgtest.DB, file string) {
	t.Helper()
	for {
		_, err := db.Pool.Exec(t.Context(), file)
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "55P03" {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
}

// onVersion returns a database with that version of the schema.
func onVersion(t *testing.T, version int) *pgtest.DB {
	t.Helper()
	db := pgtest.New(t)
	for _, file := range schemas(t)[:version] {
		db.Exec(t, file)
	}
	if got := testkit.Query[int](t, db, "select pgxlock_version()"); got != version {
		t.Fatalf("version %d, want %d", got, version)
	}
	return db
}

// newest is the version of the schema that this program needs.
func newest(t *testing.T) int {
	t.Helper()
	return len(schemas(t)) - 1
}

func TestOlderSchemaIsRefusedUntilItIsUpgraded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	version := newest(t)
	db := onVersion(t, version-1)
	locks, limits, runs, mon := testkit.NewLocker(t, db, nil), newLimiter(t, db, 1, 9), runnerOn(t, db, time.Hour, nil), testkit.NewMonitor(t, db, nil)
	tokens, named := withTokens(t, db, "tokens"), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Schema: "public"})
	plain := testkit.NewAdvisory(t, db, nil)
	var work job
	calls := map[string]func() error{
		"a lease": func() error { return acquireAndRelease(t.Context(), locks.Acquire, "k") },
		"a shared lease": func() error {
			return acquireAndRelease[pgxlock.AcquireOption](t.Context(), locks.Acquire, "k", pgxlock.Shared)
		},
		"a permit":                     func() error { return acquireAndRelease(t.Context(), testkit.Semaphore(t, locks, 2).Acquire, "k") },
		"Holders":                      func() error { return second(locks.Holders(t.Context(), "k")) },
		"AskToStepDown":                func() error { return locks.AskToStepDown(t.Context(), "k") },
		"AskToStepDown, advisory":      func() error { return plain.AskToStepDown(t.Context(), "k") },
		"a limit":                      func() error { return second(limits.Allow(t.Context(), "k")) },
		"a run":                        func() error { return second(runs.Do(t.Context(), "k", work.run)) },
		"an advisory lock with Tokens": func() error { return acquireAndRelease(t.Context(), tokens.Acquire, "k") },
		"an advisory lock with Schema": func() error { return acquireAndRelease(t.Context(), named.Acquire, "k") },
		"Monitor.Holders":              func() error { return second(mon.Holders(t.Context(), monitor.Filter{})) },
		"Monitor.Reap":                 func() error { return second(mon.Reap(t.Context(), 0)) },
	}
	for call, do := range calls {
		t.Run(call, func(t *testing.T) {
			for range 2 { // on a first connection, and on whatever is there then
				wantSchemaError(t, do(), `schema "public"`, fmt.Sprintf("has version %d, version %d is needed", version-1, version))
			}
		})
	}
	testkit.Release(t, testkit.Acquire(t, plain, "k"))
	useLocksInTransactions(t, db)

	upgrade(t, db, schemas(t)[version-1])
	for call, do := range calls {
		if err := do(); err != nil {
			t.Errorf("%s, after the upgrade: %v", call, err)
		}
	}
}

func TestAdvisoryLockerWaitsWithoutTheNewestSchema(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := onVersion(t, newest(t)-1)
	var busy atomic.Int64
	first, second := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Observe: countBusy(&busy)})
	lock := testkit.Acquire(t, first, "k")
	granted := testkit.Waits(t, second, "k")
	pgtest.Until(t, "it waits", func() bool { return busy.Load() > 0 })
	if len(granted) > 0 {
		t.Fatal("granted twice")
	}
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_waiters"); n > 0 {
		t.Errorf("%d tickets in a schema that it must not use", n)
	}
	testkit.Release(t, lock)
	testkit.Release(t, <-granted)
}

func TestThisProgramWorksOnTheNextSchema(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := onVersion(t, newest(t)+1)
	locks := testkit.NewLocker(t, db, nil)
	useLock(t, locks, db.Pool, "k")
	useEverythingOfLeases(t, locks, db)
	useLock(t, withTokens(t, db, "tokens"), db.Pool, "k")
	useLocksInTransactions(t, db)
	if ok, err := newLimiter(t, db, 1, 1).Allow(t.Context(), "k"); !ok || err != nil {
		t.Errorf("a limit: %t, %v", ok, err)
	}
	wantDo(t, runnerOn(t, db, time.Hour, nil), "k", &job{}, true)
	if err := locks.AskToStepDown(t.Context(), "k"); err != nil {
		t.Error(err)
	}

	tx := testkit.Begin(t, db, pgx.TxOptions{})
	wantClaim(t, tx, true, "k", testkit.LongWait, pgxlock.Retention(time.Hour))
	wantClaim(t, tx, true, "forever")
	testkit.Commit(t, tx)
	wantClaimed(t, db, false, "k") // again
	if n, err := pgxlock.PurgeClaims(t.Context(), db.Pool, 0); n != 1 || err != nil {
		t.Errorf("%d claims purged: %v", n, err)
	}
}

// useEverythingOfLeases is what useLock leaves out.
func useEverythingOfLeases(t *testing.T, locks *pgxlock.Locker, db *pgtest.DB) {
	t.Helper()
	held := testkit.Acquire(t, locks, "held", pgxlock.Metadata("pod-7"))
	holders, err := locks.Holders(t.Context(), "held")
	if err != nil || len(holders) != 1 || holders[0].ID != held.Holder() || holders[0].Token != held.Token() || holders[0].Metadata != "pod-7" {
		t.Errorf("Holders: %+v, %v", holders, err)
	}
	if _, err := testkit.NewLocker(t, db, nil).TryAcquire(t.Context(), "held"); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("granted twice: %v", err)
	}
	if testkit.Query[bool](t, db, "select acquire_lock('held', 'psql')") {
		t.Error("granted twice, by SQL")
	}
	all, err := locks.AcquireAll(t.Context(), []string{"a", "b"})
	if err != nil {
		t.Fatal(err)
	}
	for _, lock := range append(all, held) {
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	err = locks.DoTx(t.Context(), db.Pool, "k", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error {
		_, err := tx.Exec(ctx, "select 1")
		return err
	})
	if err != nil {
		t.Errorf("DoTx: %v", err)
	}
	if left := testkit.Rows(t, db); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func useLocksInTransactions(t *testing.T, db *pgtest.DB) {
	t.Helper()
	tx, other := testkit.Begin(t, db, pgx.TxOptions{}), testkit.Begin(t, db, pgx.TxOptions{})
	for _, lock := range []func() error{
		func() error { return pgxlock.LockTx(t.Context(), tx, "a", testkit.LongWait) },
		func() error { return pgxlock.LockAllTx(t.Context(), tx, []string{"b", "c"}) },
	} {
		if err := lock(); err != nil {
			t.Errorf("LockTx: %v", err)
		}
	}
	for _, key := range []string{"a", "b", "c"} {
		if err := pgxlock.LockTx(t.Context(), other, key, pgxlock.NoWait); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%s was granted twice: %v", key, err)
		}
	}
	testkit.Commit(t, tx)
	testkit.Rollback(t, other)
}

// The next version comes while calls of this program go on. After that other programs come
// as well, which find the new version at their start; all of them lock together.
func TestUpgradesUnderTrafficFailNoCallAndGrantNothingTwice(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := onVersion(t, newest(t))
	var (
		holding [2]atomic.Int32
		rounds  [8]atomic.Int64 // of each worker
		stop    = make(chan struct{})
		wg      sync.WaitGroup
	)
	start := func(worker int) {
		locks := testkit.NewLocker(t, db, nil)
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				n := i % len(holding)
				err := locks.Do(t.Context(), fmt.Sprint("lock ", n), func(ctx context.Context, lock *pgxlock.Lock) error {
					if now := holding[n].Add(1); now != 1 {
						t.Errorf("lock %d has %d holders", n, now)
					}
					defer holding[n].Add(-1)
					return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
						if err := lock.Fence(ctx, tx); err != nil {
							return err
						}
						if err := pgxlock.LockTx(ctx, tx, fmt.Sprint("worker ", worker)); err != nil {
							return err
						}
						first, err := pgxlock.ClaimTx(ctx, tx, fmt.Sprint(worker, " ", i))
						if err == nil && !first {
							err = errors.New("claimed twice")
						}
						return err
					})
				})
				if err != nil {
					t.Errorf("worker %d: %v", worker, err)
					return
				}
				rounds[worker].Add(1)
			}
		})
	}
	more := func(workers int) { // waits until each of them was through twice: once with all its calls here
		t.Helper()
		for worker := range workers {
			for from := rounds[worker].Load(); rounds[worker].Load() < from+2 && !t.Failed(); {
				testkit.Query[int](t, db, "select 1")
			}
		}
	}
	const before = len(rounds) / 2
	for worker := range before {
		start(worker)
	}
	more(before)
	upgrade(t, db, schemas(t)[newest(t)])
	more(before)
	for worker := before; worker < len(rounds); worker++ {
		start(worker)
	}
	more(len(rounds))
	close(stop)
	wg.Wait()
	if left := testkit.Rows(t, db); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
