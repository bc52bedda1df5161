package waittree_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/waittree"
)

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
	var write func(queues []waittree.Queue) string
	write = func(queues []waittree.Queue) (text string) {
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
		if got := write(waittree.Of(test.shot)); got != test.want {
			t.Errorf("%s: %s, want %s", what, got, test.want)
		}
	}
}

func TestTreePrintsWhoHoldsAndWhoWaits(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 23, 8, 15, 0, 0, time.UTC)
	holder := pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, Mode: pgxlock.Shared, ID: "pod-7", Token: 9, Since: at}
	waiter := pgxlock.Waiter{Key: "k", Kind: pgxlock.KindLease, Owner: "pod-8", Behind: 2}
	tree := waittree.Of(pgxlock.Snapshot{At: at, Holders: []pgxlock.Holder{holder}, Waiters: []pgxlock.Waiter{waiter}})
	if got, want := fmt.Sprint(tree), `[{k lease [shared lease "k" held by pod-7 since 2026-11-23T08:15:00Z, token 9] [pod-8 waits for lease "k", and 2 more of it] false}]`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	blocked := waittree.Blocked{Waiter: waiter, Blocks: []waittree.Queue{{Key: "a", Kind: pgxlock.KindLease}, {Key: "b", Kind: pgxlock.KindAdvisory}}}
	if got, want := fmt.Sprint(blocked), `pod-8 waits for lease "k", and 2 more of it, and holds lease "a" and advisory "b"`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// As many as a busy database has: each lock that somebody waits for is one tree.
func TestTreeOfManyLocksShowsEachWaitedForLockOnce(t *testing.T) {
	t.Parallel()
	const held, waited = 30_000, 200
	var shot pgxlock.Snapshot
	for i := range held {
		shot.Holders = append(shot.Holders,
			pgxlock.Holder{Kind: pgxlock.KindLease, Key: fmt.Sprint("order:", i), ID: fmt.Sprint("host:", i)},
			pgxlock.Holder{Kind: pgxlock.KindAdvisory, Key: pgxlock.RawKey(int64(i)), PID: 1})
	}
	for i := range waited {
		shot.Waiters = append(shot.Waiters,
			pgxlock.Waiter{Kind: pgxlock.KindLease, Key: fmt.Sprint("order:", i), Owner: "waiter"},
			pgxlock.Waiter{Kind: pgxlock.KindAdvisory, Key: pgxlock.RawKey(int64(i)), PID: int32(i + 2)})
	}
	if n := len(waittree.Of(shot)); n != 2*waited {
		t.Errorf("%d trees, want %d", n, 2*waited)
	}
}

// Each of many waiters may say that it holds what all the others wait for.
func TestBelowAWaiterAreNoMoreThanAHundredLocks(t *testing.T) {
	t.Parallel()
	const locks = 300
	var shot pgxlock.Snapshot
	for i := range locks {
		key := fmt.Sprintf("k%03d", i)
		shot.Holders = append(shot.Holders, pgxlock.Holder{Kind: pgxlock.KindLease, Key: key, ID: "A"})
		shot.Waiters = append(shot.Waiters, pgxlock.Waiter{Kind: pgxlock.KindLease, Key: key, Holds: []string{"A", "A"}})
	}
	shown := make(map[string]bool)
	var walk func(queues []waittree.Queue)
	walk = func(queues []waittree.Queue) {
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
	walk(waittree.Of(shot))
	if len(shown) != locks {
		t.Errorf("%d locks are shown, want %d", len(shown), locks)
	}
}
