package monitor_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

func TestTreeOfACircleAndOfWhatSeveralHold(t *testing.T) {
	t.Parallel()
	hold := func(key string, pid int32) pgxlock.Holder {
		return pgxlock.Holder{Kind: pgxlock.KindAdvisory, Key: key, PID: pid}
	}
	wait := func(key string, pid int32, holds ...string) monitor.Waiter {
		return monitor.Waiter{Kind: pgxlock.KindAdvisory, Key: key, PID: pid, Holds: holds}
	}
	lease := func(key, owner string) pgxlock.Holder {
		return pgxlock.Holder{Kind: pgxlock.KindLease, Key: key, ID: owner}
	}
	ticket := func(key, holds string) monitor.Waiter {
		return monitor.Waiter{Kind: pgxlock.KindLease, Key: key, Holds: []string{holds}}
	}
	numbered, waitNumbered := hold("#0,7", 5), wait("#0,7", 3)
	numbered.Raw, waitNumbered.Raw = true, true
	var write func(queues []monitor.Queue) string
	write = func(queues []monitor.Queue) (text string) {
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
		shot monitor.Snapshot
		want string
	}{
		"nobody waits": {monitor.Snapshot{Holders: []pgxlock.Holder{hold("a", 1)}}, ""},
		"a circle":     {monitor.Snapshot{Holders: []pgxlock.Holder{hold("a", 1), hold("b", 2)}, Waiters: []monitor.Waiter{wait("b", 1), wait("a", 2)}}, "a1(wb1(wa1()))"},
		"itself":       {monitor.Snapshot{Holders: []pgxlock.Holder{hold("a", 1)}, Waiters: []monitor.Waiter{wait("a", 1)}}, "a1(wa1())"},
		"itself, and who waits behind it keeps another": {monitor.Snapshot{
			Holders: []pgxlock.Holder{hold("b", 2), hold("s", 1)},
			Waiters: []monitor.Waiter{wait("s", 1), wait("s", 2), wait("b", 3)},
		}, "s1(ws1()wb1(w))"},
		"no permit":                        {monitor.Snapshot{Holders: []pgxlock.Holder{hold("jobs#1", 1)}, Waiters: []monitor.Waiter{wait("jobs#", 2)}}, "jobs#0(w)"},
		"a lease that is called as a line": {monitor.Snapshot{Holders: []pgxlock.Holder{lease("jobs#", "me")}, Waiters: []monitor.Waiter{ticket("jobs#", "nothing")}}, "jobs#1(w)"},
		"one has it in both modes": {monitor.Snapshot{
			Holders: []pgxlock.Holder{hold("a", 9), hold("s", 1), hold("s", 1)},
			Waiters: []monitor.Waiter{wait("a", 1), wait("s", 3)},
		}, "a1(ws2(w))"},
		"one has several": {monitor.Snapshot{
			Holders: []pgxlock.Holder{hold("a", 9), hold("c", 1), hold("b", 1)},
			Waiters: []monitor.Waiter{wait("a", 1), wait("b", 2), wait("c", 3)},
		}, "a1(wb1(w)c1(w))"},
		"two hold what a third wants, and wait": {monitor.Snapshot{
			Holders: []pgxlock.Holder{hold("a", 9), hold("s", 1), hold("s", 2)},
			Waiters: []monitor.Waiter{wait("a", 1), wait("a", 2), wait("s", 3)},
		}, "a1(ws2(w)ws2())"},
		"a permit": {monitor.Snapshot{
			Holders: []pgxlock.Holder{lease("jobs#1", "me"), lease("jobs#2", "you"), lease("x", "other")},
			Waiters: []monitor.Waiter{ticket("jobs#", "nothing"), ticket("x", "me")},
		}, "x1(wjobs#2(w))"},
		"a name like a number": {monitor.Snapshot{
			Holders: []pgxlock.Holder{hold("#0,7", 1), numbered},
			Waiters: []monitor.Waiter{wait("#0,7", 2), waitNumbered},
		}, "#0,71(w)#0,71(w)"},
		"nobody holds it": {monitor.Snapshot{Waiters: []monitor.Waiter{ticket("x", "")}}, "x0(w)"},
		"of two kinds":    {monitor.Snapshot{Holders: []pgxlock.Holder{hold("x", 1), lease("x", "me")}, Waiters: []monitor.Waiter{ticket("x", "")}}, "x1(w)"},
		"by its id":       {monitor.Snapshot{Holders: []pgxlock.Holder{numbered, lease("x", "me")}, Waiters: []monitor.Waiter{ticket("x", "advisory:5:2:7"), waitNumbered}}, "x1(w#0,71(w))"},
	} {
		if got := write(test.shot.Waits().Tree()); got != test.want {
			t.Errorf("%s: %s, want %s", what, got, test.want)
		}
	}
}

func TestTreePrintsWhoHoldsAndWhoWaits(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 23, 8, 15, 0, 0, time.UTC)
	holder := pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, Mode: pgxlock.Shared, ID: "pod-7", Token: 9, Since: at}
	waiter := monitor.Waiter{Key: "k", Kind: pgxlock.KindLease, Owner: "pod-8", Behind: 2}
	tree := monitor.Snapshot{At: at, Holders: []pgxlock.Holder{holder}, Waiters: []monitor.Waiter{waiter}}.Waits().Tree()
	if got, want := fmt.Sprint(tree), `[{{lease k false} [shared lease "k" held by pod-7 since 2026-11-23T08:15:00Z, token 9] [pod-8 waits for lease "k", and 2 more of it] 3 false}]`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	blocked := monitor.Blocked{Waiter: &waiter, Blocks: []monitor.Queue{{LockID: monitor.LockID{Kind: pgxlock.KindLease, Key: "a"}}, {LockID: monitor.LockID{Kind: pgxlock.KindAdvisory, Key: "b"}}}}
	if got, want := fmt.Sprint(blocked), `pod-8 waits for lease "k", and 2 more of it, and holds lease "a" and advisory "b"`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// As many as a busy database has: each lock that somebody waits for is one tree.
func TestTreeOfManyLocksShowsEachWaitedForLockOnce(t *testing.T) {
	t.Parallel()
	const held, waited = 30_000, 200
	var shot monitor.Snapshot
	for i := range held {
		shot.Holders = append(shot.Holders,
			pgxlock.Holder{Kind: pgxlock.KindLease, Key: fmt.Sprint("order:", i), ID: fmt.Sprint("host:", i)},
			pgxlock.Holder{Kind: pgxlock.KindAdvisory, Key: fmt.Sprint("#", i), Raw: true, PID: 1})
	}
	for i := range waited {
		shot.Waiters = append(shot.Waiters,
			monitor.Waiter{Kind: pgxlock.KindLease, Key: fmt.Sprint("order:", i), Owner: "waiter"},
			monitor.Waiter{Kind: pgxlock.KindAdvisory, Key: fmt.Sprint("#", i), Raw: true, PID: int32(i + 2)})
	}
	if n := len(shot.Waits().Tree()); n != 2*waited {
		t.Errorf("%d trees, want %d", n, 2*waited)
	}
}

// Each of many waiters may say that it holds what all the others wait for.
func TestBelowAWaiterAreNoMoreThanAHundredLocks(t *testing.T) {
	t.Parallel()
	const locks = 300
	var shot monitor.Snapshot
	for i := range locks {
		key := fmt.Sprintf("k%03d", i)
		shot.Holders = append(shot.Holders, pgxlock.Holder{Kind: pgxlock.KindLease, Key: key, ID: "A"})
		shot.Waiters = append(shot.Waiters, monitor.Waiter{Kind: pgxlock.KindLease, Key: key, Holds: []string{"A", "A"}})
	}
	shown := make(map[string]bool)
	var walk func(queues []monitor.Queue)
	walk = func(queues []monitor.Queue) {
		for _, q := range queues {
			shown[q.Key] = true
			for _, w := range q.Waiters {
				if len(w.Blocks) > 100 {
					t.Errorf("%d locks are below a waiter for %s", len(w.Blocks), q.Key)
				}
				walk(w.Blocks)
			}
		}
	}
	walk(shot.Waits().Tree())
	if len(shown) != locks {
		t.Errorf("%d locks are shown, want %d", len(shown), locks)
	}
}

// Each of many waiters may say that it holds what the one before it waits for.
func TestTreeHasNoMoreThanTenLevels(t *testing.T) {
	t.Parallel()
	const locks = 300
	var shot monitor.Snapshot
	for i := range locks {
		shot.Holders = append(shot.Holders, pgxlock.Holder{Kind: pgxlock.KindLease, Key: fmt.Sprint("k", i), ID: fmt.Sprint("h", i)})
		shot.Waiters = append(shot.Waiters, monitor.Waiter{Kind: pgxlock.KindLease, Key: fmt.Sprint("k", i), Holds: []string{fmt.Sprint("h", i+1)}})
	}
	shown := make(map[string]int)
	var walk func(queues []monitor.Queue, level int)
	walk = func(queues []monitor.Queue, level int) {
		for _, q := range queues {
			shown[q.Key] += len(q.Waiters)
			if len(q.Waiters) > 0 && level > 10 {
				t.Errorf("%s and its waiters are on level %d", q.Key, level)
			}
			for _, w := range q.Waiters {
				walk(w.Blocks, level+1)
			}
		}
	}
	walk(shot.Waits().Tree(), 0)
	for i := range locks {
		if key := fmt.Sprint("k", i); shown[key] != 1 {
			t.Errorf("the waiter for %s is shown %d times", key, shown[key])
		}
	}
}
