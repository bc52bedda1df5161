package systemtest_test

import (
	"context"
	"encoding/json"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
)

// A countingConn counts the bytes that arrive.
type countingConn struct {
	net.Conn
	received *atomic.Int64
}

func (c countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.received.Add(int64(n))
	return n, err
}

// countingMonitor returns a Monitor, and a function that returns how many bytes it has received since
// the last call.
func countingMonitor(t *testing.T, db *pgtest.DB) (*monitor.Monitor, func() int64) {
	t.Helper()
	received := new(atomic.Int64)
	pool := db.NewPool(t, func(cfg *pgxpool.Config) {
		dial := cfg.ConnConfig.DialFunc
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return countingConn{conn, received}, nil
		}
	})
	mon, err := monitor.New(pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	return mon, func() int64 { return received.Swap(0) }
}

// What a role that may write the tables, or call the functions, stores is more than a snapshot reads.
func TestSnapshotCutsLongTextsOnTheServer(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon, received := countingMonitor(t, db)
	testkit.Snapshot(t, mon)
	received()
	db.Exec(t, `insert into pgxlock_waiters select 0, 'k' || i, i, null, repeat('x', 10000000), 1, now(), 'infinity', null, array[repeat('y', 10000000)] from generate_series(1, 4) i;
		insert into pgxlock_waiters select 0, repeat('z', 10000), 5, null, 'me', 1, now(), 'infinity';
		insert into pgxlock_names values (1, repeat('z', 10000000), now());
		select count(acquire_lock('m' || i, 'h', 3600, to_jsonb(repeat('x', 65000)))) from generate_series(1, 1100) i;
		select acquire_lock('short', 'h', 3600, '"pod-7"')`)
	shot := testkit.Snapshot(t, mon)
	if n := received(); n > 2<<20 {
		t.Errorf("a snapshot receives %d bytes", n)
	}
	if len(shot.Waiters) != 4 || len(shot.Holders) != 1101 || len(shot.Missing) != 0 {
		t.Fatalf("%d waiters, %d holders, missing %q", len(shot.Waiters), len(shot.Holders), shot.Missing)
	}
	for _, w := range shot.Waiters {
		if len(w.Owner) != 255 || len(w.Holds) != 0 {
			t.Errorf("a waiter whose owner has %d bytes, with %d holds", len(w.Owner), len(w.Holds))
		}
	}
	cut, left := 0, 0
	for _, h := range shot.Holders {
		switch h.Metadata {
		case strings.Repeat("x", 1000):
			cut++
		case "...":
			left++
		case "pod-7":
		default:
			t.Errorf("%s has metadata %.20q of %d bytes", h.Key, h.Metadata, len(h.Metadata))
		}
	}
	if cut != 1000 || left != 100 {
		t.Errorf("%d texts are cut, %d are left out", cut, left)
	}
	locks := testkit.NewLocker(t, db, nil)
	if holders, err := locks.Holders(t.Context(), "m7"); err != nil || len(holders) != 1 || len(holders[0].Metadata) != 65000 {
		t.Errorf("by key: %d holders, %v", len(holders), err)
	}
}

func TestSnapshotSaysWhatItLeavesOut(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	mon, received := countingMonitor(t, db)
	leases := func(n int, text string) {
		t.Helper()
		db.Exec(t, "truncate distributed_locks")
		db.Exec(t, `insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
			select 'k' || i, 'h' || `+text+`, now(), now() + interval '1 hour', '{}', i from generate_series(1, $1::int) i`, n)
		received()
	}
	check := func(what, missing string) {
		t.Helper()
		shot := testkit.Snapshot(t, mon)
		if n := received(); n > 48<<20 {
			t.Errorf("%s: a snapshot receives %d bytes", what, n)
		}
		if len(shot.Missing) != 1 || !strings.HasPrefix(shot.Missing[0], missing) {
			t.Errorf("%s: missing %q", what, shot.Missing)
		}
	}
	leases(200_000, "''")
	if shot := testkit.Snapshot(t, mon); len(shot.Holders) != 200_000 || len(shot.Missing) != 0 {
		t.Errorf("200,000 leases: %d holders, missing %q", len(shot.Holders), shot.Missing)
	}
	leases(200_001, "''")
	check("200,001 leases", "leases: ")
	if holders, err := mon.Holders(t.Context(), monitor.Filter{}); err == nil || len(holders) != 200_000 {
		t.Errorf("%d holders, %v", len(holders), err)
	}
	if holders, err := mon.Holders(t.Context(), monitor.Filter{Key: "k200001"}); err != nil || len(holders) != 1 {
		t.Errorf("by key: %d holders, %v", len(holders), err)
	}
	leases(180_000, "repeat('x', 254)")
	check("leases of 46 MB", "leases: ")
	db.Exec(t, "truncate distributed_locks")
	db.Exec(t, "insert into pgxlock_waiters select 0, 'k' || i, i, null, repeat('x', 255), 1, now(), 'infinity' from generate_series(1, 180000) i")
	check("tickets of 46 MB", "the queues of waiters: ")
	if waiters, err := mon.Waiters(t.Context(), monitor.Filter{Key: "k180000"}); err != nil || len(waiters) != 1 {
		t.Errorf("by key: %d waiters, %v", len(waiters), err)
	}
	db.Exec(t, "truncate pgxlock_waiters; insert into pgxlock_names select i, 'n', now() from generate_series(1, 20001) i")
	check("20,001 names", "names behind the numbers of advisory locks: ")
}

// A role that may write the tables can also write what no function would.
func TestOddRowHidesNothingFromAMonitor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	mon, err := monitor.New(db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	db.Exec(t, `insert into pgxlock_waiters select 0, 'k', i, null, 'me', 1, since, now() + '1 hour', null, array[null, 'a']
			from unnest(array['infinity', '-infinity', '4000-01-01 BC', '12000-01-01', '2026-01-01']::timestamptz[]) with ordinality s (since, i);
		insert into distributed_locks (lock_name, holder_id, fencing_token, acquired_at, expires_at)
			select 'odd' || i, 'me', 1000 + i, t, t from unnest(array['infinity', '-infinity', '12000-01-01']::timestamptz[]) with ordinality x (t, i)`)
	shot := testkit.Snapshot(t, mon)
	if len(shot.Waiters) != 5 || len(shot.Holders) != 3 { // a lease that expired at -infinity was released
		t.Errorf("%d waiters and %d holders, want 5 and 3", len(shot.Waiters), len(shot.Holders))
	}
	if _, err := json.Marshal(shot); err != nil {
		t.Error(err)
	}
	if n := testkit.Query[int](t, db, "select count(waiting_for) from lock_waiters"); n != 3 {
		t.Errorf("%d waiters in the view have a time, want 3", n)
	}
	testkit.Release(t, lock)

	db.Exec(t, `insert into pgxlock_runs (run_key, slot, state, attempt, holder, started_at, finished_at, error, keep_until, period)
			select 'k', t, 'running', i, 'me', t, t, repeat('x', 100000), 'infinity', '178000000 years'
			from unnest(array['infinity', '-infinity', '12000-01-01', '4000-01-01 BC']::timestamptz[]) with ordinality x (t, i);
		insert into pgxlock_runs (run_key, slot, state, attempt, holder, started_at, finished_at, error, keep_until)
			values ('k', now(), 'running', 1, repeat('x', 100000), 'infinity', '-infinity', repeat('x', 100000), 'infinity')`)
	runs, err := once.List(t.Context(), db.Pool, &once.ListConfig{Limit: 1})
	if err != nil || len(runs) != 1 || len(runs[0].Holder) > 1000 || len(runs[0].Error) > 10000 || runs[0].Started.IsZero() || !runs[0].Finished.IsZero() {
		t.Errorf("runs: %v, %v", len(runs), err)
	}
}
