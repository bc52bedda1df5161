package pgxlock_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Who waits, and who blocks whom.

func TestTheMonitorShowsWhoWaitsForHowLongAndForWhom(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	holder, others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "holder"}), testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "others"})
	lease := testkit.Acquire(t, holder, "lease")
	first := testkit.Waits(t, others, "lease")
	testkit.Until(t, "the first one waits", func() bool { return others.Waiting("lease") == 1 })
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

	monitor := testkit.NewMonitor(t, db, &pgxlock.MonitorConfig{Names: []string{"advisory"}})
	var shot pgxlock.Snapshot
	testkit.Until(t, "all wait", func() bool {
		shot = testkit.Snapshot(t, monitor)
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
	for filter, n := range map[pgxlock.Filter]int{{Kind: pgxlock.KindAdvisory}: 2, {Kind: pgxlock.KindLease}: 2, {Key: "lease"}: 1, {Prefix: "l"}: 1, {}: 4} {
		if found, err := monitor.Waiters(t.Context(), filter); err != nil || len(found) != n {
			t.Errorf("%+v: %+v, %v", filter, found, err)
		}
	}

	// Whose session has ended does not wait, though its ticket still stands there.
	db.Exec(t, "insert into pgxlock_waiters values (0, 'lease', -1, 4711, 'died', 1, now(), 'infinity'), (0, 'lease', -2, null, 'ran out', 1, now(), now())")
	if found, err := monitor.Waiters(t.Context(), pgxlock.Filter{Key: "lease"}); err != nil || len(found) != 1 {
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

// A holds l1; B waits for it with l2 in hand; C waits for that with an advisory lock; and
// a session waits for that in the server, which has one that another session wants.
func TestTheTreeShowsWhatAWaiterKeepsFromOthers(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	a := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "A"})
	b := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "B"})
	c := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "C"})
	first, l2 := testkit.Acquire(t, a, "l1"), testkit.Acquire(t, b, "l2")
	advisoryLocks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "C"})
	l3 := testkit.Acquire(t, advisoryLocks, "l3")
	waitWith := func(held *pgxlock.Lock, locks *pgxlock.Locker, key string) <-chan *pgxlock.Lock {
		granted := make(chan *pgxlock.Lock, 1)
		ctx, cancel := held.Context(t.Context())
		go func() {
			defer cancel()
			lock, err := locks.Acquire(ctx, key)
			if err != nil {
				t.Error(err)
			}
			granted <- lock
		}()
		return granted
	}
	gotL1, gotL2 := waitWith(l2, b, "l1"), waitWith(l3, c, "l2")
	one, _ := testkit.Backend(t, db)
	testkit.ExecOn(t, one, "set application_name = 'one'; select pg_advisory_lock(4)")
	two, _ := testkit.Backend(t, db)
	testkit.ExecOn(t, two, "set application_name = 'two'")
	done := make(chan error, 2)
	for conn, key := range map[*pgx.Conn]int64{one: pgxlock.AdvisoryID("l3"), two: 4} {
		go func() {
			_, err := conn.PgConn().Exec(t.Context(), fmt.Sprintf("select pg_advisory_lock(%d); select pg_advisory_unlock_all()", key)).ReadAll()
			done <- err
		}()
	}
	monitor := testkit.NewMonitor(t, db, &pgxlock.MonitorConfig{Names: []string{"l3"}})
	var write func(indent string, queues []pgxlock.Queue) string
	write = func(indent string, queues []pgxlock.Queue) (text string) {
		for _, q := range queues {
			text += indent + strings.TrimPrefix(q.Key, "\x00")
			for _, h := range q.Holders {
				owner, _, _ := strings.Cut(h.ID, ":")
				text += " " + strings.Fields(owner)[0]
			}
			text += "\n"
			for _, w := range q.Waiters {
				owner, _, _ := strings.Cut(w.Owner, ":")
				text += indent + "- " + owner + "\n" + write(indent+"  ", w.Blocks)
			}
		}
		return text
	}
	const want = `l1 A
- B
  l2 B
  - C
    l3 C
    - one
      #4 one
      - two
`
	tree := ""
	limit := time.Now().Add(time.Minute)
	for tree != want {
		tree = write("", testkit.Snapshot(t, monitor).Tree())
		if time.Now().After(limit) {
			t.Fatalf("%s", tree)
		}
	}
	testkit.Release(t, first)
	gotFirst := <-gotL1
	testkit.Release(t, l2)
	testkit.Release(t, <-gotL2)
	testkit.Release(t, l3)
	testkit.Release(t, gotFirst)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestTheTreeOfACircleAndOfWhatSeveralHold(t *testing.T) {
	t.Parallel()
	hold := func(key string, pid int32) pgxlock.Holder {
		return pgxlock.Holder{Kind: pgxlock.KindAdvisory, Key: key, PID: pid}
	}
	wait := func(key string, pid int32, holds ...string) pgxlock.Waiter {
		return pgxlock.Waiter{Kind: pgxlock.KindAdvisory, Key: key, PID: pid, Holds: holds}
	}
	lease := func(key, owner string) pgxlock.Holder {
		return pgxlock.Holder{Kind: pgxlock.KindLease, Key: key, ID: owner}
	}
	ticket := func(key, holds string) pgxlock.Waiter {
		return pgxlock.Waiter{Kind: pgxlock.KindLease, Key: key, Holds: []string{holds}}
	}
	var write func(queues []pgxlock.Queue) string
	write = func(queues []pgxlock.Queue) (text string) {
		for _, q := range queues {
			text += fmt.Sprintf("%s%d(", q.Key, len(q.Holders))
			for _, w := range q.Waiters {
				text += fmt.Sprint("w", write(w.Blocks))
			}
			text += ")"
		}
		return text
	}
	for what, test := range map[string]struct {
		shot pgxlock.Snapshot
		want string
	}{
		"nobody waits": {pgxlock.Snapshot{Holders: []pgxlock.Holder{hold("a", 1)}}, ""},
		"a circle":     {pgxlock.Snapshot{Holders: []pgxlock.Holder{hold("a", 1), hold("b", 2)}, Waiters: []pgxlock.Waiter{wait("b", 1), wait("a", 2)}}, "a1(wb1(wa1()))"},
		"itself":       {pgxlock.Snapshot{Holders: []pgxlock.Holder{hold("a", 1)}, Waiters: []pgxlock.Waiter{wait("a", 1)}}, "a1(wa1())"},
		"itself, and who waits behind it keeps another": {pgxlock.Snapshot{
			Holders: []pgxlock.Holder{hold("b", 2), hold("s", 1)},
			Waiters: []pgxlock.Waiter{wait("s", 1), wait("s", 2), wait("b", 3)},
		}, "s1(ws1()wb1(w))"},
		"no permit":                        {pgxlock.Snapshot{Holders: []pgxlock.Holder{hold("jobs#1", 1)}, Waiters: []pgxlock.Waiter{wait("jobs#", 2)}}, "jobs#0(w)"},
		"a lease that is called as a line": {pgxlock.Snapshot{Holders: []pgxlock.Holder{lease("jobs#", "me")}, Waiters: []pgxlock.Waiter{ticket("jobs#", "nothing")}}, "jobs#1(w)"},
		"one has it in both modes": {pgxlock.Snapshot{
			Holders: []pgxlock.Holder{hold("a", 9), hold("s", 1), hold("s", 1)},
			Waiters: []pgxlock.Waiter{wait("a", 1), wait("s", 3)},
		}, "a1(ws2(w))"},
		"one has several": {pgxlock.Snapshot{
			Holders: []pgxlock.Holder{hold("a", 9), hold("c", 1), hold("b", 1)},
			Waiters: []pgxlock.Waiter{wait("a", 1), wait("b", 2), wait("c", 3)},
		}, "a1(wb1(w)c1(w))"},
		"two hold what a third wants, and wait": {pgxlock.Snapshot{
			Holders: []pgxlock.Holder{hold("a", 9), hold("s", 1), hold("s", 2)},
			Waiters: []pgxlock.Waiter{wait("a", 1), wait("a", 2), wait("s", 3)},
		}, "a1(ws2(w)ws2())"},
		"a permit": {pgxlock.Snapshot{
			Holders: []pgxlock.Holder{lease("jobs#1", "me"), lease("jobs#2", "you"), lease("x", "other")},
			Waiters: []pgxlock.Waiter{ticket("jobs#", "nothing"), ticket("x", "me")},
		}, "x1(wjobs#2(w))"},
		"nobody holds it": {pgxlock.Snapshot{Waiters: []pgxlock.Waiter{ticket("x", "")}}, "x0(w)"},
		"of two kinds":    {pgxlock.Snapshot{Holders: []pgxlock.Holder{hold("x", 1), lease("x", "me")}, Waiters: []pgxlock.Waiter{ticket("x", "")}}, "x1(w)"},
		"by its id":       {pgxlock.Snapshot{Holders: []pgxlock.Holder{hold(pgxlock.RawKey2(0, 7), 5), lease("x", "me")}, Waiters: []pgxlock.Waiter{ticket("x", "advisory:5:2:7"), wait(pgxlock.RawKey2(0, 7), 3)}}, "x1(w\x00#0,71(w))"},
	} {
		if got := write(test.shot.Tree()); got != test.want {
			t.Errorf("%s: %s, want %s", what, got, test.want)
		}
	}
}
