//go:build unix

package main

import (
	"fmt"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestRunCostsTheConnectionsThatItsPageSays(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	connections := func(name string, want int) {
		t.Helper()
		pgtest.Until(t, fmt.Sprintf("%s has %d connections", name, want), func() bool { return len(testkit.Backends(t, db, name)) == want })
	}
	named := func(name string) string { return db.URL + "&application_name=pgxlock%20" + name }
	for kind, costs := range map[string]struct{ holds, waits int }{"lease": {1, 2}, "advisory": {2, 3}} {
		holder := startRun(t, named(kind+"-holder"), "echo ready; cat", "k", "--kind", kind)
		holder.says(t, "ready")
		waiter := startRun(t, named(kind+"-waiter"), "echo ready; cat", "k", "--kind", kind)
		pgtest.Until(t, "it waits", func() bool { return count(t, db, "select count(*) from lock_waiters") == 1 })
		connections(kind+"-waiter", costs.waits)
		connections(kind+"-holder", costs.holds)
		_ = holder.stdin.Close()
		holder.ends(t, exitOK)
		waiter.says(t, "ready")
		connections(kind+"-waiter", costs.holds) // what only its wait needed is closed
		_ = waiter.stdin.Close()
		waiter.ends(t, exitOK)
	}
}
