package sqltest_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
	statements "github.com/pgxlock/pgxlock/sql"
)

// The planner knows the size of the table from the last vacuum, which may have
// come by when nothing was locked. Each lease of a batch must be looked up by its
// name all the same: to read the whole table for each would make the cost of a
// batch its size times the table's.
func TestBatchesLookUpEachLeaseByItsName(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := installed.New(t)
	db.Exec(t, "select acquire_lock('k' || i, 'A'), release_lock('k' || i, 'A') from generate_series(1, 100) i")
	db.Exec(t, "vacuum analyze distributed_locks")
	db.Exec(t, "select acquire_lock('k' || i, 'A') from generate_series(1, 300) i")

	var tokens []int64
	if err := db.Pool.QueryRow(t.Context(), "select array_agg(fencing_token) from distributed_locks where lock_name in ('k1', 'k2')").Scan(&tokens); err != nil {
		t.Fatal(err)
	}
	for _, call := range []string{
		fmt.Sprintf("pgxlock_renew_batch('{k1,k2}', '{A,A}', '{%d,%d}', '{60000,60000}')", tokens[0], tokens[1]),
		"pgxlock_release_batch('{k1,k2}', '{A,A}', '{null,null}')",
		"pgxlock_release_batch('{k3,k4,k0}', '{A,A,A}', '{null,null,null}')",
		"pgxlock_release_one('k5', 'A', null)",
		"pgxlock_acquire_one('k6', 'B', 1, null, 0)",
		"pgxlock_acquire_each('{k1,k2,k3,new}', '{A,A,B,A}', '{1,1,1,1}', '{null,null,null,null}')",
		"pgxlock_acquire_batch('{k1,k2,k3,new too}', '{A,A,B,A}', '{1,1,1,1}', '{null,null,null,null}', '{0,0,null,0}')",
		"pgxlock_publish_batch('{0,0,0}', '{k1,k2,k3}', '{null,null,null}', '{1,1,1}', '{null,null,null}', null, 'A', 60000, 1)",
		"pgxlock_acquire_batch('{k1,k2,k3}', '{A,A,B}', '{1,1,1}', '{null,null,null}', '{0,0,null}')",
		"pgxlock_permit_batch('{p,p}', '{1,1}', '{A,B}', '{60000,60000}', '{null,null}', '{0,0}')",
	} {
		conn := db.Connect(t)
		if _, err := conn.Exec(t.Context(), "set enable_tidscan = off"); err != nil { // as a role may have it
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), statements.ConnSession.Text(), false); err != nil {
			t.Fatal(err)
		}
		looksUp(t, conn, "distributed_locks", call)
	}
	for _, call := range []string{"acquire_permit('p', 'A', 3)", "acquire_permits_in_turn('p', 'B', 3)", "acquire_in_turn('k7', 'B')"} { // in a session of any settings
		looksUp(t, db.Connect(t), "distributed_locks", call)
	}
}

// The same for shares, of names that many share.
func TestBatchesLookUpEachShareByItsName(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := installed.New(t)
	db.Exec(t, "select acquire_shared_lock('k' || i, 'A'), release_shared_lock('k' || i, 'A') from generate_series(1, 100) i")
	db.Exec(t, "vacuum analyze distributed_locks")
	db.Exec(t, "vacuum analyze distributed_lock_shares")
	db.Exec(t, "select acquire_shared_lock('k' || i, 'A') from generate_series(1, 300) i")
	for _, call := range []string{
		"pgxlock_try_in_turn('{k1,k2,new}', '{B,B,A}', '{60000,60000,60000}', '{null,null,null}', '{0,null,0}', true)",
		"pgxlock_renew_shares_batch('{k1,k2}', '{A,B}', '{null,null}', '{60000,60000}')",
		"pgxlock_release_shares_batch('{k1,k2,new}', '{A,A,A}', '{null,null,null}')",
		"pgxlock_holders('k3')",
		"assert_shared_lock_held('k3', 'A')",
		"acquire_shared_in_turn('k4', 'B')",
	} {
		for _, table := range []string{"distributed_locks", "distributed_lock_shares"} {
			conn := db.Connect(t)
			if _, err := conn.Exec(t.Context(), statements.ConnSession.Text(), false); err != nil {
				t.Fatal(err)
			}
			looksUp(t, conn, table, call)
		}
	}
}

// The same for the rows of advisory locks. An unlock must not look for those of its
// session either: that would be all of them, and what is left in the index of all
// that were given back since the last vacuum.
func TestBatchesLookUpEachSessionLockByItsKey(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := installed.New(t)
	conn := db.Connect(t)
	for _, name := range []string{"enable_bitmapscan", "enable_nestloop"} { // as a role may have them
		if _, err := conn.Exec(t.Context(), "set "+name+" = off"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := conn.Exec(t.Context(), statements.AdvisoryLockSession.Text(), 0, conn.PgConn().PID()); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "reset search_path"); err != nil {
		t.Fatal(err)
	}
	const keys = 300
	all := func(op int) []int64 {
		t.Helper()
		var answers []int64
		err := conn.QueryRow(t.Context(), "select pgxlock_advisory_batch(array_agg($1::int), array_agg(i), 1) from generate_series(1, $2::bigint) i", op, keys).Scan(&answers)
		if err != nil || len(answers) != keys {
			t.Fatal(len(answers), err)
		}
		return answers
	}
	all(0)
	all(2)
	db.Exec(t, "vacuum analyze pgxlock_advisory_locks")
	tokens := all(0)

	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), "select assert_advisory_lock_held(1, 1, 1, $1)", tokens[0]); err != nil {
		t.Fatal(err)
	}
	for _, call := range []string{
		"pgxlock_advisory_batch('{2,2,2}', '{1,2,3}', 1)", // the row of the first is kept
		"pgxlock_advisory_batch('{0,2,0}', '{1,4,1000}', 1)",
		"pgxlock_advisory_batch('{2,0}', '{5,2}', 1)",
	} {
		looksUp(t, conn, "pgxlock_advisory_locks", call)
	}
}

// The same for tickets. Those of a lock that is passed on have been in the index since
// the last vacuum, each under its own number: a look must not read them again and again.
func TestTicketsAreLookedUpByTheirLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	// On a server of its own: an open transaction, in whatever database, keeps what is dead.
	url := pgtest.Private(t, pgserver.Config{}).URL("postgres")
	pool := pgtest.Pool(t, url)
	if err := migrations.Up(t.Context(), pool, nil); err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec("vacuum analyze pgxlock_waiters")
	// Who came when nobody waited has its plans from then, for names that nobody waits for.
	early := pgtest.Connect(t, url)
	alone := []string{
		"pgxlock_acquire_batch('{a,k99}', '{A,A}', '{60000,60000}', '{null,null}', '{0,0}')",
		"pgxlock_release_batch('{a,k99}', '{A,A}', '{null,null}')",
		"pgxlock_acquire_one('k99', 'A', 60000, null, 0)",
		"pgxlock_release_one('k99', 'A', null)",
	}
	if _, err := early.Exec(t.Context(), statements.ConnSession.Text(), false); err != nil {
		t.Fatal(err)
	}
	for _, call := range slices.Concat(alone, alone) {
		if _, err := early.Exec(t.Context(), "select "+call); err != nil {
			t.Fatal(err)
		}
	}
	exec(`select pgxlock_publish_batch(array_agg(0), array_agg('k' || i), array_agg(null::bigint), array_agg(1), array_agg(null::text), null, 'A', 60000, 1)
		from generate_series(1, 300) i`)
	for _, call := range alone {
		looksUp(t, early, "pgxlock_waiters", call)
	}
	for range 300 {
		exec(`select pgxlock_withdraw_batch('{0}', '{hot}', array[(select ticket from pgxlock_publish_batch('{0}', '{hot}', '{null}', '{1}', '{null}', null, 'A', 60000, 1))])`)
	}
	for _, call := range []string{
		"pgxlock_publish_batch('{0,0,0}', '{k1,k2,hot}', '{1,null,null}', '{1,1,1}', '{null,null,null}', null, 'A', 60000, 1)",
		"pgxlock_acquire_batch('{k1,k2,hot}', '{A,A,A}', '{1,1,1}', '{null,null,null}', '{0,0,0}')",
		"pgxlock_wake_batch('{0,0,0}', '{k1,k2,hot}', '{null,null,1}')",
		"pgxlock_release_batch('{k1,k2,hot}', '{A,A,A}', '{null,null,null}')",
		"pgxlock_refused_batch('{0,0,0}', '{k1,k2,hot}', '{1,2,3}')",
		"pgxlock_waited_for('{0,0,0}', '{k1,k2,hot}')",
		"pgxlock_withdraw_batch('{0,0,0}', '{k1,k2,hot}', '{1,2,3}')",
		"wake_lock_waiter('hot')",
		"acquire_in_turn('hot', 'A')",
		"acquire_shared_in_turn('hot', 'B')",
		"leave_queue('hot', 'A')",
	} {
		conn := pgtest.Connect(t, url)
		if _, err := conn.Exec(t.Context(), statements.ConnSession.Text(), false); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), "select "+call); err != nil { // it may find dead ones that nobody has seen yet
			t.Fatal(err)
		}
		looksUp(t, conn, "pgxlock_waiters", call)
	}
}

// The same for limits.
func TestLimitsAreLookedUpByTheirKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := installed.New(t)
	db.Exec(t, "vacuum analyze pgxlock_limits")
	db.Exec(t, "insert into pgxlock_limits select 'k' || i, 0 from generate_series(1, 300) i")
	for _, call := range []string{
		"pgxlock_limit_batch(1000, 1, '{k1,k2,new}', '{1,1,1}', '{0,0,0}', '{null,null,null}')",
		"pgxlock_limit_batch(1000000000000, 1, '{k1,k2,k3}', '{1,1,1}', '{0,0,0}', '{null,null,null}')",
		"pgxlock_limit_batch(1000000000000, 1, '{k1,k2,k3}', '{1,1,1}', '{0,0,0}', '{null,null,null}')", // refused
	} {
		for _, settings := range []string{statements.ConnSession.Text(), "select set_config('enable_indexscan', 'off', $1)"} {
			conn := db.Connect(t)
			if _, err := conn.Exec(t.Context(), settings, false); err != nil {
				t.Fatal(err)
			}
			looksUp(t, conn, "pgxlock_limits", call)
		}
	}
}

// looksUp makes a call that has one answer for each key, and fails if it reads more
// of the table than what it has of these.
func looksUp(t *testing.T, conn *pgx.Conn, table, call string) {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// From PostgreSQL 18 on, what the session did before counts as the transaction's.
	count := func() (read, looked int) { // rows of the whole table, and entries of its indexes, of dead rows as well
		const counts = `select pg_stat_get_xact_tuples_returned(c.oid),
			(select sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint from pg_index i where i.indrelid = c.oid)
			from pg_class c where c.oid = $1::text::regclass`
		if err == nil {
			err = tx.QueryRow(t.Context(), counts, table).Scan(&read, &looked)
		}
		return read, looked
	}
	readBefore, lookedBefore := count()
	var answers []any
	if err == nil {
		rows, _ := tx.Query(t.Context(), "select "+call)
		answers, err = pgx.CollectRows(rows, pgx.RowTo[any])
	}
	read, looked := count()
	if err == nil {
		err = tx.Commit(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	if array, ok := answers[0].([]any); ok {
		answers = array
	}
	read, looked = read-readBefore, looked-lookedBefore
	if most := 10 * len(answers); read > 0 || looked == 0 || looked > most {
		t.Errorf("%s: read %d rows of the whole table and %d entries of indexes, want 0 and at most %d", call, read, looked, most)
	}
}
