//go:build unix

package systemtest_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// The environment variables that make this program a child of a test.
const (
	childEnv    = "PGXLOCK_TEST_CHILD" // names one of children
	childURLEnv = "PGXLOCK_TEST_CHILD_DATABASE"
	childKeyEnv = "PGXLOCK_TEST_CHILD_KEY"
)

// children are what this program does instead of tests, in a process of its own.
// What they report, their test reads.
var children = map[string]func(ctx context.Context, url, key string, report func(any) error) error{
	"hold a lease":                    holdUntilLost,
	"hold an advisory lock":           holdAdvisoryUntilLost(time.Second),
	"hold an advisory lock for long":  holdAdvisoryUntilLost(time.Hour),
	"wait for a lease":                contend(1, 1),
	"wait for a lease 50 times":       contend(50, 1),
	"wait for a lease 200 times":      contend(200, 1),
	"hammer a limit":                  hammer,
	"fence advisory locks":            fenceAdvisoryLocks,
	"take turns with 4 workers":       contend(4, 25),
	"saturate an advisory lock":       saturateUntilTold(func(pool *pgxpool.Pool) (*pgxlock.Locker, error) { return pgxlock.NewAdvisoryLocker(pool, nil) }),
	"saturate a lease":                saturateUntilTold(func(pool *pgxpool.Pool) (*pgxlock.Locker, error) { return pgxlock.NewLeaseLocker(pool, nil) }),
	"lead":                            campaign,
	"run each second":                 runEachSecond,
	"run what never ends":             runForever(false),
	"run what never ends, with retry": runForever(true),
	"use hot keys":                    useHotKeys,
}

func init() {
	what, ok := os.LookupEnv(childEnv)
	if !ok {
		return
	}
	err := fmt.Errorf("no child does %q", what)
	if run, ok := children[what]; ok {
		err = run(context.Background(), os.Getenv(childURLEnv), os.Getenv(childKeyEnv), json.NewEncoder(os.Stdout).Encode)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// A child is a process that its test may freeze.
type child struct {
	cmd     *exec.Cmd
	reports *json.Decoder
	stdin   io.WriteCloser
}

// startChild starts one of children. It is killed when the test is over.
func startChild(t *testing.T, what, url, key string) *child {
	t.Helper()
	return startProgram(t, os.Args[0], what, url, key)
}

// startProgram is startChild for the program of these tests in another version.
func startProgram(t *testing.T, program, what, url, key string) *child {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), childEnv+"="+what, childURLEnv+"="+url, childKeyEnv+"="+key)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{cmd, json.NewDecoder(bufio.NewReader(stdout)), stdin}
	t.Cleanup(func() { _ = cmd.Wait() }) // the test's context is done; if the child has ended, end has said how
	return c
}

// report waits for the child's next report.
func (c *child) report(t *testing.T, report any) {
	t.Helper()
	if err := c.reports.Decode(report); err != nil {
		t.Fatalf("the child does not report: %v", err)
	}
}

// tell tells the child to go on.
func (c *child) tell(t *testing.T) {
	t.Helper()
	if _, err := io.WriteString(c.stdin, "\n"); err != nil {
		t.Fatal(err)
	}
}

// dismiss tells the child that nothing more will be told.
func (c *child) dismiss(t *testing.T) {
	t.Helper()
	if err := c.stdin.Close(); err != nil {
		t.Fatal(err)
	}
}

// untilTold waits, in the child, until tell was called.
func untilTold() error {
	_, err := io.ReadFull(os.Stdin, make([]byte, 1))
	return err
}

// workUntilTold reports, in the child, that it is ready, and waits until it is told to begin. The context
// that it returns ends when the child is told again.
func workUntilTold(ctx context.Context, report func(any) error) (context.Context, context.CancelFunc, error) {
	if err := errors.Join(report("ready"), untilTold()); err != nil {
		return nil, nil, err
	}
	working, stop := context.WithCancel(ctx)
	go func() {
		_ = untilTold()
		stop()
	}()
	return working, stop, nil
}

// freeze stops the child in its tracks; its connections stay. A signal that was sent
// has stopped nobody yet: on a busy machine the child's threads go on for a while.
func (c *child) freeze(t *testing.T) {
	t.Helper()
	c.signal(t, syscall.SIGSTOP)
	var status syscall.WaitStatus
	for !status.Stopped() {
		if _, err := syscall.Wait4(c.cmd.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil && !errors.Is(err, syscall.EINTR) {
			t.Fatal(err)
		}
	}
}

func (c *child) thaw(t *testing.T) { c.signal(t, syscall.SIGCONT) }

func (c *child) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := c.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// end waits until the child has done its work.
func (c *child) end(t *testing.T) {
	t.Helper()
	if err := c.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}
