package main

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestWatcherRemovesTheHealthFileOfALeaderThatIsKilled(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	l := startLead(t, db, trapping(obedient), "--ttl", "1h")
	l.says(t, "ready")
	l.leads(t, "first", true)
	l.signal(t, syscall.SIGKILL)
	l.says(t, "told")
	if _, err := os.Stat(l.file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is left: %v", err)
	}
}

// Its watcher ends the command: when lead goes on, it still has the lock or has lost it.
func TestLeadIsACandidateAgainAfterItWasFrozen(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	l := startLead(t, db, trapping(obedient), "--ttl", "6s")
	l.says(t, "ready")
	for _, lost := range []bool{false, true} {
		l.signal(t, syscall.SIGSTOP)
		l.says(t, "told")
		pgtest.Until(t, "it is as late as wanted", func() bool {
			return !lost || count(t, db, "select count(*) from distributed_locks where expires_at < clock_timestamp()") == 1
		})
		l.signal(t, syscall.SIGCONT)
		again := l.line()
		if again == "told" { // by lead, too
			again = l.line()
		}
		if again != "ready" {
			t.Fatalf("lost %t: the command said %q: %s", lost, again, l.stderr.String())
		}
	}
	_ = l.stdin.Close() // its command ends by itself
	l.ends(t, exitOK)
}

// Without a lock there is no hurry, and nothing but SIGTERM.
func TestCommandOfAKilledOnceIsToldToEnd(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	r := startCommand(t, "once", db.URL, trapping(obedient), "--every", long, "k")
	r.says(t, "ready")
	r.signal(t, syscall.SIGKILL)
	r.says(t, "told")
}
