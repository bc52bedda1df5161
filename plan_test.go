package pgxlock

import (
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

	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), statement("session", ""), false); err != nil {
		t.Fatal(err)
	}
	for _, call := range []string{
		"pgxlock_renew_batch('{k1,k2}', '{A,A}', array(select fencing_token from distributed_locks order by lock_name limit 2), '{60000,60000}')",
		"pgxlock_release_batch('{k1,k2}', '{A,A}', '{null,null}')",
		"pgxlock_acquire_batch('{k1,k2,k3,new}', '{A,A,B,A}', '{1,1,1,1}', '{null,null,null,null}')",
	} {
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var read, looked int // by this transaction: from the whole table, and by an index
		const counts = "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relname = 'distributed_locks'"
		rows, _ := tx.Query(t.Context(), "select "+call)
		answers, err := pgx.CollectRows(rows, pgx.RowTo[any])
		if err == nil {
			err = tx.QueryRow(t.Context(), counts).Scan(&read, &looked)
		}
		if err == nil {
			err = tx.Commit(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		if most := 10 * len(answers); read > 0 || looked > most {
			t.Errorf("%s: read %d rows of the whole table and %d by an index, want 0 and at most %d", call, read, looked, most)
		}
	}
}
