package systemtest_test

import (
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// The release saw no ticket, and has not committed when there is one. Nobody will wake the
// waiter that has it.
func TestWaiterThatBeginsDuringAReleaseTriesAgain(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	holder := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "holder"})
	asks, watched := testkit.Counted(t, db, testkit.AcquireSQL)
	waiter := testkit.NewLocker(t, watched, &pgxlock.LeaseConfig{Backoff: testkit.Seldom})
	testkit.Listen(t, db, waiter, holder)
	lock := testkit.Acquire(t, holder, "k")
	commit := testkit.HoldReleases(t, db, "holder")
	released := make(chan error, 1)
	go func() { released <- lock.Release(t.Context()) }()
	testkit.UntilAtGate(t, db, 1)
	before, _, _ := asks.Counts()
	granted := testkit.Waits(t, waiter, "k")
	testkit.UntilQueued(t, db, "k", 1)
	// It asks to find that it is busy, when it stands in line, and with a ticket.
	pgtest.Until(t, "it asks again and again", func() bool { n, _, _ := asks.Counts(); return n > before+5 })
	commit()
	if err := <-released; err != nil {
		t.Error(err)
	}
	testkit.Release(t, <-granted)
}
