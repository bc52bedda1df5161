//go:build unix

package main

import (
	"bufio"
	"encoding/json"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A watching is a run of watch, with what it writes.
type watching struct {
	stop           func(t *testing.T)
	ended          func() int // waits for its end, and returns the exit code
	stdout, stderr *bufio.Reader
}

func startWatch(t *testing.T, url string, args ...string) watching {
	t.Helper()
	cmd := program(t, []string{"DATABASE_URL=" + url}, append([]string{"watch", "--every", "1s"}, args...)...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
		}
	})
	w := watching{stdout: bufio.NewReader(stdout), stderr: bufio.NewReader(stderr)}
	w.ended = func() int {
		_ = cmd.Wait() // the exit code says it
		return cmd.ProcessState.ExitCode()
	}
	w.stop = func(t *testing.T) {
		t.Helper()
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if said := line(w.stderr); said != "pgxlock: ended by signal: terminated" {
			t.Errorf("it said at last %q", said)
		}
		if code := w.ended(); code != exitSignal+int(syscall.SIGTERM) {
			t.Errorf("exit code %d", code)
		}
	}
	return w
}

// looks waits for the next snapshot.
func (w watching) looks(t *testing.T) {
	t.Helper()
	for {
		text, err := w.stdout.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(text, "lock table ") {
			return
		}
	}
}

func TestWatchWritesOneSnapshotAfterTheOtherWhenPiped(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := startWatch(t, withLeases(t).URL)
	for range 2 {
		stamp, counts, _ := strings.Cut(line(w.stdout), "  ")
		if _, err := time.Parse(time.RFC3339, stamp); err != nil || counts != "2 held, 0 waiting, 2 expired" {
			t.Fatalf("%q %q: %v", stamp, counts, err)
		}
		for _, want := range []string{"lock table ", "", "KEY ", "order:1  lease  live ", "order:2 ", "import ", "old ", ""} {
			if got := line(w.stdout); !strings.HasPrefix(got, want) || want == "" && got != "" || strings.Contains(got, "\x1b") {
				t.Errorf("%q, want %q", got, want)
			}
		}
	}
	w.stop(t)
}

func TestWatchSaysOnceThatTheServerIsAwayAndGoesOn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	w := startWatch(t, server.URL("postgres"), "-o", "json")
	snapshots := json.NewDecoder(w.stdout)
	next := func() (shot snapshotView) {
		t.Helper()
		if err := snapshots.Decode(&shot); err != nil {
			t.Fatal(err)
		}
		return shot
	}
	if one, two := next(), next(); !two.At.After(one.At) || one.Server.Room == 0 || one.Holders == nil || len(one.Missing) != 1 {
		t.Errorf("%+v, %+v", one, two)
	}
	if err := server.Crash(); err != nil {
		t.Fatal(err)
	}
	if said := line(w.stderr); !strings.HasPrefix(said, "pgxlock: cannot connect ") {
		t.Errorf("%q", said)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	var up time.Time
	if err := pgtest.Connect(t, server.URL("postgres")).QueryRow(t.Context(), "select clock_timestamp()").Scan(&up); err != nil {
		t.Fatal(err)
	}
	for !next().At.After(up) {
	}
	w.stop(t) // and has said nothing else
}

func TestWatchSaysOnceWhatIsNotShown(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := startWatch(t, empty(t).URL)
	for range 2 {
		w.looks(t)
	}
	if said := line(w.stderr); !strings.HasPrefix(said, "pgxlock: not shown: leases, ") {
		t.Errorf("%q", said)
	}
	w.stop(t) // and has said nothing else
}

func TestWatchEndsByWhatDoesNotPassByItself(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	w := startWatch(t, db.URL)
	w.looks(t)
	db.Exec(t, `select acquire_lock('k', 'me');
		create or replace view lock_leases as select lock_name, (1 / (random() * 0)::bigint)::text as state, holder_id, fencing_token,
			clock_timestamp() - acquired_at as held_for, expires_at - clock_timestamp() as remaining, acquired_at, expires_at, metadata from distributed_locks`)
	if said := line(w.stderr); !strings.Contains(said, "division by zero") {
		t.Errorf("%q", said)
	}
	if said := line(w.stderr); said != "" {
		t.Errorf("it said at last %q", said)
	}
	if code := w.ended(); code != exitInternal {
		t.Errorf("exit code %d", code)
	}
}

func TestWatchOncePrintsOneSnapshot(t *testing.T) {
	t.Parallel()
	env := []string{"DATABASE_URL=" + withLeases(t).URL}
	r := execute(t, env, "watch", "--once")
	r.want(t, exitOK, "2 held, 0 waiting, 2 expired\nlock table ", "")
	if strings.Count(r.stdout, "lock table ") != 1 || !strings.Contains(r.stdout, "order:1  lease  live ") {
		t.Errorf("not one snapshot:\n%s", r.stdout)
	}
	r = execute(t, env, "watch", "--once", "-o", "json")
	var shot snapshotView
	if err := json.Unmarshal([]byte(r.stdout), &shot); err != nil || r.code != exitOK || len(shot.Holders) != 2 || len(shot.Expired) != 2 || shot.Server.Room == 0 {
		t.Errorf("%+v: %v", r, err)
	}
	execute(t, env, "watch", "--once", "--every", "5").want(t, exitUsage, "", "--once and --every exclude each other; leave one out")
	execute(t, []string{"DATABASE_URL=postgres://me@" + closed + "/db"}, "watch", "--once").want(t, exitUnavailable, "", "connection refused")
	execute(t, []string{"DATABASE_URL=" + empty(t).URL}, "watch", "--once").want(t, exitInternal, "? held, ? waiting, ? expired", "pgxlock: not shown: leases, ")
}

// The locks that pgxlock takes for itself are shown with --internal only, and cannot be evicted.
func TestPgxlocksOwnLocksAreShownOnlyWithInternal(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	env := []string{"DATABASE_URL=" + db.URL}
	conn, _ := session(t, db, "select pg_advisory_lock(42), pg_advisory_lock(pgxlock_session_key(7))")
	var number string
	if err := conn.QueryRow(t.Context(), "select pgxlock_session_key(7)::text").Scan(&number); err != nil {
		t.Fatal(err)
	}
	look := func(args ...string) string {
		t.Helper()
		w := startWatch(t, db.URL, args...)
		w.looks(t)
		text := line(w.stdout)
		for row := line(w.stdout); row != ""; row = line(w.stdout) {
			text += row + "\n"
		}
		w.stop(t)
		return text
	}
	if text := look(); !strings.Contains(text, "#42 ") || strings.Count(text, "\n") != 2 {
		t.Errorf("%s", text)
	}
	if text := look("--internal"); !strings.Contains(text, "#42 ") || strings.Count(text, "\n") != 3 || !strings.Contains(text, "(pgxlock: liveness of a session)  advisory  live") || strings.Contains(text, number) {
		t.Errorf("%s", text)
	}
	for _, args := range [][]string{nil, {"--terminate"}} {
		args := append([]string{"evict", "#" + number, "--reason", "why", "--yes"}, args...)
		execute(t, env, args...).want(t, exitNotEvicted, "", `"#`+number+`" belongs to pgxlock itself (pgxlock: liveness of a session)`)
	}

	// A user who waits for one is seen beside it.
	waiter, _ := session(t, db, "select 1")
	ended := make(chan error, 1)
	go func() {
		_, err := waiter.Exec(t.Context(), "select pg_advisory_lock_shared(pgxlock_session_key(7))")
		ended <- err
	}()
	for waits := false; !waits; {
		if err := db.Pool.QueryRow(t.Context(), "select exists (select from pg_locks where pid = $1 and not granted and waitstart is not null)", waiter.PgConn().PID()).Scan(&waits); err != nil {
			t.Fatal(err)
		}
	}
	execute(t, env, "tree").want(t, exitOK, "nobody waits\n", "")
	execute(t, env, "tree", "--internal").want(t, exitOK, "(pgxlock: liveness of a session) (advisory) held by", "")
	if text := look("--internal"); !strings.Contains(text, "KEY                               KIND      WAITER") {
		t.Errorf("%s", text)
	}
	execute(t, env, "tree", "--internal", "-o", "json").want(t, exitOK, `"internal": true`, "")
	if _, err := conn.Exec(t.Context(), "select pg_advisory_unlock_all()"); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
