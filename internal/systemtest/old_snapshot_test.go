package systemtest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Nothing that was deleted or replaced since an open snapshot can be removed. docs/operations.md has the figures.
func TestOldSnapshotCostsAHotKeyABufferForEachAcquire(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const rounds = 1000
	db := testkit.Migrated(t)
	session := db.Connect(t)
	const (
		acquire = "select * from pgxlock_acquire_one('hot', 'h', 30000::bigint, null, null)"
		cold    = "select * from pgxlock_acquire_one('cold', 'h', 30000::bigint, null, null)"
		renew   = "select * from pgxlock_renew_batch('{kept}', '{h}', array[(select fencing_token from lock_leases where lock_name = 'kept')], '{30000}'::bigint[])"
		publish = "select * from pgxlock_publish_batch('{0}', '{hot}', '{null}', '{1}', '{null}', null, 'A', 60000, 1)"
	)
	undo := map[string]string{
		acquire: "select release_lock('hot', 'h')", cold: "select release_lock('cold', 'h')", renew: "select 1",
		publish: "select pgxlock_withdraw_batch('{0}', '{hot}', array[(select max(ticket) from pgxlock_waiters where name = 'hot')])",
	}
	run := func(sql string) {
		t.Helper()
		if _, err := session.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
	}
	// buffers is how many pages of 8 kB a call touches, once the session has its plans.
	buffers := func(call string) float64 {
		t.Helper()
		plan := planNode{}
		for range 3 {
			plan = planOn(t, session, call)
			run(undo[call])
		}
		return plan.Hits + plan.Reads
	}
	// cost is how many more pages a call touches for each that was made while the snapshot was open.
	cost := func(call string, of ...string) float64 {
		t.Helper()
		if len(of) == 0 {
			of = []string{call}
		}
		before := buffers(of[0])
		run(fmt.Sprintf("do $$ begin for i in 1..%d loop perform %s; perform %s; commit; end loop; end $$",
			rounds, strings.TrimPrefix(call, "select "), strings.TrimPrefix(undo[call], "select ")))
		return (buffers(of[0]) - before) / rounds
	}
	run("select acquire_lock('kept', 'h', 3600)")
	alone := map[string]float64{}
	for call := range undo {
		alone[call] = buffers(call)
	}

	snapshot := db.Connect(t)
	testkit.ExecOn(t, snapshot, "begin isolation level repeatable read")
	testkit.ExecOn(t, snapshot, "select 1")
	for call, most := range map[string]float64{acquire: 1.5, renew: 0.1, publish: 4} {
		n := cost(call)
		t.Logf("each earlier call costs a later one %.3f pages: %s", n, call)
		if n > most {
			t.Errorf("each earlier call costs a later one %.3f pages, more than %g: %s", n, most, call)
		}
	}
	if n := cost(acquire, cold); n > 0.1 {
		t.Errorf("each acquire of one key costs that of another %.3f pages", n)
	}

	testkit.ExecOn(t, snapshot, "commit")
	run("vacuum distributed_locks")
	run("vacuum pgxlock_waiters")
	for call, before := range alone {
		if n := buffers(call); n > before+20 {
			t.Errorf("after the snapshot a call touches %g pages, %g before it: %s", n, before, call)
		}
	}
}
