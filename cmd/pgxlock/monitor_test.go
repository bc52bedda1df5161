package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
)

// session returns a session that has run a statement, and the id of its process.
func session(t *testing.T, db *pgtest.DB, sql string) (*pgx.Conn, uint32) {
	t.Helper()
	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
	return conn, conn.PgConn().PID()
}

// One session has k; another one waits for it with 8 in hand, for which a third waits.
func TestTreeShowsWhatAWaitingSessionKeepsFromOthers(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	execute(t, env, "tree").want(t, exitOK, "nobody waits\n", "")
	execute(t, env, "tree", "-o", "json").want(t, exitOK, "[]\n", "")

	first, holder := session(t, db, "set application_name = 'first'; select pg_advisory_lock_shared(advisory_lock_key('k'))")
	second, waiter := session(t, db, "set application_name = 'second'; select pg_advisory_lock(8)")
	third, last := session(t, db, "set application_name = E'th\\x1bird'")
	var waiting sync.WaitGroup
	t.Cleanup(waiting.Wait) // before the connections are closed
	wait := func(conn *pgx.Conn, sql string) <-chan error {
		ended := make(chan error, 1)
		waiting.Go(func() {
			_, err := conn.Exec(t.Context(), sql)
			ended <- err
		})
		for waits := false; !waits; {
			if err := db.Pool.QueryRow(t.Context(), "select exists (select from pg_locks where pid = $1 and not granted and waitstart is not null)", conn.PgConn().PID()).Scan(&waits); err != nil {
				t.Fatal(err)
			}
		}
		return ended
	}
	got, gotLast := wait(second, "select pg_advisory_lock(advisory_lock_key('k'))"), wait(third, "select pg_advisory_lock_shared(8)")

	r := execute(t, env, "tree", "--name", "k")
	r.want(t, exitOK, "k (advisory) shared by first:", "")
	lines := strings.Split(strings.TrimSuffix(r.stdout, "\n"), "\n")
	if len(lines) != 4 {
		t.Fatalf("want four lines:\n%s", r.stdout)
	}
	for i, want := range []string{
		fmt.Sprintf("k (advisory) shared by first:%d", holder),
		fmt.Sprintf("  second:%d waits for ", waiter),
		fmt.Sprintf("    #8 (advisory) held by second:%d", waiter),
		fmt.Sprintf(`      th?ird:%d waits for `, last), // the server keeps ASCII that is printed
	} {
		if got := lines[i]; !strings.HasPrefix(strings.ReplaceAll(got, `\x1b`, "?"), want) {
			t.Errorf("line %d: %q, want %q", i, got, want)
		}
	}

	var queues []queueView
	r = execute(t, env, "tree", "-o", "json", "--name", "k")
	if err := json.Unmarshal([]byte(r.stdout), &queues); err != nil || r.code != exitOK || len(queues) != 1 || len(queues[0].Waiters) != 1 {
		t.Fatalf("%v:\n%s", err, r.stdout)
	}
	k, next := queues[0], queues[0].Waiters[0]
	if k.Key != "k" || k.Kind != kindAdvisory || len(k.Holders) != 1 || k.Holders[0].PID != int32(holder) || k.Holders[0].State != "live" ||
		next.PID != int32(waiter) || next.Mode != "exclusive" || !slices.Equal(next.BlockedBy, []int32{int32(holder)}) || next.Since.IsZero() ||
		len(next.Blocks) != 1 || next.Blocks[0].Key != "#8" || next.Blocks[0].Waiters[0].PID != int32(last) || next.Blocks[0].Waiters[0].Mode != "shared" {
		t.Errorf("%s", r.stdout)
	}
	if !strings.Contains(r.stdout, `"blocked_by": [`) || !strings.Contains(r.stdout, `"blocks": []`) {
		t.Errorf("the names have changed:\n%s", r.stdout)
	}

	for _, step := range []struct {
		conn *pgx.Conn
		next <-chan error
	}{{first, got}, {second, gotLast}} {
		if _, err := step.conn.Exec(t.Context(), "select pg_advisory_unlock_all()"); err != nil {
			t.Fatal(err)
		}
		if err := <-step.next; err != nil {
			t.Fatal(err)
		}
	}
}

func TestReapSaysHowManyItRemoved(t *testing.T) {
	t.Parallel()
	env := []string{"DATABASE_URL=" + withLeases(t).URL}
	execute(t, env, "reap").want(t, exitOK, "removed 1 lease\n", "") // that of two days ago
	execute(t, env, "reap", "--older-than", "10s", "-o", "json").want(t, exitOK, "{\n  \"removed\": 1\n}\n", "")
	execute(t, env, "reap", "--older-than", "0s").want(t, exitOK, "nothing to remove\n", "")
	execute(t, env, "ls", "--expired", "--exit-code").want(t, exitNone, "KEY", "")
}

// evicted runs evict, again while a session is too busy to answer.
func evicted(t *testing.T, env []string, args ...string) result {
	t.Helper()
	args = append([]string{"evict", "--reason", "the node is drained"}, args...)
	r := execute(t, env, args...)
	for r.code == exitBusy {
		if r = execute(t, env, args...); r.code == exitNotEvicted { // it was given back between the two
			return result{exitOK, "evicted: ", ""}
		}
	}
	return r
}

func TestEvictTakesALockOfEachKindAway(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	leases, err := pgxlock.NewLeaseLocker(db.Pool, &pgxlock.LeaseConfig{Renew: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	sessions, err := pgxlock.NewAdvisoryLocker(db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // before the pool
		if err := errors.Join(leases.Close(context.Background()), sessions.Close(context.Background())); err != nil {
			t.Error(err)
		}
	})
	permits, err := leases.Semaphore(1)
	if err != nil {
		t.Fatal(err)
	}
	acquired := func(lock *pgxlock.Lock, err error) *pgxlock.Lock {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return lock
	}
	lease := acquired(leases.Acquire(t.Context(), "k"))
	share, unharmed := acquired(leases.Acquire(t.Context(), "report", pgxlock.Shared)), acquired(leases.Acquire(t.Context(), "report", pgxlock.Shared))
	permit, another := acquired(permits.Acquire(t.Context(), "jobs")), acquired(permits.Acquire(t.Context(), "mails"))
	named, numbered := acquired(sessions.Acquire(t.Context(), "k")), acquired(sessions.Acquire(t.Context(), pgxlock.RawKey2(4, -2)))

	several := evicted(t, env, "k", "--yes")
	several.want(t, exitUsage, "", `pgxlock: "k" has several holders; choose one with --kind or --holder or --pid or --token`)
	if !strings.Contains(several.stderr, fmt.Sprintf("\n  --kind lease --holder '%s' --token %d  since 20", lease.Holder(), lease.Token())) || strings.Count(several.stderr, "\n") != 4 {
		t.Errorf("%s", several.stderr)
	}
	shares := evicted(t, env, "report", "--yes")
	shares.want(t, exitUsage, "", `"report" has several holders; choose one with --holder`) // shares have one token
	if !strings.HasPrefix(shares.stderr, "pgxlock: the holders of \"report\":\n  --holder '") || !strings.Contains(shares.stderr, "\n  --holder '"+unharmed.Holder()+"'  since 20") {
		t.Errorf("%s", shares.stderr)
	}
	evicted(t, env, "report", "--yes", "--holder", share.Holder()[:2]+"…").want(t, exitUsage, "", "several holders; choose one with --holder")
	evicted(t, env, "report", "--yes", "--holder", share.Holder()[:len(share.Holder())-3]).want(t, exitNotEvicted, "", "that holder does not hold")
	evicted(t, env, "report", "--yes", "--kind", "advisory").want(t, exitNotEvicted, "", `nobody holds "report" as an advisory lock; nothing was evicted`)
	for _, test := range []struct {
		lock *pgxlock.Lock
		args []string
		says string
	}{
		{lease, []string{"k", "--kind", "lease"}, `evicted: lease "k" from ` + lease.Holder()},
		{share, []string{"report", "--holder", readable.Shortened(share.Holder(), len(share.Holder())-3), "--token", fmt.Sprint(share.Token())}, `evicted: shared lease "report" from ` + share.Holder()}, // as ls shows it
		{permit, []string{permit.Key()}, "evicted: lease"},
		{another, []string{"mails"}, `evicted: lease "mails#1" from ` + another.Holder()}, // of its semaphore
		{named, []string{"k"}, "evicted: "},
		{numbered, []string{"#4,-2"}, "evicted: "},
	} {
		if test.lock.Err() != nil {
			t.Errorf("%v: %v", test.args, test.lock.Err())
		}
		evicted(t, env, append(test.args, "--yes")...).want(t, exitOK, test.says, "")
		<-test.lock.Lost()
		if err := test.lock.Err(); !errors.Is(err, pgxlock.ErrEvicted) || !strings.Contains(err.Error(), "the node is drained") {
			t.Errorf("%v: it was told: %v", test.args, err)
		}
		evicted(t, env, append(test.args, "--yes")...).want(t, exitNotEvicted, "", "nothing was evicted")
	}
	if unharmed.Err() != nil {
		t.Errorf("another one is evicted: %v", unharmed.Err())
	}
}

// A semaphore's name stands for those of its permits that are held.
func TestEvictFindsThePermitsOfASemaphoreByItsName(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	db.Exec(t, `select acquire_lock('jobs#1', 'pod-1', 3600, '{"reader": 3}'), acquire_lock('jobs#3', 'pod-3', 3600), acquire_lock('jobs#x', 'no permit', 3600), acquire_lock('jobs', 'pod-0', 3600)`)
	for _, test := range []struct {
		args         []string
		code         int
		stdout, says string
	}{
		{[]string{"jobs"}, exitOK, `evicted: lease "jobs" from pod-0`, ""}, // whose name it is comes first
		{[]string{"jobs"}, exitUsage, "", `"jobs" has several holders; choose one with its key or --holder or --token`},
		{[]string{"jobs", "--kind", "advisory"}, exitNotEvicted, "", `nobody holds "jobs"`},
		{[]string{"jobs", "--terminate"}, exitNotEvicted, "", `nobody holds "jobs"`},
		{[]string{"jobs", "--holder", "pod-2"}, exitNotEvicted, "", "  'jobs#1' --holder 'pod-1' --token "},
		{[]string{"jobs", "--holder", "pod-"}, exitNotEvicted, "", `, {"reader": 3}` + "\n"},
		{[]string{"jobs", "--holder", "pod-"}, exitNotEvicted, "", "; give the whole id, or as ls shortens it, such as pod-1\n"},
		{[]string{"jobs", "--holder", "no permit"}, exitNotEvicted, "", "that holder does not hold"},
		{[]string{"jobs", "--holder", "po...3"}, exitOK, `evicted: lease "jobs#3" from pod-3`, ""},
		{[]string{"jobs", "--kind", "lease"}, exitOK, `evicted: lease "jobs#1" from pod-1`, ""}, // the only one that is left
		{[]string{"jobs"}, exitNotEvicted, "", `nobody holds "jobs"`},
	} {
		execute(t, env, append([]string{"evict", "--reason", "why", "--yes"}, test.args...)...).want(t, test.code, test.stdout, test.says)
	}
}

func TestSessionThatDoesNotGiveALockBackIsEndedByTerminate(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	_, pid := session(t, db, "set application_name = 'psql'; select pg_advisory_lock(42), pg_advisory_lock_shared(42), pg_advisory_lock_shared(4, 2), pg_advisory_lock(advisory_lock_key('k'))")
	_, other := session(t, db, "select pg_advisory_lock_shared(4, 2)")
	execute(t, env, "evict", "#42", "--reason", "why", "--yes").want(t, exitBusy, "", fmt.Sprintf(`process %d was asked to release "#42" and still holds it: it is no Locker's, cannot listen, or hangs; --terminate ends its session`, pid))
	execute(t, env, "evict", "#4,2", "--reason", "why", "--yes", "--terminate").want(t, exitUsage, "", "has several holders")
	role := newRole(t, db)
	db.Exec(t, "select grant_locks('"+role+"', 'administration')")
	for _, says := range []string{`evict "#42": role `, `evict "#42": ERROR: `} { // may not see when it began; may not end it
		r := execute(t, as(role, db), "evict", "#42", "--reason", "why", "--yes", "--terminate")
		if r.want(t, exitDenied, "", says); strings.Count(r.stderr, "; GRANT pg_monitor, pg_signal_backend TO ") != 1 || strings.Contains(r.stderr, "grant_locks") {
			t.Errorf("not the rights that it takes: %s", r.stderr)
		}
		if named := fmt.Sprintf(`the session of process %d (application "psql", role "`, pid); !strings.Contains(r.stderr, named) || strings.Contains(r.stderr, `""`) {
			t.Errorf("not what is known of the session: %s", r.stderr)
		}
		db.Exec(t, "grant pg_monitor to "+role)
	}
	r := execute(t, env, "evict", "#4,2", "--reason", "why", "--yes", "--terminate", "--pid", fmt.Sprint(pid), "--name", "k")
	r.want(t, exitOK, fmt.Sprintf(`evicted: shared advisory lock "#4,2" from psql:%d`, pid), fmt.Sprintf(`the session of process %d (application "psql", role`, pid))
	for _, key := range []string{"#42", "#4,2", "k"} {
		if !strings.Contains(r.stderr, fmt.Sprintf("  holds %q, ", key)) || !strings.Contains(r.stdout, fmt.Sprintf("advisory lock %q from psql:%d, process", key, pid)) {
			t.Errorf("%s is not said to end, or to have ended: %+v", key, r)
		}
	}
	var left []uint32
	if err := db.Pool.QueryRow(t.Context(), "select array_agg(distinct pid) from pg_locks where locktype = 'advisory' and pid in ($1, $2)", pid, other).Scan(&left); err != nil || !slices.Equal(left, []uint32{other}) {
		t.Errorf("the sessions %d are left, want %d: %v", left, other, err)
	}
	execute(t, env, "evict", "#42", "--reason", "why", "--yes", "--terminate").want(t, exitNotEvicted, "", `nobody holds "#42" as an advisory lock; nothing was evicted`)
}

// A lock may be named as watch shows the number of another one.
func TestEvictAsksWhichIsMeantWhereANumberIsAName(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	leases := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "lease"})
	named := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "named"})
	numbered := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "numbered"})
	all := []*pgxlock.Lock{testkit.Acquire(t, leases, "#42"), testkit.Acquire(t, named, "#42"), testkit.Acquire(t, numbered, pgxlock.RawKey(42))}
	execute(t, env, "evict", "#42", "--reason", "hangs", "--yes").want(t, exitUsage, "", "several holders")
	execute(t, env, "evict", "#42", "--reason", "hangs", "--yes", "--kind", "advisory").want(t, exitUsage, "", "several holders")
	for _, lock := range all {
		if err := lock.Renew(t.Context()); err != nil {
			t.Error(err)
		}
	}
	testkit.Release(t, all[2])
	execute(t, env, "evict", "#42", "--reason", "hangs", "--yes", "--kind", "advisory").want(t, exitOK, "named", "")
	<-all[1].Lost()
	execute(t, env, "evict", "#42", "--reason", "hangs", "--yes").want(t, exitOK, "lease", "")
}

func TestEvictTakesNothingFromSomebodyElse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	env := []string{"DATABASE_URL=" + withLeases(t).URL}
	for _, test := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"nothing", "--yes"}, exitNotEvicted, `nobody holds "nothing"; nothing was evicted`},
		{[]string{"import", "--yes"}, exitNotEvicted, `nobody holds "import"`}, // it has expired
		{[]string{"order:1", "--yes", "--holder", "pod-2"}, exitNotEvicted, `that holder does not hold "order:1"; nothing was evicted; held: lease "order:1" from pod-1, token`},
		{[]string{"order:1", "--yes", "--token", "1"}, exitNotEvicted, "that holder does not hold"},
		{[]string{"order:1", "--yes", "--terminate"}, exitNotEvicted, "nobody holds"}, // no session does
		{[]string{"order:1"}, exitUsage, "--yes is missing"},
		{[]string{"order:1", "--yes", "--reason", ""}, exitUsage, "--reason is missing"},
		{[]string{"order:1", "--yes", "--reason", strings.Repeat("x", 901)}, exitUsage, "--reason has 901 bytes"},
		{[]string{"order:1", "--yes", "--holder", ""}, exitUsage, "--holder is empty"},
		{[]string{"order:1", "--yes", "--terminate", "--kind", "lease"}, exitUsage, "a lease has none"},
		{[]string{"order:1", "--yes", "--kind", "memory"}, exitUsage, "use lease or advisory"},
		{[]string{"order:1", "--yes", "--kind", "session"}, exitUsage, "use lease or advisory"},
		{[]string{"", "--yes"}, exitUsage, "key"},
		{[]string{"--yes"}, exitUsage, "the key is missing: pgxlock evict KEY --reason TEXT (see"},
	} {
		r := execute(t, env, append([]string{"evict", "--reason", "why"}, test.args...)...)
		if r.want(t, test.code, "", test.says); strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%v: not one line: %q", test.args, r.stderr)
		}
	}
	execute(t, env, "ls", "--state", "live", "--holder", "pod-1", "--exit-code").want(t, exitOK, "order:1", "")
}

func TestMonitorsCommandsSayWhatIsMissing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	nothing := []string{"DATABASE_URL=" + empty(t).URL}
	execute(t, nothing, "tree").want(t, exitInternal, "", "run pgxlock migrate up: this database has no pgxlock")
	execute(t, nothing, "reap").want(t, exitInternal, "", "run pgxlock migrate up: this database has no pgxlock")
	for _, command := range []string{"reap", "once k --every 1d -- true"} { // and no field of a struct
		execute(t, nothing, strings.Fields(command)...).want(t, exitInternal, "", "; --schema names a schema)")
	}
	execute(t, nothing, "evict", "k", "--reason", "why", "--yes").want(t, exitInternal, "", "pgxlock migrate up")
	execute(t, nothing, "evict", "k", "--reason", "why", "--yes", "--terminate").want(t, exitNotEvicted, "", "nobody holds") // which needs no tables
	for _, command := range []string{"tree", "watch", "reap", "evict k --reason why --yes"} {
		args := strings.Fields(command)
		execute(t, []string{"DATABASE_URL=postgres://nobody@127.0.0.1:1/nowhere"}, args...).want(t, exitUnavailable, "", "start the server, or correct the host and the port")
		execute(t, nothing, append(args, "--schema", "pg_x")...).want(t, exitUsage, "", "must not begin with pg_")
	}
	execute(t, nothing, "watch", "--every", "10ms").want(t, exitUsage, "", "--every is 10ms, it must be at least 1s")
	execute(t, nothing, "reap", "--older-than", "-1s").want(t, exitUsage, "", "--older-than is -1s")
	execute(t, nil, "__complete", "evict", "k", "--kind", "").want(t, exitOK, "advisory", "Completion ended")
	execute(t, nil, "__complete", "watch", "-o", "").want(t, exitOK, "json", "Completion ended")
}

func TestRoleWithoutRightsIsToldWhatItMayNot(t *testing.T) {
	t.Parallel()
	db := withLeases(t)
	env := as("pg_monitor", db)
	commands := []string{"ls --exit-code", "acquire k", "reap", "tree", "evict order:1 --reason why --yes", "ls --kind lease", "run k -- true", "runs forget k"}
	kinds := []string{"monitoring", "application", "administration", "monitoring", "administration", "monitoring", "application", "administration"}
	if testing.Short() {
		commands = commands[:3]
	}
	owner := "as role " + db.Pool.Config().ConnConfig.User
	for i, command := range commands {
		r := execute(t, env, strings.Fields(command)...)
		r.want(t, exitDenied, "", "(SQLSTATE 42501); "+owner+": SELECT public.grant_locks('pg_monitor', '"+kinds[i]+"')\n")
	}
	lock := db.Connect(t)
	if _, err := lock.Exec(t.Context(), "select pg_advisory_lock_shared(42)"); err != nil {
		t.Fatal(err)
	}
	r := execute(t, env, "ls")
	if r.want(t, exitDenied, "#42", owner); strings.Count(r.stderr, "grant_locks(") != 1 || strings.Count(r.stderr, "42501") != 1 || !strings.Contains(r.stderr, "not shown: leases, names behind the numbers of advisory locks, the queues of waiters") {
		t.Errorf("the right is not named once:\n%s", r.stderr)
	}
}

// A right that only addresses and transactions take is lacking where those are shown.
func TestRightToSeeSessionsIsMissedOnlyWhereTheyAreShown(t *testing.T) {
	t.Parallel()
	db := withLeases(t)
	role := newRole(t, db)
	db.Exec(t, "select grant_locks('"+role+"', 'monitoring')")
	silent, says := func(command string) {
		t.Helper()
		if r := execute(t, as(role, db), strings.Fields(command)...); r.code != exitOK || r.stderr != "" {
			t.Errorf("%s: %+v", command, r)
		}
	}, func(command, want string) {
		t.Helper()
		if r := execute(t, as(role, db), strings.Fields(command)...); r.code != exitOK || !strings.HasPrefix(r.stderr, "pgxlock: not shown: "+want+" of other roles' sessions: ") {
			t.Errorf("%s: %+v", command, r)
		}
	}
	for _, command := range []string{"ls", "ls -o json", "tree", "tree -o json"} {
		silent(command)
	}
	says("watch --once", "transactions")
	session(t, db, "select pg_advisory_lock(42)")
	says("ls", "addresses and transactions")
	says("ls -o json", "addresses and transactions")
	says("watch --once", "addresses and transactions")
	for _, command := range []string{"ls --kind lease", "ls --prefix order", "tree", "tree -o json"} {
		silent(command)
	}
}

func TestScreenIsWrittenOverAndNotOverflowed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		rows, top    int
		status, want string
		at           int
	}{
		{0, 0, "", "a|b|c|d|", 0},
		{5, 0, "", "a|b|c|d|", 0},
		{4, 0, "", "a|b|... 2 more lines|", 0},
		{0, 0, "status", "a|b|c|d|status|", 0},
		{6, 0, "status", "a|b|c|d|status|", 0},
		{5, 0, "status", "a|b|... 2 more lines|status|", 0},
		{5, 1, "status", "b|c|... 1 more lines, 1 above|status|", 1},
		{4, 2, "", "c|d|... 0 more lines, 2 above|", 2},
		{4, 99, "", "c|d|... 0 more lines, 2 above|", 2},
		{5, 99, "", "a|b|c|d|", 0},
		{2, 99, "", "a|b|c|d|", 0},
	} {
		text, at := redrawn("a\nb\nc\nd\n", test.rows, test.top, test.status)
		got, begins := strings.CutPrefix(text, home+cutLines)
		got, ends := strings.CutSuffix(got, wrapLines+restOfAll)
		if got = strings.ReplaceAll(got, restOfRow+"\n", "|"); got != test.want || at != test.at || !begins || !ends {
			t.Errorf("%d rows from line %d: %q from line %d", test.rows, test.top, text, at)
		}
	}
}

func TestNamesOfOthersCannotCommandTheTerminal(t *testing.T) {
	t.Parallel()
	const evil = "a\x1b[2Jb\nc"
	at := time.Now()
	shot := monitor.Snapshot{
		At:      at,
		Holders: []pgxlock.Holder{{Key: evil, Kind: pgxlock.KindLease, ID: evil, Metadata: evil, State: pgxlock.StateLive, Since: at.Add(-time.Minute), Expires: at.Add(time.Minute)}},
		Expired: []pgxlock.Holder{{Key: "old", Kind: pgxlock.KindLease, State: pgxlock.StateAbandoned, Label: evil, Client: evil}},
		Waiters: []monitor.Waiter{{Key: evil, Kind: pgxlock.KindLease, Owner: evil, Behind: 2, Woken: true}},
		Missing: []string{evil},
	}
	text, err := frame(true, shot, true, sheet{})
	if err != nil {
		t.Fatal(err)
	}
	var tree strings.Builder
	if err := printTree(&tree, true, 0, at, shot.Waits().Tree()); err != nil {
		t.Fatal(err)
	}
	for text, lines := range map[string]int{text: 10, tree.String(): 2} {
		if strings.Contains(text, "\x1b[2J") || strings.Count(text, "\n") != lines || !strings.Contains(text, `a\x1b[2Jb\nc`) {
			t.Errorf("want %d lines: %q", lines, text)
		}
	}
	if want := " for 1m0s\n"; !strings.Contains(tree.String(), want) || !strings.Contains(tree.String(), "waits, and 2 more in its process, woken\n") {
		t.Errorf("%s", tree.String())
	}
}

func TestExpiredLeaseWasHeldUntilItsExpiry(t *testing.T) {
	t.Parallel()
	at := time.Now()
	var table strings.Builder
	if err := printHolders(&table, false, sheet{}, at, []pgxlock.Holder{{Key: "k", State: pgxlock.StateAbandoned, Since: at.Add(-72 * time.Hour), Expires: at.Add(-48 * time.Hour)}}); err != nil {
		t.Fatal(err)
	}
	if got := table.String(); !strings.Contains(got, " 1d0h ") || !strings.Contains(got, " -2d0h") {
		t.Errorf("%s", got)
	}
}

// A Monitor says metadata as it was given.
func TestNoteSaysMetadataAsItWasGiven(t *testing.T) {
	t.Parallel()
	for metadata, want := range map[string]string{"pod-7": "pod-7", `"pod-7"`: `"pod-7"`, "{}": "{}", `{"a": 1}`: `{"a": 1}`, "a\nb": `a\nb`, "": ""} {
		if got := note(pgxlock.Holder{Metadata: metadata}); got != want {
			t.Errorf("%q: %q, want %q", metadata, got, want)
		}
	}
}

// What nobody knows is an empty field, or none: not a year long ago, and no number.
func TestUnknownColumnsAreEmpty(t *testing.T) {
	t.Parallel()
	unknown := pgxlock.Holder{Key: "#42", Raw: true, Kind: pgxlock.KindAdvisory, ID: "psql:1", PID: 1, State: pgxlock.StateLive}
	shot := monitor.Snapshot{
		At: time.Now(), Holders: []pgxlock.Holder{unknown},
		Waiters: []monitor.Waiter{{Key: "#42", Raw: true, Kind: pgxlock.KindAdvisory, Owner: "psql:2", PID: 2, BlockedBy: []int32{1}}},
	}
	text, err := frame(false, shot, false, sheet{})
	if err != nil {
		t.Fatal(err)
	}
	var tree, all, queues strings.Builder
	if err := errors.Join(printTree(&tree, false, 0, shot.At, shot.Waits().Tree()), printJSON(&all, viewSnapshot(shot)), printJSON(&queues, views(shot.Waits().Tree(), viewQueue))); err != nil {
		t.Fatal(err)
	}
	if want := "#42 (advisory) held by psql:1\n  psql:2 waits\n"; tree.String() != want {
		t.Errorf("%s", tree.String())
	}
	for _, line := range []string{"#42  advisory  psql:2          2            psql:1", "#42  advisory  live                              psql:1         1"} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("no line %q:\n%s", line, text)
		}
	}
	for _, said := range []string{text, tree.String(), all.String(), queues.String(), described(unknown), heldBy(shot.Holders)} {
		if strings.Contains(said, "0001") || strings.Contains(said, "acquired_at") || strings.Contains(said, "since") || strings.Contains(said, "year") {
			t.Errorf("%s", said)
		}
	}
}

// In full, as the note of ls: it may say what is to be done.
func TestWatchSaysWhyAHolderWasEvicted(t *testing.T) {
	t.Parallel()
	const why = "hangs since the deploy of eleven o'clock, INC-7\nask ops"
	shot := monitor.Snapshot{
		At:      time.Now(),
		Holders: []pgxlock.Holder{{Key: "k", Kind: pgxlock.KindAdvisory, ID: "A:1", PID: 1, State: pgxlock.StateLive, Client: "10.0.0.7", EvictedBy: "postgres", EvictionReason: why}},
		Expired: []pgxlock.Holder{{Key: "old", Kind: pgxlock.KindLease, ID: "*evicted", State: pgxlock.StateExpired, Metadata: "pod-7", EvictedBy: "postgres", EvictionReason: why}},
	}
	text, err := frame(false, shot, false, sheet{})
	const want = `evicted by postgres: hangs since the deploy of eleven o'clock, INC-7\nask ops`
	if err != nil || !strings.Contains(text, "  being "+want+"\n") || !strings.Contains(text, "  "+want+"\n") {
		t.Errorf("%v\n%s", err, text)
	}
	view := viewSnapshot(shot)
	for _, h := range append(view.Holders, view.Expired...) {
		encoded, err := json.Marshal(h)
		if err != nil || !strings.Contains(string(encoded), `"evicted_by":"postgres","eviction_reason":"hangs since`) { // as ls calls it
			t.Errorf("%s, %v", encoded, err)
		}
	}
}

// A number of a user may carry the mark of pgxlock's own by chance: --name says whose it is.
func TestNumberWithTheMarkIsAUsersIfItIsNamed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	const number = "#8100966466993600997"
	_, pid := session(t, db, "select pg_advisory_lock("+number[1:]+")")
	evict := []string{"evict", number, "--reason", "why", "--yes", "--terminate"}
	execute(t, env, evict...).want(t, exitNotEvicted, "", "belongs to pgxlock itself")
	execute(t, env, append(evict, "--name", number)...).want(t, exitOK, fmt.Sprintf("process %d", pid), `holds "`+number+`"`)
}

func TestTreeSaysWhatHasNoHolderAndWhatStandsAbove(t *testing.T) {
	t.Parallel()
	queue := func(key string, waiters ...monitor.Blocked) monitor.Queue {
		return monitor.Queue{LockID: monitor.LockID{Kind: pgxlock.KindLease, Key: key}, Waiters: waiters}
	}
	circle := queue("b", monitor.Blocked{Waiter: &monitor.Waiter{Owner: "two"}, Blocks: []monitor.Queue{queue("a")}})
	var tree strings.Builder
	if err := printTree(&tree, false, 0, time.Now(), []monitor.Queue{queue("a", monitor.Blocked{Waiter: &monitor.Waiter{Owner: "one"}, Blocks: []monitor.Queue{circle}})}); err != nil {
		t.Fatal(err)
	}
	const want = `a (lease) held by nobody (the next waiter is about to acquire it)
  one waits
    b (lease) held by nobody (the next waiter is about to acquire it)
      two waits
        a (lease) held by nobody (the next waiter is about to acquire it): see elsewhere
`
	if tree.String() != want {
		t.Errorf("%s", tree.String())
	}
}

func TestTreeNamesNobodyWhereHoldersCannotBeRead(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	shot := monitor.Snapshot{
		Waiters: []monitor.Waiter{{Key: "a", Kind: pgxlock.KindLease, Owner: "one"}, {Key: "b", Kind: pgxlock.KindAdvisory, Owner: "two"}},
		Unread:  monitor.Unread{Leases: errors.New("denied")},
	}
	var tree, list strings.Builder
	if err := errors.Join(printTree(&tree, false, 0, time.Now(), shot.Waits().Tree()), printJSON(&list, views(shot.Waits().Tree(), viewQueue))); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a (lease) held by holders that cannot be shown\n", "b (advisory) held by nobody "} {
		if !strings.Contains(tree.String(), want) {
			t.Errorf("no %q:\n%s", want, tree.String())
		}
	}
	if strings.Count(list.String(), `"holders_unread": true`) != 1 {
		t.Errorf("%s", list.String())
	}
}
