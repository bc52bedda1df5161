package waitqueue

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// returned counts how often a release was given back.
type returned int

func (r *returned) Return() { *r++ }

// resting returns callers that wait for the lock, in their order.
func resting(q *Queue, name lockkey.Name, modes ...hold.Mode) (all []*position) {
	for _, mode := range modes {
		p := q.join(name, &hold.Busy{}, nil, mode)
		p.rest(true)
		all = append(all, p)
	}
	return all
}

// wakes returns a queue, and how many wake-ups it has sent.
func wakes() (*Queue, *atomic.Int32) {
	var n atomic.Int32
	return newQueue(runs(func(dbconn.Exchange) error {
		n.Add(1)
		return nil
	})), &n
}

var exclusively = make([]hold.Mode, mostInTurn+2)

func TestTurnServesManyCallersForAMomentAndFewForLonger(t *testing.T) {
	t.Parallel()
	name := lockkey.Name{Key: "k"}
	for what, c := range map[string]struct {
		waiting, later int
		held           time.Duration // by the first
		want           int
	}{
		"nobody else":                {waiting: 1, want: 1},
		"another one":                {waiting: 2, want: 2},
		"more than it serves":        {waiting: mostInTurn + 2, want: mostInTurn},
		"later ones":                 {waiting: 2, later: 3, held: shortTurn, want: 5},
		"too many later ones":        {waiting: 2, later: mostInTurn, want: mostInTurn},
		"later ones, a long hold":    {waiting: 2, later: 3, held: shortTurn + 1, want: 2},
		"many, a long hold":          {waiting: mostInTurn, held: handOverTime, want: sureInTurn},
		"another, a longer hold":     {waiting: 2, held: handOverTime + 1, want: 1},
		"nobody waited, a long hold": {waiting: 1, later: 3, held: shortTurn + 1, want: 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			q := newLocal()
			all := resting(q, name, exclusively[:c.waiting]...)
			all[0].granted(0, true)
			all = append(all, resting(q, name, exclusively[:c.later]...)...)
			time.Sleep(c.held)
			served := 1
			for q.HandOver(name, nil) {
				if got := all[served].try(); !got.Handed || got.Ticket != 0 {
					t.Fatalf("%s: its try carries %+v", what, got)
				}
				all[served].granted(0, true)
				served++
			}
			if served != c.want {
				t.Errorf("%s: %d were served, want %d", what, served, c.want)
			}
			q.Freed(name)
			if served < len(all) && all[served].try().Handed {
				t.Errorf("%s: the lock is left to another one after the turn", what)
			}
		})
	}
}

func TestReadersInARowShareATurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q, name := newLocal(), lockkey.Name{Key: "k"}
		modes := slices.Repeat([]hold.Mode{hold.Shared}, mostInTurn+1)
		modes[2] = hold.Exclusive
		all := resting(q, name, modes...)
		for i, want := range []bool{true, false} { // a writer is next after the second
			if got := all[i].granted(0, false); got != want {
				t.Errorf("reader %d: the next one shares the lock: %t", i, got)
			}
			if got := all[i+1].try(); got.Handed != want || got.Release != nil {
				t.Errorf("the try of the next one carries %+v", got)
			}
		}
		all[2].granted(0, true)
		q.Freed(name)
		if all[3].try().Handed {
			t.Error("readers come before the others after a turn of a writer")
		}
		all[3].granted(0, false)
		time.Sleep(shortTurn + 1)
		for i := range 3 {
			if got, want := all[4+i].try().Handed, i < sureInTurn-1; got != want {
				t.Errorf("reader %d of a long turn shares the lock: %t", i, got)
			}
			all[4+i].granted(0, false)
		}
		if all[7].try().Handed {
			t.Error("a long turn serves too many")
		}
	})
}

func TestLockIsLeftOnlyToACallerThatTriesAtOnce(t *testing.T) {
	t.Parallel()
	name := lockkey.Name{Key: "k"}
	for what, c := range map[string]struct {
		modes  []hold.Mode
		before func(next *position)
		want   bool
	}{
		"it waits exclusively": {modes: exclusively[:2], want: true},
		"it is a reader":       {modes: []hold.Mode{hold.Exclusive, hold.Shared}},
		"its try is in flight": {modes: exclusively[:2], before: func(next *position) { next.rest(false) }},
		"the turn has lasted":  {modes: exclusively[:2], before: func(*position) { time.Sleep(handOverTime + 1) }},
		"it has left":          {modes: exclusively[:2], before: (*position).leave},
		"nobody has the lock":  {modes: exclusively[:2], before: func(next *position) { next.queue.Freed(next.local.name) }},
	} {
		synctest.Test(t, func(t *testing.T) {
			q := newLocal()
			all := resting(q, name, c.modes...)
			all[0].granted(0, true)
			if c.before != nil {
				c.before(all[1])
			}
			if got := q.HandOver(name, nil); got != c.want {
				t.Errorf("%s: the lock is left to it: %t", what, got)
			}
		})
	}
}

// A release that nobody finishes, or a free lock of which no waiter elsewhere hears, would keep all waiting.
func TestLockThatIsLeftToACallerIsNotLostWithIt(t *testing.T) {
	t.Parallel()
	name := lockkey.Name{Key: "k"}
	for what, c := range map[string]struct {
		end      func(next *position)
		returned returned
		woken    int32
	}{
		"it leaves before its try":         {end: (*position).leave, returned: 1, woken: 1},
		"its try fails":                    {end: func(next *position) { next.try(); next.failed() }, woken: 1},
		"its try fails, and then it tries": {end: func(next *position) { next.try(); next.failed(); next.try(); next.failed() }, woken: 1},
		"it leaves after its try":          {end: func(next *position) { next.try(); next.leave() }, woken: 1},
		"its try is granted":               {end: func(next *position) { next.try(); next.granted(0, true) }},
	} {
		q, woken := wakes()
		all := resting(q, name, exclusively[:3]...)
		all[0].granted(0, true)
		var release returned
		if !q.HandOver(name, &release) {
			t.Fatalf("%s: the lock is not left to it", what)
		}
		c.end(all[1])
		<-q.waking.Done()
		if release != c.returned || woken.Load() != c.woken {
			t.Errorf("%s: the release was returned %d times, and %d wake-ups were sent; want %d and %d", what, release, woken.Load(), c.returned, c.woken)
		}
		if turn := all[2].try(); turn.Handed || turn.Release != nil {
			t.Errorf("%s: the next try carries %+v", what, turn)
		}
	}
}

func TestTicketOfTheNextTurnIsDrawnWhenATurnBegins(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for kind, name := range map[string]lockkey.Name{"a lease": {Key: "k"}, "an advisory lock": {ID: lockkey.Identify("k")}} {
		q := connected(t, db, nobody{})
		q.mu.Lock()
		q.seeLocked(name)
		q.mu.Unlock()
		all := resting(q, name, exclusively[:3]...)
		q.enter(all[0].local)
		all[0].granted(0, true)
		q.mu.Lock()
		all[0].local.turn.began = time.Now().Add(time.Hour) // a slow server does not end the turn
		q.mu.Unlock()
		number := func() (n int64) {
			q.mu.Lock()
			defer q.mu.Unlock()
			if t := all[2].local.ticket; t != nil {
				n = t.number
			}
			return n
		}
		pgtest.Until(t, kind+": there is a ticket", func() bool { return number() != 0 })
		first := number()
		if !q.HandOver(name, nil) || !all[1].try().Handed {
			t.Fatal("not handed over")
		}
		all[1].granted(0, true)
		if got := number(); got != first {
			t.Errorf("%s: the next turn has ticket %d, and had %d", kind, got, first)
		}
		all[2].leave()
	}
}

// A Locker of advisory locks needs no tables.
func TestTurnThatEndsEarlySendsNothingWithoutATableForTickets(t *testing.T) {
	t.Parallel()
	q := newLocal()
	sent := make(chan struct{}, 10)
	q.Connect(Server{Owner: "owner", Place: &dbconn.Installation{}, Leaders: nobody{}, Runner: runs(func(dbconn.Exchange) error {
		sent <- struct{}{}
		return nil
	})})
	q.listener.stop()
	name := lockkey.Name{ID: lockkey.Identify("k")}
	var first, next Waiter
	q.Begin(t.Context(), &first, hold.Request{}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	q.Begin(ctx, &next, hold.Request{}, nil)
	first.Enqueue(name, theirs)
	next.Enqueue(name, theirs)
	first.Turn()
	first.Granted()
	next.position.rest(true)
	if !q.HandOver(name, nil) {
		t.Fatal("the lock is not left to the next caller")
	}
	cancel()
	next.End()
	<-q.waking.Done()
	if len(sent) > 0 {
		t.Error("a statement is sent that needs a table which is not there")
	}
}
