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
