package main

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func installed(t *testing.T, workers int) *pgxpool.Pool {
	t.Helper()
	pool, err := connect(t.Context(), pgtest.New(t).URL, workers)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := install(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	return pool
}

// reliable is a worker that does not crash.
var reliable = worker{mishap: func(pgx.Tx, int) error { return nil }}

// mishaps has each order crash its first workers, all of which have shipped it
// but not committed: one rolls back, the others' connections break.
type mishaps struct {
	mu  sync.Mutex
	had map[int]int
}

const mishapsOfAnOrder = 3

func (m *mishaps) befall(tx pgx.Tx, order int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.had[order] == mishapsOfAnOrder {
		return nil
	}
	m.had[order]++
	if m.had[order] == 1 {
		return errCrashed
	}
	return errors.Join(errCrashed, tx.Conn().PgConn().Conn().Close())
}

func TestEachOrderIsShippedOnceThoughDeliveredOftenAndWorkersCrash(t *testing.T) {
	t.Parallel()
	const orders, copies, workers = 20, 4, 6
	pool := installed(t, workers)
	m := mishaps{had: make(map[int]int)}
	done, err := work(t.Context(), pool, newBus(orders, copies), workers, m.befall)
	if err != nil {
		t.Fatal(err)
	}
	if done.shipped != orders || done.done != orders*(copies-1) || done.crashed != orders*mishapsOfAnOrder {
		t.Errorf("got %+v", done)
	}
	if err := check(t.Context(), pool, orders, t.Logf); err != nil {
		t.Error(err)
	}
	t.Logf("%+v", done)
}

func TestExampleRuns(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	if err := run(t.Context(), pgtest.New(t).URL, load{orders: 20, copies: 3, workers: 4}, t.Logf); err != nil {
		t.Error(err)
	}
}

func TestOrderThatAnotherWorkerIsOnIsSkipped(t *testing.T) {
	t.Parallel()
	pool := installed(t, 2)
	var shippedMeanwhile error
	slow := worker{mishap: func(pgx.Tx, int) error {
		ctx, cancel := context.WithTimeout(t.Context(), pgtest.Patience) // were it to wait, it would be for ever
		defer cancel()
		_, shippedMeanwhile = reliable.ship(ctx, pool, 42)
		return errCrashed
	}}
	if first, err := slow.ship(t.Context(), pool, 42); first || !errors.Is(err, errCrashed) {
		t.Fatalf("got %t, %v", first, err)
	}
	if !errors.Is(shippedMeanwhile, pgxlock.ErrNotAcquired) {
		t.Errorf("while another worker was on it: %v, want ErrNotAcquired", shippedMeanwhile)
	}

	// That one has crashed: the order is free again, once.
	for _, want := range []bool{true, false} {
		if first, err := reliable.ship(t.Context(), pool, 42); first != want || err != nil {
			t.Errorf("got %t, %v; want %t", first, err, want)
		}
	}
}

func TestOrderIsShippedAgainOnceItsClaimIsPurged(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	pool := installed(t, 2)
	ship := func(want bool) {
		t.Helper()
		if first, err := reliable.ship(t.Context(), pool, 42); first != want || err != nil {
			t.Errorf("got %t, %v; want %t", first, err, want)
		}
	}
	ship(true)
	if n, err := forget(t.Context(), pool); n != 0 || err != nil {
		t.Errorf("%d claims were forgotten too early, error %v", n, err)
	}
	ship(false)
	if n, err := pgxlock.PurgeClaims(t.Context(), pool, 0); n != 1 || err != nil {
		t.Errorf("%d claims were purged, error %v; want 1", n, err)
	}
	ship(true)
}

func TestEachShipmentIsSettledOnceThoughSeveralNodesSettle(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const orders, nodes = 10, 4
	pool := installed(t, 2*nodes)
	for order := range orders {
		if _, err := reliable.ship(t.Context(), pool, order); err != nil {
			t.Fatal(err)
		}
	}
	settled := make([]int64, nodes)
	var night sync.WaitGroup
	for node := range nodes {
		locks := newLocker(t, pool)
		night.Go(func() {
			var err error
			if settled[node], err = settle(t.Context(), locks, pool); err != nil {
				t.Error(err)
			}
		})
	}
	night.Wait()
	var sum int64
	for _, n := range settled {
		sum += n
	}
	var settlements, shipments int
	err := pool.QueryRow(t.Context(), "SELECT count(DISTINCT settlement), count(settlement) FROM shipments").Scan(&settlements, &shipments)
	if err != nil {
		t.Fatal(err)
	}
	if sum != orders || settlements != 1 || shipments != orders {
		t.Errorf("the nodes settled %v; %d shipments are on %d settlements", settled, shipments, settlements)
	}
}

func TestNodeDoesNotSettleWhileAnotherIsOnIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	pool := installed(t, 2)
	if _, err := reliable.ship(t.Context(), pool, 1); err != nil {
		t.Fatal(err)
	}
	lock, err := newLocker(t, pool).Acquire(t.Context(), "orders:settle")
	if err != nil {
		t.Fatal(err)
	}
	locks := newLocker(t, pool)
	if n, err := settle(t.Context(), locks, pool); n != 0 || err != nil {
		t.Errorf("%d shipments were settled beside another node, error %v", n, err)
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n, err := settle(t.Context(), locks, pool); n != 1 || err != nil {
		t.Errorf("%d shipments were settled, error %v; want 1", n, err)
	}
}

func newLocker(t *testing.T, pool *pgxpool.Pool) *pgxlock.Locker {
	t.Helper()
	locks, err := pgxlock.NewLeaseLocker(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { locks.Close(context.Background()) })
	return locks
}
