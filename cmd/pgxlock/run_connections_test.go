//go:build unix

package main

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestARunThatHoldsCostsOneConnectionAndOneThatWaitsTwo(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	connections := func(name string, want int) {
		t.Helper()
		pgtest.Until(t, fmt.Sprintf("%s has %d connections", name, want), func() bool { return len(testkit.Backends(t, db, name)) == want })
	}
	named := func(name string) string { return db.URL + "&application_name=pgxlock%20" + name }
	holder := startRun(t, named("holder"), "echo ready; cat", "k")
	holder.says(t, "ready")
	waiter := startRun(t, named("waiter"), "echo ready; cat", "k")
	pgtest.Until(t, "it waits", func() bool { return count(t, db, "select count(*) from lock_waiters") == 1 })
	connections("waiter", 2)
	connections("holder", 1)
	_ = holder.stdin.Close()
	holder.ends(t, exitOK)
	waiter.says(t, "ready")
	connections("waiter", 1) // it listens for nobody any more
	_ = waiter.stdin.Close()
	waiter.ends(t, exitOK)
}
