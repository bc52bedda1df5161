// This file is about a rolling deployment: for a while programs of one version
// work on the schema of another, older or newer.

package pgxlock_test

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
	"github.com/pgxlock/pgxlock/migrations"
)

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
	future, err := os.ReadFile("testdata/future.sql")
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

// The versions that brought what claims, Lockers, Limiters and runs need.
const (
	claimsNeed = 2
	leasesNeed = 3
	limitsNeed = 7
	runsNeed   = 7
)

func TestThisProgramWorksOnTheNextSchemaAndSaysWhichItNeeds(t *testing.T) {
	t.Parallel()
	files := schemas(t)
	for version := 1; version <= len(files); version++ {
		t.Run(fmt.Sprint("version ", version), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			for _, file := range files[:version] {
				db.Exec(t, file)
			}
			if got := query[int](t, db, "select pgxlock_schema_version()"); got != version {
				t.Fatalf("version %d, want %d", got, version)
			}
			locks := newLocker(t, db, nil)
			if version >= leasesNeed {
				useLock(t, locks, db.Pool, "k")
				useEverythingOfLeases(t, locks, db)
			} else {
				_, err := locks.Acquire(t.Context(), "k")
				wantSchemaError(t, err, fmt.Sprintf("has version %d, version %d is needed", version, leasesNeed))
			}
			useLocksInTransactions(t, db)
			if ok, err := newLimiter(t, db, 1, 1).Allow(t.Context(), "k"); version >= limitsNeed && (!ok || err != nil) {
				t.Errorf("a limit: %t, %v", ok, err)
			} else if version < limitsNeed {
				wantSchemaError(t, err, fmt.Sprintf("has version %d, version %d is needed", version, limitsNeed))
			}

			tx := begin(t, db, pgx.TxOptions{})
			if version >= claimsNeed {
				wantClaim(t, tx, true, "k", pgxlock.MaxWait(time.Minute), pgxlock.Retention(time.Hour))
				wantClaim(t, tx, true, "forever")
				commit(t, tx)
				wantClaimed(t, db, false, "k") // again
				if n, err := pgxlock.PurgeClaims(t.Context(), db.Pool, 0); n != 1 || err != nil {
					t.Errorf("%d claims purged: %v", n, err)
				}
				return
			}
			_, err := pgxlock.ClaimTx(t.Context(), tx, "k")
			wantSchemaError(t, err, fmt.Sprint("claims need version ", claimsNeed))
			_, err = pgxlock.PurgeClaims(t.Context(), db.Pool, 0)
			wantSchemaError(t, err, fmt.Sprint("claims need version ", claimsNeed))
		})
	}
}

// useEverythingOfLeases is what useLock leaves out.
func useEverythingOfLeases(t *testing.T, locks *pgxlock.Locker, db *pgtest.DB) {
	t.Helper()
	held := acquire(t, locks, "held", pgxlock.Metadata("pod-7"))
	holders, err := locks.Holders(t.Context(), "held")
	if err != nil || len(holders) != 1 || holders[0].Owner != held.Holder() || holders[0].Token != held.Token() || holders[0].Metadata != "pod-7" {
		t.Errorf("Holders: %+v, %v", holders, err)
	}
	if _, err := newLocker(t, db, nil).TryAcquire(t.Context(), "held"); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("granted twice: %v", err)
	}
	if query[bool](t, db, "select acquire_lock('held', 'psql')") {
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
	if left := rows(t, db); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func useLocksInTransactions(t *testing.T, db *pgtest.DB) {
	t.Helper()
	tx, other := begin(t, db, pgx.TxOptions{}), begin(t, db, pgx.TxOptions{})
	for _, lock := range []func() error{
		func() error { return pgxlock.LockTx(t.Context(), tx, "a", pgxlock.MaxWait(time.Minute)) },
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
	commit(t, tx)
	rollback(t, other)
}

// From the first version that this program works on to the one after ours, while
// its calls go on.
func TestUpgradesUnderTrafficFailNoCallAndGrantNothingTwice(t *testing.T) {
	t.Parallel()
	files := schemas(t)
	db := pgtest.New(t)
	for _, file := range files[:leasesNeed] {
		db.Exec(t, file)
	}
	var (
		holding [2]atomic.Int32
		rounds  [4]atomic.Int64 // of each worker
		stop    = make(chan struct{})
		wg      sync.WaitGroup
	)
	for worker := range rounds {
		locks := newLocker(t, db, nil)
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
	more := func() { // waits until each worker was through twice: once with all its calls here
		t.Helper()
		for worker := range rounds {
			for from := rounds[worker].Load(); rounds[worker].Load() < from+2 && !t.Failed(); {
				query[int](t, db, "select 1")
			}
		}
	}
	more()
	for _, file := range files[leasesNeed:] {
		upgrade(t, db, file)
		more()
	}
	close(stop)
	wg.Wait()
	if left := rows(t, db); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
