package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
)

// A holds l1; B waits for it with l2 in hand; C waits for that with an advisory lock; and
// a session waits for that in the server, which has one that another session wants.
func TestTreeShowsWhatAWaiterKeepsFromOthers(t *testing.T) {
	pgtest.Long(t)
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
	locks := testkit.NewMonitor(t, db, &monitor.Config{Names: []string{"l3"}})
	var write func(indent string, queues []monitor.Queue) string
	write = func(indent string, queues []monitor.Queue) (text string) {
		for _, q := range queues {
			text += indent + q.Key
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
	pgtest.Until(t, "the tree is "+want, func() bool { return write("", testkit.Snapshot(t, locks).Waits().Tree()) == want })
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

func TestTreeNamesTheOldestOfManyHolders(t *testing.T) {
	t.Parallel()
	at := time.Now()
	var holders []*pgxlock.Holder
	for i := range 30 {
		holders = append(holders, &pgxlock.Holder{ID: fmt.Sprint("pod-", i), Mode: pgxlock.Shared, Since: at.Add(time.Duration(i-60) * time.Second)})
	}
	slices.Reverse(holders)
	for want, some := range map[string][]*pgxlock.Holder{
		"shared by pod-7 for 53s": holders[22:23],
		"shared by 30: pod-0 for 1m0s, pod-1 for 59s, pod-2 for 58s and 27 more": holders,
		"held by 2: pod-0 for 1m0s, writer":                                      {holders[29], {ID: "writer"}},
	} {
		if got := heldFor(at, some); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
