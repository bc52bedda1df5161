package systemtest_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
)

func TestMonitorShowsWhoWaitsForHowLongAndForWhom(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	holder, others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "holder"}), testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "others"})
	lease := testkit.Acquire(t, holder, "lease")
	first := testkit.Waits(t, others, "lease")
	testkit.UntilQueued(t, db, "lease", 1)
	second := testkit.Waits(t, others, "lease")
	s := testkit.Semaphore(t, holder, 1)
	slot := testkit.Permit(t, s, "jobs")
	third := testkit.WaitsForPermit(t, testkit.Semaphore(t, others, 1), "jobs")
	advisoryHolder, advisoryWaiter := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "a holder"}), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "a waiter"})
	lock := testkit.Acquire(t, advisoryHolder, "advisory")
	fourth := testkit.Waits(t, advisoryWaiter, "advisory")
	conn, pid := testkit.Backend(t, db)
	ended := make(chan error, 1)
	go func() {
		_, err := conn.PgConn().Exec(t.Context(), fmt.Sprintf("select pg_advisory_lock(%d)", pgxlock.AdvisoryID("advisory"))).ReadAll()
		ended <- err
	}()

	mon := testkit.NewMonitor(t, db, &monitor.Config{Names: []string{"advisory"}})
	var shot monitor.Snapshot
	pgtest.Until(t, "all wait", func() bool {
		shot = testkit.Snapshot(t, mon)
		leases := testkit.WaitersFor(shot, "lease")
		return len(leases) == 1 && leases[0].Behind == 1 && len(testkit.WaitersFor(shot, "jobs#")) == 1 && len(testkit.WaitersFor(shot, "advisory")) == 2 && len(shot.Waiters) == 4
	})
	held := testkit.HoldersOf(shot, "advisory")[0]
	for _, w := range shot.Waiters {
		if age := shot.At.Sub(w.Since); age < 0 || age > time.Hour {
			t.Errorf("%s waits since %v, at %v", w.Key, w.Since, shot.At)
		}
	}
	if w := testkit.WaitersFor(shot, "lease")[0]; w.Kind != pgxlock.KindLease || w.Owner != "others" || w.Ticket == 0 || w.PID != 0 || w.Woken {
		t.Errorf("%+v", w)
	}
	session, process := testkit.WaitersFor(shot, "advisory")[0], testkit.WaitersFor(shot, "advisory")[1]
	if session.PID != pid || session.Kind != pgxlock.KindAdvisory || !slices.Equal(session.BlockedBy, []int32{held.PID}) || session.Ticket != 0 {
		t.Errorf("the session: %+v", session)
	}
	if process.Owner != "a waiter" || process.Ticket == 0 || !slices.Equal(process.BlockedBy, []int32{held.PID}) {
		t.Errorf("the process: %+v", process)
	}
	for filter, n := range map[monitor.Filter]int{{Kind: pgxlock.KindAdvisory}: 2, {Kind: pgxlock.KindLease}: 2, {Key: "lease"}: 1, {Prefix: "l"}: 1, {}: 4} {
		if found, err := mon.Waiters(t.Context(), filter); err != nil || len(found) != n {
			t.Errorf("%+v: %+v, %v", filter, found, err)
		}
	}

	// Whose session has ended does not wait, though its ticket still stands there.
	db.Exec(t, "insert into pgxlock_waiters values (0, 'lease', -1, 4711, 'died', 1, now(), 'infinity'), (0, 'lease', -2, null, 'ran out', 1, now(), now())")
	if found, err := mon.Waiters(t.Context(), monitor.Filter{Key: "lease"}); err != nil || len(found) != 1 {
		t.Errorf("%+v, %v", found, err)
	}

	testkit.Release(t, lease)
	testkit.Release(t, <-first)
	testkit.Release(t, <-second)
	testkit.Release(t, slot)
	testkit.Release(t, <-third)
	testkit.Release(t, lock)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	testkit.ExecOn(t, conn, "select pg_advisory_unlock_all()")
	testkit.Release(t, <-fourth)
}
