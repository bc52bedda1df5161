package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
)

// migrated returns a database with pgxlock in it.
func migrated(t *testing.T) *pgtest.DB {
	t.Helper()
	return patient(testkit.Migrated(t))
}

// empty returns a database without anything.
func empty(t *testing.T) *pgtest.DB {
	t.Helper()
	return patient(pgtest.New(t))
}

// patient returns the database for commands that give a busy machine all the time that it needs
// to let them in.
func patient(db *pgtest.DB) *pgtest.DB {
	return &pgtest.DB{Pool: db.Pool, URL: fmt.Sprintf("%s&connect_timeout=%.0f", db.URL, pgtest.Patience.Seconds()), Name: db.Name}
}

// withLeases returns a database with leases in every state.
func withLeases(t *testing.T) *pgtest.DB {
	t.Helper()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300, '{"step": 3}');
		select acquire_lock('order:2', 'pod-2', 300, '"free text"');
		select acquire_lock('import', 'pod-3', 300);
		select acquire_lock('old', 'pod-4', 300);
		update distributed_locks set expires_at = now() - interval '1 minute' where lock_name = 'import';
		update distributed_locks set expires_at = now() - interval '2 days', acquired_at = now() - interval '3 days' where lock_name = 'old'`)
	return db
}

func TestLsShowsLeasesInATable(t *testing.T) {
	t.Parallel()
	r := execute(t, nil, "ls", "--database-url", withLeases(t).URL)
	r.want(t, exitOK, "KEY", "")
	lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
	if len(lines) != 5 || strings.Contains(r.stdout, "\x1b") {
		t.Fatalf("want a header and four rows, without colors:\n%s", r.stdout)
	}
	for i, want := range [][]string{
		{"KEY", "KIND", "STATE", "HELD FOR", "REMAINING", "MODE", "HOLDER", "TOKEN", "PID", "NOTE"},
		{"import", "lease", "expired", "pod-3", "-1m"},
		{"old", "abandoned", "pod-4", " 1d0h ", " -2d0h"},
		{"order:1", "lease", "live", "pod-1", `{"step": 3}`},
		{"order:2", "live", "pod-2", " free text"},
	} {
		for _, text := range want {
			if !strings.Contains(lines[i], text) {
				t.Errorf("line %d has no %q: %s", i, text, lines[i])
			}
		}
	}
}

func TestLsPrintsJSON(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := withLeases(t)
	var leases []listedView
	if err := json.Unmarshal([]byte(execute(t, nil, "ls", "-o", "json", "--database-url", db.URL).stdout), &leases); err != nil {
		t.Fatal(err)
	}
	if len(leases) != 4 {
		t.Fatalf("%+v", leases)
	}
	l := leases[2]
	if l.Key != "order:1" || l.State != "live" || l.Holder != "pod-1" || l.Token <= 0 || l.Metadata != `{"step": 3}` || *l.RemainingSeconds <= 0 || *l.RemainingSeconds > 300 || !l.Expires.After(l.Acquired) {
		t.Errorf("%+v %s", l, l.Metadata)
	}
	empty := execute(t, nil, "ls", "-o", "json", "--prefix", "nothing", "--database-url", db.URL)
	empty.want(t, exitOK, "[]\n", "")
}

// A terminal obeys control characters above ASCII as well, which JSON may have.
func TestJSONShowsNoControlCharacterOfAName(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const hostile = "k\u009b2J\x7f\u202e"
	db := migrated(t)
	db.Exec(t, `select acquire_lock('`+hostile+`', '`+hostile+`', 300, '"`+hostile+`"');
		insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until) values (0, '`+hostile+`', 1, '`+hostile+`', 1, now(), now() + interval '1 hour');
		insert into pgxlock_evictions (kind, name, holder, token, evicted_at, evicted_by, reason) values (0, '`+hostile+`', '`+hostile+`', 1, now(), 'ops', '`+hostile+`')`)
	env := []string{"DATABASE_URL=" + db.URL}
	for _, args := range [][]string{{"ls"}, {"tree"}, {"watch", "--once"}, {"evictions"}, {"doctor", "--schema", hostile}, {"acquire", hostile + "2", "--holder", hostile}} {
		r := execute(t, env, append(args, "-o", "json")...)
		for _, c := range r.stdout + r.stderr {
			if c != '\n' && !unicode.IsPrint(c) {
				t.Errorf("%s: %q in %q", args, c, r.stdout+r.stderr)
				break
			}
		}
		if !strings.Contains(r.stdout+r.stderr, `\u009b2J`) {
			t.Errorf("%s does not show it: %q", args, r.stdout+r.stderr)
		}
		if r.stdout != "" && !json.Valid([]byte(r.stdout)) {
			t.Errorf("%s: %q", args, r.stdout)
		}
	}
}

func TestJSONNamesALockAlikeInAllCommands(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	fields := func(text string) (lock map[string]any) {
		t.Helper()
		if err := json.Unmarshal([]byte(strings.Trim(text, "[]\n")), &lock); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		return lock
	}
	acquired := fields(execute(t, env, "acquire", "k", "-o", "json", "--metadata", "page 3").stdout)
	listed := fields(execute(t, env, "ls", "-o", "json").stdout)
	locks, err := monitor.New(db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	holders, err := locks.Holders(t.Context(), monitor.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(views(holders, viewHolder))
	if err != nil {
		t.Fatal(err)
	}
	watched := fields(string(text))
	for _, field := range []string{"key", "kind", "mode", "state", "holder", "token", "acquired_at", "expires_at", "metadata"} {
		of, there := acquired[field]
		if listed[field] == nil || listed[field] != watched[field] || there && of != listed[field] {
			t.Errorf("%s: acquire says %v, ls %v, watch %v", field, of, listed[field], watched[field])
		}
	}
}

func TestLsSaysWhyALeaseWasEvicted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := withLeases(t)
	db.Exec(t, "select acquire_shared_lock('report', 'pod-5', 300), acquire_shared_lock('report', 'pod-6', 300)")
	env := []string{"DATABASE_URL=" + db.URL}
	list := func() string { return execute(t, env, "ls").stdout }
	if text := list(); strings.Contains(text, "evicted") {
		t.Errorf("before: %s", text)
	}
	execute(t, env, "evict", "order:1", "--reason", "hangs\nsince the deploy of eleven o'clock, INC-7", "--yes").want(t, exitOK, "evicted", "")
	execute(t, env, "evict", "report", "--holder", "pod-5", "--reason", "drained", "--yes").want(t, exitOK, "evicted", "")
	text := list()
	if strings.Count(text, "evicted by ") != 2 {
		t.Errorf("want two: %s", text)
	}
	for row := range strings.Lines(text) {
		for key, want := range map[string]string{
			"order:1": "pod-1", "pod-1": `evicted by postgres (pgxlock): hangs\nsince the deploy of eleven o'clock, INC-7`, "pod-5": "evicted by postgres (pgxlock): drained",
		} {
			if strings.Contains(row, key) && !strings.Contains(row, want) {
				t.Errorf("no %q: %s", want, row)
			}
		}
	}
	execute(t, env, "ls", "--prefix", "order:1", "-o", "json").want(t, exitOK, `"eviction_reason": "hangs\nsince`, "")
	db.Exec(t, "select acquire_lock('order:1', 'pod-1', 300), acquire_shared_lock('report', 'pod-5', 300)")
	if text := list(); strings.Contains(text, "evicted") {
		t.Errorf("who has it again was evicted before: %s", text)
	}
}

// What SQL wrote need not be a lease of this package.
func TestLsListsALeaseThatLastsForGood(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at) values ('closed', 'ops', '-infinity', 'infinity')")
	r := execute(t, nil, "ls", "--database-url", db.URL)
	r.want(t, exitOK, "closed", "")
	if line := strings.Fields(r.stdout[strings.Index(r.stdout, "closed"):]); strings.Join(line, " ") != "closed lease live ops" {
		t.Error(r.stdout)
	}
	var leases []map[string]any
	if err := json.Unmarshal([]byte(execute(t, nil, "ls", "-o", "json", "--database-url", db.URL).stdout), &leases); err != nil {
		t.Fatal(err)
	}
	if _, there := leases[0]["expires_at"]; there || leases[0]["remaining_seconds"] != nil || leases[0]["held_seconds"] != nil {
		t.Error(leases)
	}
}

// names are those of the locks, in their order.
func names(locks []listedView) string {
	var names []string
	for _, l := range locks {
		names = append(names, l.Key)
	}
	return strings.Join(names, " ")
}

func TestLsListsWhatPassesAllFiltersInTheOrderThatIsAskedFor(t *testing.T) {
	t.Parallel()
	db := withLeases(t)
	session(t, db, "select pg_advisory_lock(advisory_lock_key('order:3')), pg_advisory_lock_shared(4, 2); set application_name = 'psql'")
	locks, err := monitor.New(db.Pool, &monitor.Config{Names: []string{"order:3"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ args, want string }{
		{"", "#4,2 import old order:1 order:2 order:3"},
		{"--kind lease", "import old order:1 order:2"},
		{"--kind advisory", "#4,2 order:3"},
		{"--kind advisory,lease --sort kind", "#4,2 order:3 order:1 order:2 import old"},
		{"--kind lease --kind advisory --key r:", "order:1 order:2 order:3"},
		{"--key #4", "#4,2"},
		{"--holder psql:", "#4,2 order:3"},
		{"--sort holder", "order:1 order:2 import old #4,2 order:3"},
		{"--prefix order:", "order:1 order:2 order:3"},
		{"--prefix o", "old order:1 order:2 order:3"},
		{"--prefix %", ""},
		{"--expired", "import old"},
		{"--expired --prefix o", "old"},
		{"--holder pod-2", "order:2"},
		{"--holder d-", "import old order:1 order:2"},
		{"--holder p_d", ""},
		{"--holder POD-2", ""},
		{"--state live", "#4,2 order:1 order:2 order:3"},
		{"--state expired", "import"},
		{"--state abandoned --state live", "#4,2 old order:1 order:2 order:3"},
		{"--state expired,abandoned", "import old"},
		{"--older-than 48h", "old"},
		{"--older-than 96h", ""},
		{"--older-than 48h --state live", ""},
		{"--expires-within 10m", "order:1 order:2"},
		{"--expires-within 1ms", ""},
		{"--expires-within 10m --expired", ""},
		{"--sort age", "old order:1 order:2 import #4,2 order:3"},
		{"--sort expiry", "old import order:1 order:2 #4,2 order:3"},
		{"--sort expiry --state live --holder pod", "order:1 order:2"},
	} {
		var f filter
		var cmd cobra.Command
		f.addFlags(&cmd)
		if err := cmd.ParseFlags(strings.Fields(test.args)); err != nil {
			t.Fatal(err)
		}
		if err := f.check(&cmd); err != nil {
			t.Errorf("%s: %v", test.args, err)
		}
		shot, err := locks.Snapshot(t.Context())
		shot = f.of(shot)
		if got := names(views(shot.Holders, func(h pgxlock.Holder) listedView { return viewListed(shot.At, h) })); err != nil || got != test.want {
			t.Errorf("%s: %q, %v, want %q", test.args, got, err, test.want)
		}
	}
}

func TestLsSaysThatTheLimitCutTheList(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := withLeases(t)
	for _, test := range []struct{ limit, note, want string }{
		{"3", "only the first 3 of 4 locks are shown; --limit shows more", "old order:1 order:2"},
		{"4", "", "old order:1 order:2 import"},
	} {
		r := execute(t, nil, "ls", "-o", "json", "--sort", "age", "--limit", test.limit, "--database-url", db.URL)
		r.want(t, exitOK, "old", test.note)
		var leases []listedView
		if err := json.Unmarshal([]byte(r.stdout), &leases); err != nil {
			t.Fatal(err)
		}
		if got := names(leases); got != test.want {
			t.Errorf("--limit %s lists %q, want %q", test.limit, got, test.want)
		}
	}
}

func TestLsTellsAScriptWhetherThereAreAny(t *testing.T) {
	t.Parallel()
	env := []string{"DATABASE_URL=" + withLeases(t).URL}
	execute(t, env, "ls", "--exit-code", "--holder", "pod-1").want(t, exitOK, "order:1", "")
	execute(t, env, "ls", "--exit-code", "--holder", "pod-9").want(t, exitNone, "KEY", "")
	execute(t, env, "ls", "--exit-code", "--holder", "pod-9", "-o", "json").want(t, exitNone, "[]\n", "")
	execute(t, env, "ls", "--holder", "pod-9").want(t, exitOK, "KEY", "")
}

func TestLsNamesAFilterThatCannotBe(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args []string
		says string
	}{
		{[]string{"--state", "dead"}, `--state "dead": use live, expired, abandoned`},
		{[]string{"--state", "live,"}, `--state "": use live`},
		{[]string{"--state", ""}, "--state is empty"},
		{[]string{"--state", "live", "--expired"}, "exclude each other"},
		{[]string{"--sort", "size"}, `--sort "size": use kind, key, age, expiry, holder`},
		{[]string{"--kind", "memory"}, `--kind "memory": use lease or advisory`},
		{[]string{"--kind", "transaction"}, "the server does not tell the lock of a transaction from that of a session; use advisory for both"},
		{[]string{"--kind", ""}, "--kind is empty"},
		{[]string{"--key", ""}, "--key is empty"},
		{[]string{"--kind", "advisory", "--expired"}, "--kind advisory: --older-than, --expires-within and other states than live are of leases alone"},
		{[]string{"--kind", "advisory", "--older-than", "1h"}, "leave them out"},
		{[]string{"--holder", ""}, "--holder is empty; is the variable set"},
		{[]string{"--prefix="}, "--prefix is empty"},
		{[]string{"--older-than", "-1s"}, "--older-than is -1s, it must be more than 0"},
		{[]string{"--older-than", "1d"}, "older-than"},
		{[]string{"--expires-within", "0s"}, "--expires-within is 0s"},
		{[]string{"--limit", "0"}, "--limit is 0"},
		{[]string{"--limit", "-3"}, "--limit is -3"},
	} {
		r := execute(t, nil, append([]string{"ls", "--database-url", "postgres://nobody@127.0.0.1:1/nowhere"}, test.args...)...)
		if r.want(t, exitUsage, "", test.says); strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%v: not one line: %q", test.args, r.stderr)
		}
	}
}

func TestLsShowsEveryKindOfLock(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	db.Exec(t, "select acquire_lock('a', 'pod-1', 300), acquire_permit('b', 'pod-2', 2, 300), acquire_shared_lock('c', 'pod-3', 300)")
	_, held := session(t, db, "set application_name = 'psql'; select pg_advisory_lock(advisory_lock_key('d')), pg_advisory_lock_shared(7)")
	_, open := session(t, db, "begin; select lock_tx('e')")
	db.Exec(t, "update distributed_locks set expires_at = now() - interval '1 minute' where lock_name = 'a'")

	r := execute(t, env, "ls", "--name", "d", "--name", "e", "-o", "json")
	var locks []listedView
	if err := json.Unmarshal([]byte(r.stdout), &locks); err != nil || r.code != exitOK || r.stderr != "" || len(locks) != 6 {
		t.Fatalf("%+v: %v", r, err)
	}
	for i, want := range []listedView{
		{holderView: holderView{Key: "#7", Kind: kindAdvisory, Mode: "shared", State: "live", PID: int32(held)}},
		{holderView: holderView{Key: "a", Kind: kindLease, Mode: "exclusive", State: "expired"}},
		{holderView: holderView{Kind: kindLease, Mode: "exclusive", State: "live"}}, // b#1 or b#2
		{holderView: holderView{Key: "c", Kind: kindLease, Mode: "shared", State: "live"}},
		{holderView: holderView{Key: "d", Kind: kindAdvisory, Mode: "exclusive", State: "live", PID: int32(held)}},
		{holderView: holderView{Key: "e", Kind: kindAdvisory, Mode: "exclusive", State: "live", PID: int32(open)}},
	} {
		got := locks[i]
		known := got.Kind == kindLease // the server says neither of an advisory lock
		if got.Key != want.Key && want.Key != "" || got.Kind != want.Kind || got.Mode != want.Mode || got.State != want.State || got.PID != want.PID ||
			(got.HeldSeconds != nil) != known || (got.RemainingSeconds != nil) != known {
			t.Errorf("%d: %+v", i, got)
		}
	}
	execute(t, env, "ls", "--kind", "advisory").want(t, exitOK, "#7", "")
	table := execute(t, env, "ls", "--kind", "advisory", "--key", "#7").stdout
	if want := fmt.Sprintf("#7   advisory  live                        shared  psql:%d         %d\n", held, held); !strings.Contains(table, want) || strings.Count(table, "\n") != 2 {
		t.Errorf("no %q:\n%s", want, table)
	}
	if all := execute(t, env, "ls", "--internal").stdout; strings.Count(all, "(pgxlock: ") > 0 {
		t.Errorf("nobody has a lock of pgxlock's own:\n%s", all)
	}
}

func TestLsSaysWhatItCannotShow(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	session(t, db, "select pg_advisory_lock(7)")
	execute(t, env, "ls").want(t, exitInternal, "#7", "pgxlock: not shown: leases, and the queues of waiters: ")
	execute(t, env, "ls", "--exit-code", "--state", "live").want(t, exitInternal, "#7", "pgxlock migrate up")
	execute(t, env, "ls", "--key", "no such").want(t, exitInternal, "", "run pgxlock migrate up")
	execute(t, env, "ls", "--kind", "advisory", "-o", "json").want(t, exitOK, `"key": "#7"`, "not shown: leases")
	for _, args := range []string{"--kind lease", "--expired", "--older-than 1s", "--expires-within 1s", "--exit-code --prefix none", "-o json --kind lease"} { // whose answer would be wrong
		execute(t, env, append([]string{"ls"}, strings.Fields(args)...)...).want(t, exitInternal, "", "run pgxlock migrate up")
	}
	execute(t, env, "ls", "--kind", "lease", "--schema", "nowhere").want(t, exitInternal, "", `schema "nowhere"`)
	for _, schema := range []string{"a", "b"} {
		if err := migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: schema}); err != nil {
			t.Fatal(err)
		}
	}
	execute(t, env, "ls", "--kind", "lease").want(t, exitInternal, "", "installed in schema")
	execute(t, env, "ls", "--schema", "b").want(t, exitOK, "#7", "")
	execute(t, as("pg_monitor", db), "ls", "--schema", "b").want(t, exitDenied, "#7", "not shown: leases")
}

// A list that lacks a part tells a script so by the exit code, and so does the JSON that is an object.
func TestIncompleteAnswerIsNoSuccess(t *testing.T) {
	t.Parallel()
	db := withLeases(t)
	session(t, db, "select pg_advisory_lock(7)")
	env := as("pg_monitor", db) // which sees advisory locks, and no lease
	execute(t, env, "ls").want(t, exitDenied, "#7", "pgxlock: not shown: leases, ")
	execute(t, env, "ls", "-o", "json", "--limit", "1").want(t, exitDenied, `"key": "#7"`, "pgxlock: not shown: leases, ")
	execute(t, env, "ls", "-o", "json", "--prefix", "order:").want(t, exitDenied, "", "permission denied")
	execute(t, env, "ls", "--exit-code", "--kind", "advisory").want(t, exitOK, "#7", "not shown: leases")
	execute(t, env, "tree", "-o", "json").want(t, exitDenied, "", "permission denied")
	execute(t, env, "evictions", "-o", "json").want(t, exitDenied, "", "permission denied")
	execute(t, env, "watch", "--once").want(t, exitDenied, "at least 1 held, ? waiting, ? expired", "not shown: leases, ")

	r := execute(t, env, "watch", "--once", "-o", "json")
	var shot snapshotView
	if err := json.Unmarshal([]byte(r.stdout), &shot); err != nil || r.code != exitDenied || !slices.Equal(shot.Unread, []string{"leases", "queues"}) || len(shot.Holders) != 1 {
		t.Errorf("%+v: %v", r, err)
	}
	execute(t, env, "watch", "--once", "-o", "json", "--kind", "lease").want(t, exitDenied, `"unread":["leases","queues"]`, "")

	db.Exec(t, "select grant_locks('pg_monitor', 'monitoring')")
	execute(t, env, "ls", "--prefix", "no such", "-o", "json").want(t, exitOK, "[]", "")
	execute(t, env, "tree").want(t, exitOK, "nobody waits", "")
	execute(t, env, "watch", "--once", "-o", "json").want(t, exitOK, `"unread":[]`, "")
	execute(t, env, "evictions", "-o", "json").want(t, exitOK, "[]", "")
	db.Exec(t, "alter table pgxlock_evictions enable row level security") // which would hide rows
	execute(t, env, "evictions", "-o", "json").want(t, exitDenied, "", "row-level security")
}

func TestDurationsAreBrief(t *testing.T) {
	t.Parallel()
	for want, d := range map[string]time.Duration{
		"0s": 0, "12ms": 12 * time.Millisecond, "1.5s": 1500 * time.Millisecond, "28s": 28 * time.Second, "-2.2s": -2200 * time.Millisecond,
		"12m5s": 12*time.Minute + 5*time.Second, "3h4m": 3*time.Hour + 4*time.Minute, "12h": 12 * time.Hour, "2d1h": 49 * time.Hour,
	} {
		if got := readable.Duration(d); got != want {
			t.Errorf("%d: %s, want %s", d, got, want)
		}
	}
}

func TestLsShowsWhoSharesALease(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := withLeases(t)
	db.Exec(t, "select acquire_shared_lock('report', 'pod-5', 300, '\"reads\"'), acquire_shared_lock('report', 'pod-6', 30)")
	r := execute(t, nil, "ls", "--prefix", "report", "--sort", "expiry", "--database-url", db.URL)
	lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
	if len(lines) != 3 || !strings.Contains(lines[1], "shared") || !strings.Contains(lines[1], "pod-6") || !strings.Contains(lines[2], "pod-5") || !strings.Contains(lines[2], "reads") {
		t.Errorf("%s", r.stdout)
	}
	if r := execute(t, nil, "ls", "--holder", "pod-5", "-o", "json", "--database-url", db.URL); !strings.Contains(r.stdout, `"mode": "shared"`) {
		t.Errorf("%s", r.stdout)
	}
	db.Exec(t, "drop view lock_shares cascade")
	execute(t, nil, "ls", "--kind", "lease", "--database-url", db.URL).want(t, exitInternal, "", "run pgxlock migrate up")
}
