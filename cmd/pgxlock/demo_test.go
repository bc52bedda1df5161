package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestTheDemonstrationChecksAllItsClaims(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	// None of these may reach it: its server is its own.
	nowhere := "postgres://nobody@127.0.0.1:1/nowhere"
	r := execute(t, []string{
		"PGXLOCK_DATABASE_URL=" + nowhere, "DATABASE_URL=" + nowhere, "PGHOST=/nowhere", "PGSERVICE=nowhere",
		"PGUSER=nobody", "PGDATABASE=nowhere", "PGTARGETSESSIONATTRS=standby", "PGOPTIONS=-c default_transaction_read_only=on",
	}, "demo")
	r.want(t, exitOK, "All 9 claims checked", "")
	if !strings.HasPrefix(r.stdout, demoIntroduction) || !strings.Contains(demoIntroduction, "fencing token") {
		t.Errorf("it does not begin with what there is to see:\n%s", r.stdout)
	}
	if n := strings.Count(r.stdout, "no two processes were in the critical section"); n != 1 {
		t.Errorf("a claim is printed %d times", n)
	}
	for _, text := range []string{"PostgreSQL ", " from /", "SIGKILL", "SIGSTOP", "lock lost", "SQLSTATE LK001", "held by psql", "import:csv"} {
		if !strings.Contains(r.stdout, text) {
			t.Errorf("nothing about %q", text)
		}
	}
	if n := strings.Count(r.stdout, "\n  ok  "); n != 9 || strings.Contains(r.stdout, "\x1b") {
		t.Errorf("%d claims were found true on the way, want 9 and no colors:\n%s", n, r.stdout)
	}
}

// What the demonstration shows is checked against the database: here are
// databases in which it is not so.
func TestTheDemonstrationFailsWhereAPromiseIsBroken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, test := range []struct{ name, break_, want string }{
		{
			"tokens that do not grow",
			"create or replace function pgxlock_next_tokens(p_count bigint) returns bigint[] language sql as 'select array_fill(7::bigint, array[p_count::integer])'",
			"untrue: each turn had a greater fencing token",
		},
		{
			"a server that lets late holders write",
			`create or replace function assert_lock_held(p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint default null,
				p_allow_expired boolean default false) returns bigint language sql as 'select p_fencing_token'`,
			"untrue: its fenced write was refused",
		},
		{
			"SQL callers that keep nobody out",
			`create or replace function acquire_lock(p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer default 30,
				p_metadata jsonb default '{}') returns boolean language sql as 'select true'`,
			"untrue: SQL kept Go out",
		},
		{
			"a list in which everything is live",
			`create or replace view lock_leases as select lock_name, 'live' as state, holder_id, fencing_token, clock_timestamp() - acquired_at as held_for,
				expires_at - clock_timestamp() as remaining, acquired_at, expires_at, metadata from distributed_locks`,
			"untrue: the list shows exactly",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := migrated(t)
			db.Exec(t, test.break_)
			var out bytes.Buffer
			ctx, stop := context.WithCancelCause(t.Context())
			defer stop(nil)
			err := (&demo{out: &out, pool: db.Pool, stop: stop}).acts(ctx, db.URL)
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(out.String(), "UNTRUE") || exitCode(err) == exitOK {
				t.Errorf("%v, want %s\n%s", err, test.want, out.String())
			}
		})
	}
}

func TestAnInterruptedDemonstrationLeavesNothingBehind(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	dir := reachableDir(t)
	stderr := interruptDemo(t, "TMPDIR="+dir, syscall.SIGINT, exitSignal+int(syscall.SIGINT))
	if !strings.Contains(stderr, "interrupt") {
		t.Errorf("%q", stderr)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestADemonstrationThatNobodyReadsStops(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	dir := reachableDir(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := program(t, []string{"TMPDIR=" + dir}, "demo")
	cmd.Stdout = w
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Run()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if code := cmd.ProcessState.ExitCode(); code != exitInternal {
		t.Errorf("exit code %d", code)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// interruptDemo sends a signal to a demonstration in which a worker is frozen,
// and returns what was written to standard error. The workers share that, so
// its end means that they are gone as well.
func interruptDemo(t *testing.T, env string, signal os.Signal, code int) (stderr string) {
	t.Helper()
	cmd := program(t, []string{env}, "demo")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errors, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	for lines.Scan() && !strings.Contains(lines.Text(), "is frozen") {
	}
	if err := cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
	}
	text, err := io.ReadAll(errors)
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Errorf("exit code %d, want %d: %s", got, code, text)
	}
	return string(text)
}

// reachableDir returns a directory that a server run by another user can reach,
// with a path short enough for its socket.
func reachableDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "demo")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestAWorkersFailureEndsTheDemonstration(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t) // nothing is installed
	ctx, stop := context.WithCancelCause(t.Context())
	defer stop(nil)
	if err := (&demo{out: io.Discard, pool: db.Pool, stop: stop}).acts(ctx, db.URL); err == nil || !strings.Contains(err.Error(), "worker-") {
		t.Errorf("a worker's failure is not told: %v", err)
	}
}
