package main

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// asProgram makes the test binary be the program, so that tests run what they were compiled with,
// race detector included. The demonstration's workers inherit it.
const asProgram = "TEST_AS_DEMO"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		os.Exit(0)
	}
	if err := os.Setenv(asProgram, "1"); err != nil {
		panic(err)
	}
	pgtest.Main(m)
}

// program prepares a run of the program in an empty database, with more variables in its environment.
func program(t *testing.T, env ...string) *exec.Cmd {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), append(env, databaseEnv+"="+pgtest.New(t).URL, serverEnv+"=a server for tests")...)
	return cmd
}

func TestDemoChecksAllItsClaims(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	// None of these may reach it: its server is a throw-away one.
	nowhere := "postgres://nobody@127.0.0.1:1/nowhere"
	cmd := program(t, "PGXLOCK_DATABASE_URL="+nowhere, "DATABASE_URL="+nowhere, "PGHOST=/nowhere", "PGSERVICE=nowhere",
		"PGUSER=nobody", "PGDATABASE=nowhere", "PGTARGETSESSIONATTRS=standby", "PGOPTIONS=-c default_transaction_read_only=on")
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	shown := string(text)
	if err != nil || !strings.HasPrefix(shown, introduction) || !strings.HasSuffix(shown, "s\n") {
		t.Errorf("%v:\n%s", err, shown)
	}
	for _, text := range []string{
		"a server for tests", "no two processes were in the critical section", "SIGKILL", "SIGSTOP", `hold "invoice:42": lock lost`, "SQLSTATE LK001", "held by psql",
		"import:csv         lease  expired", "All 9 claims checked",
	} {
		if strings.Count(shown, text) != 1 {
			t.Errorf("%d times %q", strings.Count(shown, text), text)
		}
	}
	if n := strings.Count(shown, "\n  ok  "); n != 9 || strings.Contains(shown, "\x1b") {
		t.Errorf("%d claims were found true on the way, want 9 and no colors:\n%s", n, shown)
	}
}

func TestDemoRefusesDatabasesThatAreNotThrownAway(t *testing.T) {
	t.Parallel()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path)
	cmd.Env = append(os.Environ(), "DATABASE_URL=postgres://nobody@127.0.0.1:1/nowhere", databaseEnv+"=")
	if text, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(text), "run make demo") {
		t.Errorf("%v: %s", err, text)
	}
}

// What the demonstration shows is checked against the database: here are
// databases in which it is not so.
func TestDemoFailsWhereAPromiseIsBroken(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, test := range []struct{ name, break_, want string }{
		{
			"tokens that do not grow",
			"alter sequence pgxlock_tokens increment by -1 restart 1000000",
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
			db := testkit.Migrated(t)
			db.Exec(t, test.break_)
			var out bytes.Buffer
			err := (&demo{out: &out, pool: db.Pool}).acts(t.Context(), db.URL)
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(out.String(), "UNTRUE") {
				t.Errorf("%v, want %s\n%s", err, test.want, out.String())
			}
		})
	}
}

func TestInterruptedDemoEndsItsWorkers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	code, stderr := endDemo(t, func(p *os.Process, _ io.Closer) error { return p.Signal(syscall.SIGINT) })
	if code != 1 || !strings.Contains(stderr, "interrupt") {
		t.Errorf("exit code %d: %q", code, stderr)
	}
}

func TestDemoWithoutAReaderEndsWithItsWorkers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	if code, stderr := endDemo(t, func(_ *os.Process, stdout io.Closer) error { return stdout.Close() }); code != -1 {
		t.Errorf("exit code %d, want a signal: %s", code, stderr)
	}
}

// endDemo ends a demonstration in which a worker is frozen, and returns its exit code and what was
// written to standard error. The workers share that, so its end means that they are gone as well.
func endDemo(t *testing.T, end func(p *os.Process, stdout io.Closer) error) (code int, stderr string) {
	t.Helper()
	cmd := program(t)
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
	if err := end(cmd.Process, stdout); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
	}
	text, err := io.ReadAll(errors)
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	return cmd.ProcessState.ExitCode(), string(text)
}

func TestWorkerFailureEndsDemo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t) // nothing is installed
	if err := (&demo{out: io.Discard, pool: db.Pool}).acts(t.Context(), db.URL); err == nil || !strings.Contains(err.Error(), "worker-") {
		t.Errorf("a worker's failure is not reported: %v", err)
	}
}
