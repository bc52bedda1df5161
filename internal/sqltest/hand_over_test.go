package sqltest_test

import (
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/sql"
)

// The planner must not run the acquire before, or without, the release.
func TestLeaseIsHandedOverOnlyByTheReleaseOfItsHolder(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	d := install(t)
	conn := pgtest.Connect(t, d.url)
	for name, c := range map[string]struct {
		before   string
		fenced   bool
		outcome  string
		acquired bool
		holders  string // left
	}{
		"held":              {"select acquire_lock('k', 'A')", false, "r", true, "B"},
		"held, others wait": {"select acquire_lock('k', 'A'); select acquire_in_turn('k', 'W')", false, "R", true, "B"},
		"expired":           {"select acquire_lock('k', 'A'); update distributed_locks set expires_at = now() - interval '1 s'", false, "e", true, "B"},
		"free":              {"select 1", false, "g", false, ""},
		"of another holder": {"select acquire_lock('k', 'C')", false, "g", false, "C"},
		"fenced":            {"select acquire_lock('k', 'A')", true, "s", false, "A"},
		"free, others wait": {"select acquire_lock('k', 'A'); select acquire_in_turn('k', 'W'); delete from distributed_locks", false, "G", false, ""},
	} {
		d.do(c.before)
		writer := d.connect()
		if c.fenced {
			writer.begin(readCommitted)
			writer.want("assert_lock_held('k', 'A') > 0", "true")
		}
		var outcome string
		var token, remaining *int64
		var heldBy *string
		var ahead *bool
		if err := conn.QueryRow(t.Context(), statements.LeaseHandOver.Text(), "k", "A", nil, "B", 60000, nil).Scan(&outcome, &token, &heldBy, &remaining, &ahead); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if outcome != c.outcome || (token != nil) != c.acquired {
			t.Errorf("%s: outcome %s, acquired %t; want %s, %t", name, outcome, token != nil, c.outcome, c.acquired)
		}
		d.want("(select coalesce(string_agg(holder_id, ','), '') from distributed_locks)", c.holders)
		writer.done()
		d.do("delete from distributed_locks; delete from pgxlock_waiters")
	}
}
