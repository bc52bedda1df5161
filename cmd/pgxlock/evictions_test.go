package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestEvictionsListsTheNewestFirst(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	execute(t, env, "evictions").want(t, exitOK, "EVICTED AT", "")
	execute(t, env, "evictions", "-o", "json").want(t, exitOK, "[]\n", "")
	db.Exec(t, "select acquire_lock('a', 'pod-1', 300), acquire_lock('b', 'pod-2', 300)")
	_, pid := session(t, db, "select pg_advisory_lock(advisory_lock_key('k')), pg_advisory_lock(4, 2)")
	for _, evict := range [][]string{{"a", "--reason", "INC-1"}, {"b", "--reason", "INC-2\n\x1b[2J"}, {"k", "--kind", "advisory", "--reason", "INC-3", "--terminate"}} {
		execute(t, env, append([]string{"evict", "--yes"}, evict...)...).want(t, exitOK, "evicted", evictMessages[evict[0]])
	}
	db.Exec(t, `update pgxlock_evictions set evicted_at = now() - interval '2 days' where name = 'a';
		update pgxlock_evictions set evicted_at = now() - interval '1 hour' where name = 'b'`)

	list := func(args ...string) (all []evictionView) {
		t.Helper()
		r := execute(t, env, append([]string{"evictions", "-o", "json"}, args...)...)
		if err := json.Unmarshal([]byte(r.stdout), &all); err != nil || r.code != exitOK || r.stderr != "" {
			t.Fatalf("%+v: %v", r, err)
		}
		return all
	}
	all := list()
	if len(all) != 4 { // the session ended with both of its locks
		t.Fatalf("%+v", all)
	}
	advisory := map[string]bool{all[0].Key: true, all[1].Key: true}
	if !advisory["k"] || !advisory["#4,2"] || all[0].Kind != kindAdvisory || all[0].Holder != fmt.Sprintf("process %d", pid) || !strings.HasSuffix(all[0].Reason, "INC-3") {
		t.Errorf("%+v", all[:2])
	}
	if b := all[2]; b.Key != "b" || b.Kind != kindLease || b.Holder != "pod-2" || b.By != "postgres (pgxlock)" || b.Reason != "INC-2\n\x1b[2J" || b.Evicted.IsZero() || all[3].Key != "a" {
		t.Errorf("%+v", all[2:])
	}
	if got := list("--limit", "3"); len(got) != 3 || got[2].Key != "b" {
		t.Errorf("%+v", got)
	}
	if got := list("--since", "24h"); len(got) != 3 || got[2].Key != "b" {
		t.Errorf("%+v", got)
	}
	_, pid = session(t, db, "set application_name = 'psql'; select pg_advisory_lock(9)")
	db.Exec(t, fmt.Sprintf("select evict_advisory_lock(%d, 9, 'INC-4')", pid))
	if got := list("--limit", "1"); len(got) != 1 || got[0].Holder != fmt.Sprintf("process %d of psql", pid) {
		t.Errorf("%+v, of process %d", got, pid)
	}
	db.Exec(t, "update pgxlock_evictions set evicted_at = '2020-01-01' where key_name is null and name = '9'") // before the session began
	if got := list(); got[len(got)-1].Holder != fmt.Sprintf("process %d", pid) {
		t.Errorf("%+v", got)
	}
	db.Exec(t, "delete from pgxlock_evictions where name = '9'")
	table := execute(t, env, "evictions").stdout
	if lines := strings.Split(table, "\n"); len(lines) != 6 || strings.Contains(table, "\x1b") || !strings.Contains(strings.Join(strings.Fields(lines[3]), " "), ` b lease pod-2 postgres (pgxlock) INC-2\n\x1b[2J`) {
		t.Errorf("%s", table)
	}
}

// evictMessages is what evict says on standard error.
var evictMessages = map[string]string{"k": "the session of process"}

func TestEvictionsSaysWhatIsWrong(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	execute(t, env, "evictions").want(t, exitInternal, "", "pgxlock migrate up")
	execute(t, env, "evictions", "--schema", "public").want(t, exitInternal, "", `schema "public" has no pgxlock`)
	execute(t, env, "evictions", "--limit", "0").want(t, exitUsage, "", "--limit is 0, it must be more than 0")
	execute(t, env, "evictions", "--since", "0s").want(t, exitUsage, "", "--since is 0s, it must be more than 0")
	denied := as("pg_monitor", migrated(t))
	execute(t, denied, "evictions").want(t, exitDenied, "", "(SQLSTATE 42501)")
}
