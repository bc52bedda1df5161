package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The next holder's command must never meet that of the one before, whatever became of
// that one. Both try to have a file for themselves; the commands before, and what they
// started, do not end when they are told to.
func stubborn(file string) string {
	return "trap '' TERM HUP; " + alone(file) + "exec 3<&0; (cat <&3 >/dev/null) & cat >/dev/null"
}

// hold starts a run whose command is alone. One that a slow machine kept from renewing
// before its command got that far is told to be ended for that, and starts again.
func hold(t *testing.T, url, file string, flags ...string) *running {
	t.Helper()
	for {
		r := startRun(t, url, stubborn(file), append(flags, "k")...)
		if line := r.line(); line != "" {
			if line != "alone" {
				t.Fatalf("the first command is %s", line)
			}
			return r
		}
		if r.ends(t, exitLost); t.Failed() {
			t.FailNow()
		}
	}
}

// handOver takes the lock from its holder, whose command must be gone by then.
func handOver(t *testing.T, url, file string, flags ...string) {
	t.Helper()
	next := startRun(t, url, alone(file), append(flags, "k")...)
	next.says(t, "alone")
	next.ends(t, exitOK)
}

// hasty is a TTL that tests can wait for, with as much time to kill as may be.
var hasty = []string{"--ttl", "6s", "--grace", "2s"}

func TestSoakCommandIsDeadBeforeTheNextOneStarts(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	needsFlock(t)
	rounds := pgtest.Soak(t, 1, 20)
	for _, kind := range []string{"lease", "advisory"} {
		t.Run(kind+" behind a dead network", func(t *testing.T) {
			t.Parallel()
			server := pgtest.Remote(t, pgserver.Config{})
			direct := pgtest.Pool(t, server.URL("postgres"))
			if err := migrations.Up(t.Context(), direct, nil); err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(t.TempDir(), "file")
			for range rounds {
				r := hold(t, server.TCPURL("postgres"), file, append(hasty[:len(hasty):len(hasty)], "--kind", kind)...)
				server.Cut(t)
				handOver(t, server.URL("postgres"), file, "--kind", kind)
				r.ends(t, exitLost)
				server.Heal(t)
			}
		})
		t.Run(kind+" of a frozen run", func(t *testing.T) {
			t.Parallel()
			db := migrated(t)
			file := filepath.Join(t.TempDir(), "file")
			for range rounds {
				r := hold(t, db.URL, file, append(hasty[:len(hasty):len(hasty)], "--kind", kind)...)
				r.signal(t, syscall.SIGSTOP)
				handOver(t, db.URL, file, "--kind", kind)
				r.signal(t, syscall.SIGCONT)
				r.ends(t, exitLost)
			}
		})
	}
	t.Run("lease of a killed run", func(t *testing.T) {
		t.Parallel()
		db := migrated(t)
		file := filepath.Join(t.TempDir(), "file")
		for range rounds {
			r := hold(t, db.URL, file, hasty...)
			r.signal(t, syscall.SIGKILL)
			handOver(t, db.URL, file)
			r.gone(t)
		}
	})
}

// Nobody knows whether it ended in time.
func TestCommandThatEndsWhileItsSupervisorIsFrozenHasLostItsLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, name := range []string{"run", "once", "lead"} {
		for _, lost := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, expired %t", name, lost), func(t *testing.T) {
				t.Parallel()
				db := migrated(t)
				flags := []string{"--ttl", "6s", "k"}
				if name == "once" {
					flags = append(flags, "--every", long, "--retry")
				}
				r := startCommand(t, name, db.URL, "trap '' TERM; echo ready; cat >/dev/null; echo done", flags...)
				r.says(t, "ready")
				r.signal(t, syscall.SIGSTOP)
				_ = r.stdin.Close() // its command ends by itself
				r.says(t, "done")
				pgtest.Until(t, "its watcher would have killed the command", func() bool { return len(marked(r.mark)) == 1 })
				pgtest.Until(t, "it is as late as wanted", func() bool {
					return !lost || count(t, db, "select count(*) from distributed_locks where expires_at < clock_timestamp()") == 1
				})
				r.signal(t, syscall.SIGCONT)
				if name == "lead" {
					r.says(t, "ready")
					r.says(t, "done")
					r.ends(t, exitOK)
					r.reports(t, "; a candidate again\n")
				} else {
					r.ends(t, exitLost)
				}
				if text := r.stderr.String(); !strings.Contains(text, "could not be renewed; ending the command\n") && !strings.Contains(text, "lock lost: ") {
					t.Errorf("it said %q", text)
				}
			})
		}
	}
}

// An advisory lock is free when the process is gone, so that its command is killed at
// once; that of a lease is told first.
func TestCommandOfAKilledRunIsEnded(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	lease := startRun(t, db.URL, trapping("trap 'echo told; exit' TERM"), "--ttl", "1h", "k")
	advisory := startRun(t, db.URL, trapping("trap 'echo told' TERM"), "--ttl", "1h", "--kind", "advisory", "k")
	lease.says(t, "ready")
	advisory.says(t, "ready")
	lease.signal(t, syscall.SIGKILL)
	advisory.signal(t, syscall.SIGKILL)
	lease.says(t, "told")
	for line := advisory.line(); line != ""; line = advisory.line() {
		if line != "told" { // there may be time for it
			t.Errorf("it said %q", line)
		}
	}
	for _, r := range []*running{lease, advisory} {
		_ = r.cmd.Wait()
		pgtest.Until(t, "all are gone, long before the TTL is over", func() bool { return len(marked(r.mark)) == 0 })
	}
}

// watcher returns the process that watches over a run.
func (r *running) watcher(t *testing.T) int {
	t.Helper()
	for _, pid := range marked(r.mark) {
		args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.Contains(string(args), watcherCommand) {
			return pid
		}
	}
	t.Fatal("there is no watcher")
	return 0
}

// Without it the run alone has to end its command.
func TestLostWatcherIsTold(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	r := startRun(t, db.URL, "trap '' TERM; echo ready; cat >/dev/null", "--ttl", "1m", "--grace", "20s", "k")
	r.says(t, "ready")
	watcher := r.watcher(t)
	if err := syscall.Kill(watcher, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "its end is known", func() bool { return errors.Is(syscall.Kill(watcher, 0), syscall.ESRCH) })
	db.Exec(t, "delete from distributed_locks")
	r.ends(t, exitLost)
	if text := r.stderr.String(); !strings.Contains(text, "watches") {
		t.Errorf("it said %q", text)
	}
}
