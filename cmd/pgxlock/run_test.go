//go:build unix

package main

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// runMark is the variable by which the processes of a test are found.
const runMark = "PGXLOCK_TEST_RUN"

// A running is a run of the command run. Its commands wait for the end of their
// standard input, so that they end with the test even if that is killed.
type running struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	pipe   *os.File // its standard output
	stdout *bufio.Reader
	stderr lockedBuffer
	mark   string
}

// A lockedBuffer is what a process writes, and can be read meanwhile.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// startRun starts run with the flags, and a shell with the script as its command.
func startRun(t *testing.T, url, script string, args ...string) *running {
	t.Helper()
	return startCommand(t, "run", url, script, args...)
}

// startCommand is startRun for lead and once, too.
func startCommand(t *testing.T, name, url, script string, args ...string) *running {
	t.Helper()
	r := &running{mark: rand.Text()}
	args = append(append([]string{name, "--database-url", url}, args...), "--", "sh", "-c", script)
	r.cmd = program(t, []string{runMark + "=" + r.mark}, args...)
	r.cmd.Stderr = &r.stderr
	r.cmd.WaitDelay = pgtest.Patience // if the command outlives it, which has the same standard error
	stdin, err := r.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.stdin, r.pipe, r.stdout = stdin, stdout.(*os.File), bufio.NewReader(stdout)
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.gone(t) })
	return r
}

// gone ends the run, if it has not ended, and fails the test if any process is left.
func (r *running) gone(t *testing.T) {
	_ = r.stdin.Close()
	if r.cmd.ProcessState == nil {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait() // it was killed
	}
	allGone(t, r.mark)
}

// allGone waits until no process has a mark, and fails the test if any does in the end.
func allGone(t *testing.T, mark string) {
	for limit := time.Now().Add(pgtest.Patience); len(marked(mark)) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(limit) {
			for _, pid := range marked(mark) {
				args, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
				t.Errorf("process %d is left: %q", pid, args)
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
			return
		}
	}
}

// marked returns the living processes that have a mark in their environment, on Linux.
func marked(mark string) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/environ") // fails only for a malformed pattern
	for _, path := range paths {
		environ, err := os.ReadFile(path) // empty for a zombie
		if err != nil || !bytes.Contains(environ, []byte(runMark+"="+mark)) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// line returns the next line that the command writes; "" if there are no more.
func (r *running) line() string {
	_ = r.pipe.SetReadDeadline(time.Now().Add(pgtest.Patience)) // which a pipe can
	line, _ := r.stdout.ReadString('\n')
	return strings.TrimSuffix(line, "\n")
}

// says waits for a line.
func (r *running) says(t *testing.T, want string) {
	t.Helper()
	if got := r.line(); got != want {
		r.gone(t)
		t.Fatalf("the command said %q, want %q; %s", got, want, r.stderr.String())
	}
}

// reports waits for a text of pgxlock itself.
func (r *running) reports(t *testing.T, want string) {
	t.Helper()
	pgtest.Until(t, "it says "+want, func() bool { return strings.Contains(r.stderr.String(), want) })
}

func (r *running) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := r.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// ends waits for the end of the run, and fails the test unless it has this exit code.
func (r *running) ends(t *testing.T, code int) {
	t.Helper()
	_ = r.cmd.Wait()
	if got := r.cmd.ProcessState.ExitCode(); got != code {
		t.Errorf("exit code %d, want %d: %s", got, code, r.stderr.String())
	}
}

// roomy is a TTL after a third of which a holder renews, and hears that it has lost its lock. Its
// command has as long to end.
var roomy = []string{"--ttl", "1m", "--grace", "20s"}

// trapping is a script that hears signals while it waits for the end of its input. What
// it waits for is deaf to them.
func trapping(traps string) string {
	return "exec 3<&0; trap '' TERM INT HUP QUIT USR1 USR2; cat <&3 >/dev/null & " + traps +
		"; echo ready; while :; do wait; [ $? -lt 128 ] && break; done"
}

func TestRunGivesItsCommandTheLock(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	kinds := []struct {
		name, key string
		flags     []string
		query     string // who holds it
	}{
		{"lease", "k", nil, "select holder_id || ' ' || fencing_token from distributed_locks where lock_name = 'k'"},
		{"shared", "s", []string{"--shared"}, ""},
		{"permit", "p#1", []string{"--permits", "1"}, "select holder_id || ' ' || fencing_token from distributed_locks where lock_name = 'p#1'"},
		{"metadata", "m", []string{"--metadata", "it's me"}, `select holder_id || ' ' || fencing_token from distributed_locks where lock_name = 'm' and metadata::text = '"it''s me"'`},
		{"advisory", "n", []string{"--kind", "advisory"}, "select holder_id || ' 0' from lock_holders where kind = 'advisory' and key_id = advisory_lock_key('n')"},
	}
	if testing.Short() {
		kinds = kinds[:1]
	}
	for _, test := range kinds {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			key, _, _ := strings.Cut(test.key, "#")
			r := startRun(t, db.URL, `echo "$PGXLOCK_KEY"; echo "$PGXLOCK_HOLDER $PGXLOCK_TOKEN"; cat`, append(test.flags, key)...)
			r.says(t, test.key)
			holder := r.line()
			if host, err := os.Hostname(); err != nil || !strings.HasPrefix(holder, fmt.Sprintf("%.50s:%d:", host, r.cmd.Process.Pid)) {
				t.Errorf("the holder is %q, which is not named after host %q and process %d: %v", holder, host, r.cmd.Process.Pid, err)
			}
			if test.query != "" {
				var want string
				if err := db.Pool.QueryRow(t.Context(), test.query).Scan(&want); err != nil || holder != want {
					t.Errorf("the command was told %q, the holder is %q: %v", holder, want, err)
				}
			}
			tryNow(t, db.URL, "--kind", kindOf(test.flags), test.key).want(t, exitBusy, "", "not acquired")
			if _, err := io.WriteString(r.stdin, "input\n"); err != nil {
				t.Fatal(err)
			}
			r.says(t, "input")
			_ = r.stdin.Close()
			r.ends(t, exitOK)
			if r.stderr.String() != "" {
				t.Errorf("it said %q", r.stderr.String())
			}
			tryNow(t, db.URL, "--kind", kindOf(test.flags), test.key).want(t, exitOK, "ran\n", "")
		})
	}
}

// tryNow runs a command if the lock is free.
func tryNow(t *testing.T, url string, args ...string) result {
	t.Helper()
	return answered(t, append(append([]string{"run", "--database-url", url, "--no-wait"}, args...), "--", "echo", "ran")...)
}

// answered runs a command line, again if the server did not answer within the few seconds that a
// Locker gives it: the machine may be busy.
func answered(t *testing.T, args ...string) result {
	t.Helper()
	for {
		if r := execute(t, nil, args...); r.code != exitUnavailable {
			return r
		}
	}
}

func kindOf(flags []string) string {
	if len(flags) == 2 && flags[0] == "--kind" {
		return flags[1]
	}
	return string(kindLease)
}

func TestRunWithAnAdvisoryLockNeedsNoTables(t *testing.T) {
	t.Parallel()
	db := empty(t)
	on := func(args ...string) result {
		return answered(t, append([]string{"run", "--database-url", db.URL}, args...)...)
	}
	on("k", "--kind", "advisory", "--", "sh", "-c", "echo token $PGXLOCK_TOKEN").want(t, exitOK, "token 0\n", "")
	on("k", "--", "echo", "ran").want(t, exitInternal, "", "pgxlock migrate up")
}

func TestRunExitsAsItsCommandDoes(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	dir := t.TempDir()
	file := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		return name
	}
	ends := []struct {
		command []string
		code    int
		stderr  string
	}{
		{[]string{"sh", "-c", "exit 7"}, 7, ""},
		{[]string{"sh", "-c", "kill -KILL $$"}, exitSignal + int(syscall.SIGKILL), ""},
		{[]string{"there-is-no-such-command"}, exitNotFound, "there-is-no-such-command"},
		{[]string{dir}, exitNotRunnable, dir},
		{[]string{"true"}, exitOK, ""},
		{[]string{"sh", "-c", "exit 75"}, 75, ""},
		{[]string{"sh", "-c", "kill -TERM $$"}, exitSignal + int(syscall.SIGTERM), ""},
		{[]string{filepath.Join(dir, "missing")}, exitNotFound, "missing"},
		{[]string{file("garbage", "\x00\x01")}, exitNotRunnable, "format"},
		{[]string{file("plain.sh", "echo ran\n")}, exitNotRunnable, "a script begins with #!"}, // flock, env and a shell run it
		{[]string{file("dos.sh", "#!/bin/sh\r\necho ran\r\n")}, exitNotRunnable, "carriage return"},
	}
	if testing.Short() {
		ends = ends[:4]
	}
	for i, test := range ends {
		args := append([]string{"run", "--database-url", db.URL, fmt.Sprint("k", i), "--"}, test.command...)
		r := answered(t, args...)
		r.want(t, test.code, "", test.stderr)
		if strings.Count(r.stderr, "\n") > 1 {
			t.Errorf("more than one line: %q", r.stderr)
		}
	}
	var left int
	if err := db.Pool.QueryRow(t.Context(), "select count(*) from distributed_locks").Scan(&left); err != nil || left > 0 {
		t.Errorf("%d leases are left: %v", left, err)
	}
}

func TestRunSaysWhoIsInTheWay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	tryNow(t, db.URL, "k").want(t, exitBusy, "", "held by somebody")
	answered(t, "run", "--database-url", db.URL, "--wait", "3s", "k", "--", "echo", "ran").want(t, exitBusy, "", "held by somebody")
}

func TestWaitOfZeroTriesOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	conn, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(t.Context(), "select acquire_lock('k', 'somebody', 3600), pg_advisory_lock(advisory_lock_key('k'))"); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"acquire --wait 0 k", "acquire k", "run --wait 0 k -- echo ran", "run --wait 0s --kind advisory k -- echo ran", "run --no-wait k -- echo ran"} {
		args := strings.Fields(command)
		answered(t, append([]string{args[0], "--database-url", db.URL}, args[1:]...)...).want(t, exitBusy, "", "k")
	}
	answered(t, "run", "--database-url", db.URL, "--wait", "0", "free", "--", "echo", "ran").want(t, exitOK, "ran\n", "")
}

func TestMisuseOfRunIsNamed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ args, says string }{
		{"", "the command is missing"},
		{"k", "the command is missing"},
		{"k --", "the command is missing"},
		{"k true", "-- is missing before the command: pgxlock run KEY -- COMMAND (see"},
		{"-- true", "the key is missing: pgxlock run KEY -- COMMAND (see"},
		{"a b -- true", "one key"},
		{"k --kind table -- true", "use lease or advisory"},
		{"k --kind session -- true", "use lease or advisory"},
		{"k --wait 1s --no-wait -- true", "exclude each other"},
		{"k --wait 0 --no-wait -- true", "exclude each other"},
		{"k --wait -1s -- true", "--wait is -1s"},
		{"k --ttl 10ms -- true", "--ttl"},
		{"k --ttl 12s --grace 5s -- true", "between 1s and 4s"},
		{"k --grace 0 -- true", "--grace"},
		{"k --ttl 1s --grace 83ms -- true", "with --ttl 1s it must be between 84ms and 333ms"},
		{"k --ttl 577h --kind advisory -- true", "with --kind advisory it must be 576h or less"},
		{"k --ttl 999999h -- true", "--ttl is 999999h0m0s, it must be between 1s and 100 years"},
		{"k --permits 0 -- true", "--permits"},
		{"k --permits 2 --shared -- true", "exclude each other"},
		{"k --permits 2 --kind advisory -- true", "leases only"},
		{"k --metadata x --kind advisory -- true", "leases only"},
		{strings.Repeat("k", 300) + " -- true", "255"},
	} {
		r := executeHere(t, nowhere, append([]string{"run"}, strings.Fields(test.args)...)...)
		r.want(t, exitUsage, "", test.says)
		if strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: not one line: %q", test.args, r.stderr)
		}
	}
	execute(t, []string{"DATABASE_URL=" + nowhere}, "run", "k", "--permits", "99999", "--", "true").want(t, exitUsage, "", "permits")
}

func TestRunWithoutADatabaseExits69(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"lease", "advisory"} {
		execute(t, []string{"DATABASE_URL=postgres://me@" + closed + "/db"}, "run", "--kind", kind, "k", "--", "echo", "ran").
			want(t, exitUnavailable, "", "connection refused")
	}
}

func TestSignalsArePassedOn(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	r := startRun(t, db.URL, trapping("for s in TERM INT HUP QUIT USR1 USR2; do trap \"echo $s\" $s; done"), "k")
	r.says(t, "ready")
	for name, sig := range map[string]syscall.Signal{
		"TERM": syscall.SIGTERM, "INT": syscall.SIGINT, "HUP": syscall.SIGHUP,
		"QUIT": syscall.SIGQUIT, "USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2,
	} {
		r.signal(t, sig)
		r.says(t, name)
	}
	_ = r.stdin.Close()
	r.ends(t, exitOK)
}

func TestSignalsReachTheWholeGroup(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	r := startRun(t, db.URL, "trap : TERM; sh -c 'exec 3<&0; trap \"echo told; exit\" TERM; cat <&3 >/dev/null & echo ready; wait'; exit 9", "k")
	r.says(t, "ready")
	r.signal(t, syscall.SIGTERM)
	r.says(t, "told")
	r.ends(t, 9)
}

func TestIgnoredSignalsStayIgnored(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	inner := program(t, nil, "run", "--database-url", db.URL, "k", "--", "sh", "-c", "kill -HUP $$; kill -INT $$; echo survived")
	cmd := program(t, nil)
	cmd.Path, cmd.Args = "/bin/sh", append([]string{"sh", "-c", `trap "" HUP INT; exec "$0" "$@"`}, inner.Args...)
	finish(t, cmd).want(t, exitOK, "survived\n", "")
}

func TestFilesAreInherited(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	cmd := program(t, nil, "run", "--database-url", db.URL, "k", "--", "sh", "-c", "cat <&3; cat <&5")
	for range 3 { // its 3 to 5
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, []byte("inherited\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, file)
	}
	finish(t, cmd).want(t, exitOK, "inherited\ninherited\n", "")
}

func TestEnvironmentIsThatOfTheInnermostLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	inner := program(t, nil, "run", "--database-url", db.URL, "inner", "--", "sh", "-c", "echo $PGXLOCK_KEY")
	answered(t, append([]string{"run", "--database-url", db.URL, "outer", "--"}, inner.Args...)...).want(t, exitOK, "inner\n", "")
}

func TestSignalEndsTheWait(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	signals := []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}
	if testing.Short() {
		signals = signals[:1]
	}
	for _, sig := range signals {
		db.Exec(t, "select acquire_lock($1, 'somebody', 3600)", sig.String())
		r := startRun(t, db.URL, "echo ran", sig.String())
		r.reports(t, fmt.Sprintf("pgxlock: waiting for %q, held by somebody since 20", sig.String()))
		r.signal(t, syscall.SIGUSR1) // does nothing to a waiting run
		r.signal(t, sig)
		if line := r.line(); line != "" {
			t.Errorf("the command ran: %q", line)
		}
		r.ends(t, exitSignal+int(sig))
		if strings.Count(r.stderr.String(), "\n") != 2 {
			t.Errorf("not two lines: %q", r.stderr.String())
		}
	}
}

// untilWaits waits until a process waits for the key.
func untilWaits(t *testing.T, db *pgtest.DB, key string) {
	t.Helper()
	pgtest.Until(t, "it waits", func() (waits bool) {
		if err := db.Pool.QueryRow(t.Context(), "select exists (select from pgxlock_waiters where name in ($1, advisory_lock_key($1)::text))", key).Scan(&waits); err != nil {
			t.Fatal(err)
		}
		return waits
	})
}

// alone is a script that says whether it is the only one that has the file open in this
// way, with all that it starts.
func alone(file string) string {
	return "exec 9>>" + file + "; flock -n 9 && echo alone || echo together; "
}

func needsFlock(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("flock"); err != nil {
		pgtest.Missing(t, "flock", "commands tell with flock(1) whether they are alone")
	}
}

func TestProcessesThatACommandLeavesAreKilledBeforeTheLockIsFree(t *testing.T) {
	t.Parallel()
	needsFlock(t)
	db := migrated(t)
	file := filepath.Join(t.TempDir(), "file")
	left := "exec 3<&0; trap 'exit 5' USR1; sh -c 'trap \"\" TERM HUP USR1; echo left; cat <&3 >/dev/null' & while :; do wait; done"
	first := startRun(t, db.URL, alone(file)+left, "k")
	first.says(t, "alone")
	first.says(t, "left")
	second := startRun(t, db.URL, alone(file), "k")
	second.reports(t, `waiting for "k", held by`)
	first.signal(t, syscall.SIGUSR1)
	second.says(t, "alone")
	second.ends(t, exitOK)
	second.reports(t, `acquired "k" after `)
	first.ends(t, 5)
}

func TestCommandIsEndedWhenItsLockIsLost(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	losses := []struct {
		name, script string
		told         bool
		lose         string
		flags        []string
	}{
		{"lease", trapping("trap 'echo told; exit 0' TERM"), true, "delete from distributed_locks where lock_name = 'lease'", nil},
		{"stubborn", "trap '' TERM; echo ready; cat >/dev/null", false, "delete from distributed_locks where lock_name = 'stubborn'", nil},
		{"advisory", trapping("trap 'echo told; exit 0' TERM"), true, "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and pid <> pg_backend_pid() and database = (select oid from pg_database where datname = current_database()) and objid::bigint = advisory_lock_key('advisory') & 4294967295", []string{"--kind", "advisory"}},
	}
	if testing.Short() {
		losses = losses[:1]
	}
	for _, test := range losses {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := startRun(t, db.URL, test.script, append(append(test.flags, roomy...), test.name)...)
			r.says(t, "ready")
			db.Exec(t, test.lose)
			if test.told {
				r.says(t, "told")
			}
			r.ends(t, exitLost)
			if text := r.stderr.String(); !strings.Contains(text, "lost") && !strings.Contains(text, "could not be renewed") || strings.Count(text, "\n") != 1 {
				t.Errorf("not one line that says so: %q", text)
			}
		})
	}
}
