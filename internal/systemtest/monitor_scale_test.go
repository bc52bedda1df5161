package systemtest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What a look costs where there is much to see: each table is read once, and of a shared lease a row for each share.
func TestSoakLookReadsEachTableOnce(t *testing.T) {
	t.Parallel()
	leases := pgtest.Soak(t, 20_000, 100_000)
	const shares, advisory, waiters = 2000, 5000, 200
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_connections": "300", "max_locks_per_transaction": "128", "autovacuum": "off"}})
	url := server.URL("postgres")
	db := &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
	install(t, db, "public")
	db.Exec(t, fmt.Sprintf(`insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
			select 'order:' || i, 'host-' || i %% 50 || ':4711 ' || md5(i::text), now(), now() + interval '1 hour', '{}', i from generate_series(1, %d) i;
		insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
			select 'shared:' || i, '*shared', now(), now() + interval '1 hour', '{}', i from generate_series(1, %[2]d / 2) i;
		insert into distributed_lock_shares (lock_name, holder_id, fencing_token, acquired_at, expires_at, metadata)
			select 'shared:' || i, 'reader ' || r, i, now(), now() + interval '1 hour', '{}' from generate_series(1, %[2]d / 2) i, generate_series(1, 2) r;
		insert into pgxlock_waiters select 0, 'order:' || i, i, null, 'waiter', 1, now(), 'infinity' from generate_series(1, %[3]d) i;
		insert into pgxlock_names select i, 'not so', now() from generate_series(1, 1000) i;
		analyze`, leases, shares, waiters))
	holder := pgtest.Connect(t, url)
	testkit.ExecOn(t, holder, fmt.Sprintf("select count(pg_advisory_lock(i)) from generate_series(1, %d) i", advisory))
	ended := make(chan error, waiters)
	for i := range waiters {
		conn := pgtest.Connect(t, url)
		go func() {
			_, err := conn.PgConn().Exec(t.Context(), fmt.Sprintf("select pg_advisory_lock(%d)", i+1)).ReadAll()
			ended <- err
		}()
	}
	pgtest.Until(t, "they wait", func() bool {
		return testkit.Query[int](t, db, "select count(*) from pg_locks where locktype = 'advisory' and not granted") == waiters
	})

	monitor := testkit.NewMonitor(t, db, nil)
	began := time.Now()
	shot := testkit.Snapshot(t, monitor)
	t.Logf("%d holders and %d waiters in %s", len(shot.Holders), len(shot.Waiters), time.Since(began).Round(time.Millisecond))
	if n := len(shot.Holders); n != leases+shares+advisory {
		t.Errorf("%d holders", n)
	}
	if n := len(shot.Waiters); n != 2*waiters {
		t.Errorf("%d waiters", n)
	}

	// How often each is read, and how many of its pages.
	pages := testkit.Query[int64](t, db, "select sum(relpages) from pg_class where oid in ('distributed_locks'::regclass, 'distributed_lock_shares'::regclass)")
	for file, most := range map[string]struct {
		reads   map[string]float64
		buffers float64
	}{
		// In the order of names, so at most a page for each row, and a few of the index for each share.
		"monitor/leases":    {map[string]float64{"distributed_locks": 2 + shares, "distributed_lock_shares": 2}, float64(leases + 5*shares)},
		"monitor/advisory":  {map[string]float64{"pg_lock_status": 1}, 1000},
		"monitor/tickets":   {map[string]float64{"pgxlock_waiters": 1}, 100},
		"monitor/evictions": {map[string]float64{"pgxlock_evictions": 1}, 100},
		"monitor/names":     {map[string]float64{"pgxlock_names": 1}, 100},
	} {
		plan := explain(t, db, file)
		reads := make(map[string]float64)
		plan.each(func(n planNode) {
			reads[n.Relation+n.Function] += n.Loops
		})
		for what, n := range most.reads {
			if reads[what] < 1 || reads[what] > n {
				t.Errorf("%s reads %s %g times", file, what, reads[what])
			}
		}
		if n := plan.Hits + plan.Reads; n > most.buffers {
			t.Errorf("%s reads %g pages of %d", file, n, pages)
		}
	}
	testkit.ExecOn(t, holder, "select pg_advisory_unlock_all()")
	for range waiters {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// planNode is a part of a plan, as EXPLAIN says it.
type planNode struct {
	Relation string     `json:"Relation Name"`
	Function string     `json:"Function Name"`
	Loops    float64    `json:"Actual Loops"`
	Hits     float64    `json:"Shared Hit Blocks"`
	Reads    float64    `json:"Shared Read Blocks"`
	Plans    []planNode `json:"Plans"`
}

func (n planNode) each(f func(planNode)) {
	f(n)
	for _, child := range n.Plans {
		child.each(f)
	}
}

// explain runs a statement of sql/.
func explain(t *testing.T, db *pgtest.DB, file string) planNode {
	t.Helper()
	text, err := os.ReadFile("../../sql/" + file + ".sql")
	if err != nil {
		t.Fatal(err)
	}
	return planOn(t, db.Pool, string(text))
}

// A rowQuerier is a pool or a transaction.
type rowQuerier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// planOn runs a statement, and returns how.
func planOn(t *testing.T, on rowQuerier, text string) planNode {
	t.Helper()
	var plans []struct{ Plan planNode }
	var answer []byte
	if err := on.QueryRow(t.Context(), "explain (analyze, buffers, timing off, format json) "+text, pgx.QueryExecModeExec).Scan(&answer); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(answer, &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan
}
