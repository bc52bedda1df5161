//go:build unix

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// A candidate is a pgxlock lead with a health file, and an address that says whether it leads.
type candidate struct {
	*running
	file, addr string
}

// startLead starts lead for the key k.
func startLead(t *testing.T, db *pgtest.DB, script string, flags ...string) *candidate {
	t.Helper()
	c := &candidate{file: filepath.Join(t.TempDir(), "leader.json")}
	c.running = startCommand(t, "lead", db.URL, script, append(flags, "--health-file", c.file, "--health-addr", ":0", "k")...)
	pgtest.Until(t, "it answers requests", func() bool {
		c.addr = regexp.MustCompile(`http://127\.0\.0\.1:\d+/`).FindString(c.stderr.String())
		return c.addr != ""
	})
	return c
}

// leads fails the test unless both say so.
func (c *candidate) leads(t *testing.T, when string, want bool) {
	t.Helper()
	_, err := os.Stat(c.file)
	if there := err == nil; there != want || !there && !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: health file: %v; want %t", when, err, want)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, c.addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	_ = response.Body.Close()
	if code := map[bool]int{true: http.StatusOK, false: http.StatusServiceUnavailable}[want]; response.StatusCode != code {
		t.Errorf("%s: it answers %s, want %d", when, response.Status, code)
	}
}

const obedient = "trap 'echo told; exit 0' TERM"

func TestLeadHandsOverWhenItsLockIsLostAndWhenItIsAskedTo(t *testing.T) {
	t.Parallel()
	ends := map[string]string{
		"lease": "select evict_lock(lock_name, holder_id, fencing_token, 'why') from lock_leases where lock_name = 'k'",
		"advisory": "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database()) " +
			"and granted and objsubid = 1 and (classid::bigint << 32 | objid::bigint) = advisory_lock_key('k')",
	}
	if testing.Short() {
		delete(ends, "advisory")
	}
	for kind, lose := range ends {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := migrated(t)
			flags := append([]string{"--kind", kind}, roomy...)
			a := startLead(t, db, trapping(obedient), flags...)
			a.says(t, "ready")
			a.leads(t, "first", true)
			b := startLead(t, db, trapping(obedient), flags...)
			untilWaits(t, db, "k")
			b.leads(t, "a candidate", false)
			b.reports(t, `waiting for "k", held by `)

			db.Exec(t, lose)
			a.says(t, "told")
			a.leads(t, "after its lock was lost", false)
			b.says(t, "ready")
			b.leads(t, "after the other one", true)

			untilWaits(t, db, "k")
			execute(t, nil, "step-down", "--database-url", db.URL, "--reason", "the deploy", "k").
				want(t, exitOK, `asked the holder of "k" to step down: `, "")
			b.says(t, "told")
			b.leads(t, "after it was asked to step down", false)
			a.says(t, "ready")
			a.leads(t, "again", true)
			if text := b.stderr.String(); !strings.Contains(text, `lead "k": asked to step down by `) || !strings.Contains(text, "the deploy; ending the command\n") {
				t.Errorf("it said %q", text)
			}

			_ = a.stdin.Close() // its command ends by itself
			a.ends(t, exitOK)
			a.reports(t, `no longer leads for "k"; a candidate again`)
			a.reports(t, `no longer leads for "k": the command exited with 0`)
			b.says(t, "ready")
			b.signal(t, syscall.SIGTERM)
			b.says(t, "told")
			b.ends(t, exitOK)
			if text := b.stderr.String(); strings.Count(text, `pgxlock: leads for "k"`) != 2 || strings.Count(text, `pgxlock: no longer leads for "k"`) != 2 {
				t.Errorf("of two terms it said %q", text)
			}
			for _, c := range []*candidate{a, b} {
				if _, err := os.Stat(c.file); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("a health file is left: %v", err)
				}
			}
		})
	}
}

func TestLeadIsACandidateAgainAfterAnOutageLongerThanItsTTL(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	db := &pgtest.DB{Pool: pgtest.Pool(t, server.URL("postgres")), URL: server.URL("postgres"), Name: "postgres"}
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	kinds := map[string]*candidate{"lease": nil, "advisory": nil}
	for kind := range kinds {
		kinds[kind] = startLead(t, db, trapping(obedient), "--kind", kind, "--ttl", "6s")
		kinds[kind].says(t, "ready")
	}
	if err := server.Crash(); err != nil {
		t.Fatal(err)
	}
	for _, c := range kinds {
		c.says(t, "told")
		c.reports(t, `no longer leads for "k"; a candidate again`)
		pgtest.Until(t, "it is a candidate, after a release that failed", func() bool {
			return strings.Contains(c.stderr.String(), `cannot campaign; trying again: acquire "k": cannot connect`) || len(marked(c.mark)) == 0
		})
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	for kind, c := range kinds {
		c.says(t, "ready")
		c.reports(t, "pgxlock: the listener is back\n")
		_ = c.stdin.Close() // its command ends by itself
		c.ends(t, exitOK)
		text := c.stderr.String()
		for _, unwanted := range []string{"release failed", "renewal failed", "leadership lost", "token 0", "session of advisory locks"} {
			if strings.Contains(text, unwanted) {
				t.Errorf("%s: %q in %q", kind, unwanted, text)
			}
		}
		if tokens, renewals := strings.Count(text, `leads for "k" with token `), strings.Count(text, "connection refused; start the server, or correct the host and the port; trying again: the lock"); kind == "lease" && tokens != 2 || renewals > 1 {
			t.Errorf("%s: %d tokens, %d lines of one cause: %q", kind, tokens, renewals, text)
		}
	}
}

func TestLeadTellsWhoLeads(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	l := startLead(t, db, `echo "$PGXLOCK_KEY $PGXLOCK_HOLDER $PGXLOCK_TOKEN"; cat; exit 7`, "--metadata", "10.0.0.7")
	got := l.line()
	text, err := os.ReadFile(l.file)
	var report healthReport
	if err == nil {
		err = json.Unmarshal(text, &report)
	}
	if want := fmt.Sprint(report.Key, " ", report.Holder, " ", report.Token); err != nil || got != want || report.Key != "k" {
		t.Errorf("the command was told %q, the file has %s: %v", got, text, err)
	}
	var want string
	if err := db.Pool.QueryRow(t.Context(), `select holder_id || ' ' || fencing_token from distributed_locks where lock_name = 'k' and metadata::text = '"10.0.0.7"'`).Scan(&want); err != nil || got != "k "+want {
		t.Errorf("the command was told %q, the leader is %q: %v", got, want, err)
	}
	_ = l.stdin.Close()
	l.ends(t, 7)
}

func TestLeadKillsACommandThatDoesNotStepDown(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	l := startLead(t, db, "trap '' TERM; echo $PGXLOCK_TOKEN; cat >/dev/null", "--ttl", "1m", "--grace", "5s")
	first := l.line()
	execute(t, nil, "step-down", "--database-url", db.URL, "k").want(t, exitOK, "asked", "")
	if second := l.line(); second == "" || second == first {
		t.Errorf("terms %q and %q: %s", first, second, l.stderr.String())
	}
	_ = l.stdin.Close()
	l.ends(t, exitOK)
}

func TestLeadIsNoCandidateAgainAfterASignal(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	l := startLead(t, db, trapping("trap 'echo told' TERM"), "--ttl", "1h", "--grace", "15m")
	l.says(t, "ready")
	execute(t, nil, "step-down", "--database-url", db.URL, "k").want(t, exitOK, "asked", "")
	l.says(t, "told")
	l.signal(t, syscall.SIGTERM)
	l.says(t, "told")
	_ = l.stdin.Close() // its command ends by itself
	l.ends(t, exitSignal+int(syscall.SIGTERM))
}

func TestSignalEndsACandidate(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	l := startLead(t, db, "echo leads")
	untilWaits(t, db, "k")
	l.signal(t, syscall.SIGTERM)
	l.ends(t, exitSignal+int(syscall.SIGTERM))
	if line := l.line(); line != "" {
		t.Errorf("it said %q", line)
	}
}

func TestLeadGoesOnTryingWhileThereIsNoServer(t *testing.T) {
	t.Parallel()
	l := startCommand(t, "lead", "postgres://me@"+closed+"/db", "echo leads", "k")
	pgtest.Until(t, "it says so", func() bool { return strings.Contains(l.stderr.String(), "\n") })
	l.signal(t, syscall.SIGTERM)
	l.ends(t, exitSignal+int(syscall.SIGTERM))
	lines := strings.Split(l.stderr.String(), "\n")
	if !strings.HasPrefix(lines[0], `pgxlock: cannot campaign; trying again: acquire "k": cannot connect as user "me"`) || !strings.Contains(lines[0], "connection refused; start the server") ||
		len(lines) != 3 || lines[1] != "pgxlock: ended by signal: terminated" {
		t.Errorf("it said %q", lines)
	}
}

func TestHealthFileThatAKilledLeaderLeftIsRemovedAndAnyOtherIsKept(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	l := startLead(t, db, trapping(obedient), "--ttl", "1h")
	l.says(t, "ready")
	refuses := func(path, says string) {
		t.Helper()
		before, err := os.ReadFile(path)
		r := execute(t, nil, "lead", "--database-url", db.URL, "other", "--health-file", path, "--", "true")
		if r.want(t, exitUsage, "", says); strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("not one line: %q", r.stderr)
		}
		if after, err2 := os.ReadFile(path); string(after) != string(before) || (err == nil) != (err2 == nil) {
			t.Errorf("%s has changed: %q, %v", path, after, err2)
		}
	}
	refuses(l.file, "is that of another leader; give each its own")
	dir := t.TempDir()
	made, err := (&healthFile{path: filepath.Join(dir, "new")}).make()
	if err != nil {
		t.Fatal(err)
	}
	if info, err := made.Stat(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("before it is locked, others can open it: %v, %v", info, err)
	}
	if err := errors.Join(made.Close(), os.Remove(made.Name())); err != nil {
		t.Error(err)
	}
	mine := filepath.Join(dir, "mine")
	if err := os.WriteFile(mine, []byte(`{"key": "my own"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	refuses(mine, "exists, and no pgxlock lead has made it; name another file")
	refuses(dir, "--health-file")
	refuses(filepath.Join(dir, "missing", "file"), "no such file or directory")

	stale := filepath.Join(dir, "stale")
	text, err := os.ReadFile(l.file)
	if err == nil {
		err = os.WriteFile(stale, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{l.file, stale} { // users that can read a file can lock it in these ways
		read, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer read.Close()
		if err := syscall.Flock(int(read.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			t.Fatalf("%s is locked with flock: %v", path, err)
		}
		if err := syscall.FcntlFlock(read.Fd(), syscall.F_SETLK, &syscall.Flock_t{Type: syscall.F_RDLCK}); (err == nil) != (path == stale) {
			t.Errorf("%s: a lock against reading: %v", path, err)
		}
	}
	refuses(l.file, "is that of another leader; give each its own")
	execute(t, nil, "lead", "--database-url", db.URL, "other", "--health-file", stale, "--", "cat", stale).want(t, exitOK, `{"key":"other","holder":"`, `leads for "other"`)
	if _, err := os.Stat(stale); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is left: %v", err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("beside mine there are %v: %v", files, err)
	}
}

func TestStepDownExitsWith1IfNobodyLeads(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	on := func(args ...string) result {
		return execute(t, []string{"DATABASE_URL=" + db.URL}, append([]string{"step-down"}, args...)...)
	}
	on("it's\x1b[31m").want(t, exitNoLeader, "", `pgxlock: nobody holds "it's\x1b[31m" exclusively, as a leader does; pgxlock watch shows who holds what`)
	on("#42").want(t, exitNoLeader, "", `nobody holds "#42" exclusively`)
	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), "select pg_advisory_lock(42), pg_advisory_lock(advisory_lock_key_in('x', 'y')), acquire_lock('k', 'team:pod:1:01J', 3600), acquire_lock('@x/z', 'named', 3600)"); err != nil {
		t.Fatal(err)
	}
	on("#42").want(t, exitOK, fmt.Sprintf(`asked the holder of "#42" to step down: process %d (only a leader does, pgxlock run does not)`, conn.PgConn().PID()), "")
	on("@x/y").want(t, exitOK, fmt.Sprint("process ", conn.PgConn().PID()), "")
	on("@x/z").want(t, exitOK, "step down: named (", "")
	on("#42", "--kind", "lease").want(t, exitNoLeader, "", "exclusively")
	on("k", "--kind", "advisory").want(t, exitNoLeader, "", "exclusively")
	on("k", "--kind", "lease").want(t, exitOK, `asked the holder of "k" to step down: team:pod:1:01J (`, "")
	on("k", "--reason", strings.Repeat("x", 1001)).want(t, exitUsage, "", "--reason must not be NULL, nor have more than 1000 bytes")
	on(strings.Repeat("k", 256)).want(t, exitUsage, "", "the key has 256 characters")
	execute(t, []string{"DATABASE_URL=postgres://me@" + closed + "/db"}, "step-down", "k").want(t, exitUnavailable, "", "connection refused")
	execute(t, []string{"DATABASE_URL=" + empty(t).URL}, "step-down", "k").want(t, exitInternal, "", "pgxlock migrate up")
}
