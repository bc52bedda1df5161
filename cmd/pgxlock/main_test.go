package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// asProgram makes the test binary be the program, so that tests run what they
// were compiled with, race detector included.
const asProgram = "TEST_AS_PGXLOCK"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" && !slices.Contains(os.Args, "-test.fuzzworker") { // which go test starts
		main()
	}
	if err := errors.Join(os.Setenv(asProgram, "1"), forgetSources()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	hearSignals()
	pgtest.Main(m)
}

// hearSignals makes the programs of the tests hear signals that what started the tests ignores, as nohup
// and a shell's job in the background do: they would inherit that.
func hearSignals() {
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
}

// forgetSources takes the user's databases out of the environment, of which a command that runs
// here would hear.
func forgetSources() (err error) {
	for _, entry := range os.Environ() {
		if name, _, _ := strings.Cut(entry, "="); isSource(name) {
			err = errors.Join(err, os.Unsetenv(name))
		}
	}
	return err
}

func isSource(name string) bool {
	return name == "DATABASE_URL" || strings.HasPrefix(name, "PG") && !strings.HasPrefix(name, "PGXLOCK_TEST_") && name != "PGXLOCK_SOAK"
}

// itself is the program that tests start.
func itself(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// program prepares a run of the program in an environment without a database.
func program(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), pgtest.Patience)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, itself(t), args...)
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "PG") {
			cmd.Env = append(cmd.Env, entry)
		}
	}
	cmd.Env = append(append(cmd.Env, asProgram+"=1"), env...)
	return cmd
}

// result is what a run of the program left.
type result struct {
	code           int
	stdout, stderr string
}

// execute runs a command line, with DATABASE_URL and other variables in env. Where it is the same, that
// is done in this process: to start one costs more than most commands do. A process of its own has a
// command that starts others, and one that gets more than DATABASE_URL.
func execute(t *testing.T, env []string, args ...string) result {
	t.Helper()
	cmd, _, err := newRoot().Find(args)
	processes := err == nil && slices.Contains([]string{"run", "lead", "once"}, cmd.Name())
	url, only := "", len(env) == 0
	if len(env) == 1 {
		url, only = strings.CutPrefix(env[0], "DATABASE_URL=")
	}
	if processes || !only {
		return finish(t, program(t, env, args...))
	}
	return executeHere(t, url, args...)
}

// as is the environment of a command that connects to the database in a role.
func as(role string, db *pgtest.DB) (env []string) {
	return []string{"DATABASE_URL=" + db.URL + "&options=-c%20role%3D" + role}
}

// executeHere runs a command line in this process, on the database of url if there is one. It is for
// a command that starts processes only if that is refused before.
func executeHere(t *testing.T, url string, args ...string) result {
	t.Helper()
	root := newRoot()
	args = append([]string{}, args...) // not nil, for which cobra takes those of this process
	if cmd, _, err := root.Find(args); err == nil && url != "" && cmd.Flags().Lookup("database-url") != nil {
		args = append([]string{"--database-url=" + url}, args...)
	}
	var stdout, stderr bytes.Buffer
	root.SetIn(strings.NewReader(""))
	root.SetOut(&stdout)
	root.SetErr(&stderr)
	code := run(t.Context(), root, args)
	return result{code, stdout.String(), stderr.String()}
}

func finish(t *testing.T, cmd *exec.Cmd) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	}
	return result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// want fails the test unless the program exited with the code and both outputs
// hold the texts; an empty text wants that output empty.
func (r result) want(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || !holds(r.stdout, stdout) || !holds(r.stderr, stderr) {
		t.Errorf("exit code %d, want %d\nstdout, want %q:\n%s\nstderr, want %q:\n%s", r.code, code, stdout, r.stdout, stderr, r.stderr)
	}
}

func holds(got, want string) bool {
	if want == "" {
		return got == ""
	}
	return strings.Contains(got, want)
}

func TestWrongUsageIsOneLineAndExits64(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ args, want string }{
		{"frobnicate", `unknown command "frobnicate" for "pgxlock" (see pgxlock --help)`},
		{"evcit k", `unknown command "evcit" for "pgxlock"; did you mean evict? (see pgxlock --help)`},
		{"migrate stauts", `unknown command "stauts" for "pgxlock migrate"; did you mean status?`},
		{"ls --older-then 1h", `unknown flag: --older-then; did you mean --older-than? (see pgxlock ls --help)`},
		{"migrate", `"pgxlock migrate" needs a command: down, repair, sql, status, up (see pgxlock migrate --help)`},
		{"migrate sideways", `unknown command "sideways" for "pgxlock migrate"`},
		{"migrate up twice", `unexpected argument "twice": pgxlock migrate up takes none (see`},
		{"migrate up --sideways", `unknown flag: --sideways (see pgxlock migrate up --help)`},
		{"migrate status -o xml", `use table or json`},
		{"ls -o yaml", `use table or json`},
		{"ls everything", `unexpected argument "everything": pgxlock ls takes none; did you mean --key everything?`},
		{"ls --database-url mysql://root@h/db", `--database-url is not a PostgreSQL connection string`},
	} {
		t.Run(test.args, func(t *testing.T) {
			t.Parallel()
			r := execute(t, nil, strings.Fields(test.args)...)
			r.want(t, exitUsage, "", test.want)
			if !strings.HasPrefix(r.stderr, "pgxlock: ") || strings.Count(r.stderr, "\n") != 1 {
				t.Errorf("not one line: %q", r.stderr)
			}
		})
	}
}

func TestHelpAndVersionAndCompletionGoToStandardOutput(t *testing.T) {
	t.Parallel()
	execute(t, nil).want(t, exitOK, "pgxlock exit-codes", "")
	execute(t, nil, "migrate", "--help").want(t, exitOK, "repair", "")
	execute(t, nil, "version").want(t, exitOK, execute(t, nil, "--version").stdout, "")
	execute(t, nil, "--version").want(t, exitOK, "pgxlock ", "")
	execute(t, nil, "completion", "bash").want(t, exitOK, "__start_pgxlock", "")
	execute(t, nil, "__complete", "ls", "-o", "").want(t, exitOK, "json", "Completion ended")
	execute(t, nil, "__complete", "ls", "--sort", "").want(t, exitOK, "expiry", "Completion ended")
}

// A device that swallows what is written is none that shows colors.
func TestOnlyATerminalGetsColors(t *testing.T) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	t.Setenv("TERM", "xterm")
	t.Setenv("NO_COLOR", "")
	cmd := newRoot()
	cmd.SetOut(null)
	if colors(cmd) {
		t.Error("there are")
	}
}

func TestMessageSaysWhatToRunOnce(t *testing.T) {
	t.Parallel()
	moved := &pgconn.PgError{Severity: "ERROR", Code: "LK003", Message: "the database was moved", Hint: "Run migrations.Up, or pgxlock migrate up."}
	if text := describe(newRun().Flags(), fmt.Errorf("%w: %w", pgxlock.ErrSchema, moved)); strings.Count(text, "pgxlock migrate up") != 1 {
		t.Errorf("%q", text)
	}
	if text := describe(newRun().Flags(), moved); strings.Count(text, "pgxlock migrate up") != 1 {
		t.Errorf("%q", text)
	}
}

func TestMessageNamesTheProgramOnce(t *testing.T) {
	t.Parallel()
	err := fmt.Errorf("pgxlock: hold \"k\": %w: %w by ops: why", pgxlock.ErrLost, pgxlock.ErrEvicted)
	if text := describe(newRun().Flags(), err); text != `hold "k": lock lost: evicted by ops: why` {
		t.Errorf("%q", text)
	}
}
