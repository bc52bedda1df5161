package main

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// opened returns a pool for as many workers, on accounts that hold 100 each.
func opened(t *testing.T, accounts, workers int) *pgxpool.Pool {
	t.Helper()
	pool, err := connect(t.Context(), pgtest.New(t).URL, workers)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := openAccounts(t.Context(), pool, accounts, 100); err != nil {
		t.Fatal(err)
	}
	return pool
}

func wantBooks(t *testing.T, pool *pgxpool.Pool, want books) {
	t.Helper()
	got, err := readBooks(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("the books say %+v, want %+v", got, want)
	}
}

func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), inReadCommitted)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback(context.Background()) }) // the pool waits for it
	return tx
}

func TestBooksAreRightAfterManyTransfersAtATime(t *testing.T) {
	t.Parallel()
	l := load{accounts: 3, opening: 100, workers: 8, transfers: 50, patience: 2 * time.Millisecond}
	if err := run(t.Context(), pgtest.New(t).URL, l, t.Logf); err != nil {
		t.Error(err)
	}
}

// Everybody wants all that there is.
const (
	rivals = 8
	all    = 100
)

func TestOfManyWhoWantAllTheMoneyOneGetsIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	pool := opened(t, 2, rivals)
	errs := make([]error, rivals)
	var work sync.WaitGroup
	for i := range errs {
		work.Go(func() { errs[i] = transfer(t.Context(), pool, 0, 1, all) })
	}
	work.Wait()
	moved := 0
	for _, err := range errs {
		if err == nil {
			moved++
		} else if !errors.Is(err, errNotEnough) {
			t.Error(err)
		}
	}
	if moved != 1 {
		t.Errorf("%d transfers were made, want 1", moved)
	}
	wantBooks(t, pool, books{total: 200, lowest: 0, made: 1})
}

// The same with the lock left out: all look before any of them commits, and the
// account is overdrawn. This is what the lock is for.
func TestWithoutTheLockAllOfThemGetIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	pool := opened(t, 2, rivals)
	var moved, work sync.WaitGroup
	moved.Add(rivals)
	for range rivals {
		work.Go(func() {
			err := pgx.BeginTxFunc(t.Context(), pool, inReadCommitted, func(tx pgx.Tx) error {
				defer moved.Wait()
				defer moved.Done()
				return move(t.Context(), tx, 0, 1, all)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	wantBooks(t, pool, books{total: 200, lowest: all - rivals*all, made: rivals})
}

func TestTransfersInOppositeDirectionsDoNotDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const each = 50
	pool := opened(t, 2, 4)
	var work sync.WaitGroup
	for i := range 4 {
		work.Go(func() {
			from, to := i%2, 1-i%2
			for range each {
				if err := transfer(t.Context(), pool, from, to, 1); err != nil && !errors.Is(err, errNotEnough) {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	got, err := readBooks(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if got.total != 200 || got.lowest < 0 || got.made < 2*each {
		t.Errorf("the books say %+v", got)
	}
}

func TestTransferFromABusyAccountIsPostponedInTheSameTransaction(t *testing.T) {
	t.Parallel()
	pool := opened(t, 3, 2)
	busy := begin(t, pool)
	if err := lockAccounts(t.Context(), busy, 0, 1); err != nil {
		t.Fatal(err)
	}
	if moved, err := transferOrPostpone(t.Context(), pool, 1, 2, 10, time.Millisecond); moved || err != nil {
		t.Fatalf("got %t, %v; want it postponed", moved, err)
	}
	wantBooks(t, pool, books{total: 300, lowest: 100, postponed: 1})

	// The account that was free was not left locked, nor is any other now.
	if err := busy.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if moved, err := transferOrPostpone(t.Context(), pool, 1, 2, 10, time.Millisecond); !moved || err != nil {
		t.Fatalf("got %t, %v; want it made", moved, err)
	}
	wantBooks(t, pool, books{total: 300, lowest: 90, made: 1, postponed: 1})
}

func TestTransactionGoesOnAfterABusyAccount(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	pool := opened(t, 2, 2)
	busy, tx := begin(t, pool), begin(t, pool)
	if err := lockAccounts(t.Context(), busy, 0, 1); err != nil {
		t.Fatal(err)
	}
	for _, patience := range []pgxlock.MaxWait{pgxlock.NoWait, pgxlock.MaxWait(time.Millisecond)} {
		if err := lockAccounts(t.Context(), tx, 0, 1, patience); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Fatalf("%v: got %v, want ErrNotAcquired", patience, err)
		}
	}
	if err := busy.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := lockAccounts(t.Context(), tx, 0, 1); err != nil {
		t.Fatal(err)
	}
	if err := move(t.Context(), tx, 0, 1, 10); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantBooks(t, pool, books{total: 200, lowest: 90, made: 1})
}
