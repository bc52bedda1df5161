package pgxlock

import (
	"regexp"
	"strings"
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
	scan := regexp.MustCompile(`Scan (using \w+ )?on distributed_locks l`)
	arguments := strings.NewReplacer("p_names", "'{k1,k2}'::text[]", "p_holders", "'{A,A}'::text[]", "p_tokens", "'{1,2}'::bigint[]", "p_ttls", "'{1,2}'::bigint[]")
	for _, name := range []string{"pgxlock_release_batch", "pgxlock_renew_batch"} {
		// What the function runs, with its settings and those of a session of ours.
		var body string
		var settings []string
		if err := conn.QueryRow(t.Context(), "select prosrc, proconfig from pg_proc where proname = $1", name).Scan(&body, &settings); err != nil {
			t.Fatal(err)
		}
		for _, setting := range settings {
			key, value, _ := strings.Cut(setting, "=")
			if _, err := conn.Exec(t.Context(), "set "+key+" = "+value); err != nil {
				t.Fatal(err)
			}
		}
		_, query, _ := strings.Cut(body, "RETURN QUERY")
		query, _, _ = strings.Cut(query, ";")
		rows, _ := conn.Query(t.Context(), "explain "+arguments.Replace(query))
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		plan := strings.Join(lines, "\n")
		scans, byName := len(scan.FindAllString(plan, -1)), strings.Count(plan, "Index Cond: ((lock_name)::text = ")
		if scans == 0 || byName != scans {
			t.Errorf("%s looks at the table %d times, and %d times by name:\n%s", name, scans, byName, plan)
		}
	}
}
