package pgxlock

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The planner knows the size of the table from the last vacuum, which may have
// come by when nothing was locked. Each lease of a batch must be looked up by its
// name all the same: to read the whole table for each would make the cost of a
// batch its size times the table's.
func TestBatchesLookUpEachLeaseByItsName(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
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
		"pgxlock_acquire_batch('{k1,k2,k3,new}', '{A,A,B,A}', '{1,1,1,1}', '{null,null,null,null}')",
	} {
		conn := db.Connect(t) // its counts begin at 0
		if _, err := conn.Exec(t.Context(), statement("session", ""), false); err != nil {
			t.Fatal(err)
		}
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		rows, _ := tx.Query(t.Context(), "select "+call)
		answers, err := pgx.CollectRows(rows, pgx.RowTo[any])
		var read, looked int // rows by reading the whole table, and by an index
		if err == nil {
			err = tx.QueryRow(t.Context(), "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'distributed_locks'").Scan(&read, &looked)
		}
		if err == nil {
			err = tx.Commit(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		if most := 10 * len(answers); read > 0 || looked == 0 || looked > most {
			t.Errorf("%s: read %d rows of the whole table and %d by an index, want 0 and at most %d", call, read, looked, most)
		}
	}
}
