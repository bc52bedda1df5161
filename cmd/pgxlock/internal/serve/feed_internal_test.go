package serve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
)

func TestHistoryIsOfTheLastHourAlsoIfNobodyLooked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		s := &Server{feed: &feed{changed: make(chan struct{}), read: func(_ context.Context, before *state) *state {
			reads++
			now := &state{at: time.Now(), shot: monitor.Snapshot{At: time.Now()}}
			now.remember(before)
			return now
		}}}
		ctx, cancel := context.WithCancel(t.Context())
		go s.Record(ctx)
		time.Sleep(2 * span)
		cancel()
		synctest.Wait()
		if most := int(2*span/beat) + 1; reads < most-1 || reads > most {
			t.Errorf("%d reads in two hours, want one each %s", reads, beat)
		}
		last, _ := s.feed.next()
		if n := len(last.history); n < plotSteps-1 || n > plotSteps {
			t.Errorf("%d samples of the last hour", n)
		}
		if p := last.plots()[0]; strings.Count(p.Line, "M") != 1 || !strings.HasPrefix(p.Area, "M0.0 ") {
			t.Errorf("the plot of the hour has gaps: %s", p.Area)
		}
	})
}

// Between two snapshots a lease may end and be taken over. It was lost if no renewal came,
// and not if it was released.
func TestLeaseIsLostIfItsWaiterGotItWhenItEnded(t *testing.T) {
	t.Parallel()
	began := time.Now()
	at := func(seconds float64) time.Time { return began.Add(time.Duration(seconds * float64(time.Second))) }
	lease := func(id string, since, expires float64) pgxlock.Holder {
		return pgxlock.Holder{Key: "order:1", Kind: pgxlock.KindLease, ID: id, Token: int64(since), State: pgxlock.StateLive, Since: at(since), Expires: at(expires)}
	}
	see := func(before *state, seconds float64, waiters int, holders ...pgxlock.Holder) *state {
		now := &state{at: at(seconds), shot: monitor.Snapshot{At: at(seconds), Holders: holders}}
		for range waiters {
			now.shot.Waiters = append(now.shot.Waiters, monitor.Waiter{Key: "order:1", Kind: pgxlock.KindLease})
		}
		now.remember(before)
		return now
	}
	for name, test := range map[string]struct {
		ttl     float64 // default: 30
		next    float64 // when the next holder acquired it
		left    float64 // in the snapshot before
		seen    float64 // the next snapshot
		waiters int
		lost    bool
	}{
		"taken over when it ended":    {next: 101.2, left: 1, seen: 102, waiters: 1, lost: true},
		"released before":             {next: 100.5, left: 1, seen: 102, waiters: 1},
		"renewed, and released":       {next: 101.2, left: 25, seen: 102, waiters: 1},
		"nobody waited":               {next: 101.2, left: 1, seen: 102},
		"acquired long after its end": {next: 103.5, left: 1, seen: 104, waiters: 1},
		"nobody looked for long":      {next: 101.2, left: 1, seen: 130, waiters: 1},
		"a short one, renewed":        {ttl: 3, next: 102.6, left: 2.5, seen: 104, waiters: 1},
	} {
		first := see(nil, 10, 0, lease("pod-1", 1, 10+cmp.Or(test.ttl, 30)))
		before := see(first, 100, test.waiters, lease("pod-1", 1, 100+test.left))
		now := see(before, test.seen, 0, lease("pod-2", test.next, 160))
		if got := len(now.losses) == 1; got != test.lost {
			t.Errorf("%s: %+v", name, now.losses)
		}
		if test.lost && (now.losses[0].Next != "pod-2" || now.losses[0].Holder.ID != "pod-1") {
			t.Errorf("%s: %+v", name, now.losses)
		}
		if later := see(now, 3710, 0); len(later.losses) != 0 {
			t.Errorf("%s: shown after an hour: %+v", name, later.losses)
		}
	}
}

func TestRenewalIsLateWhereTheHolderRenewedBefore(t *testing.T) {
	t.Parallel()
	began := time.Now()
	at := func(seconds float64) time.Time { return began.Add(time.Duration(seconds * float64(time.Second))) }
	for name, test := range map[string]struct {
		expires []float64 // in the snapshots of each second
		late    bool
	}{
		"renewed in time":       {[]float64{6, 6, 8, 8, 10, 10}, false},
		"renewed no more":       {[]float64{6, 6, 8, 8, 8, 8, 8}, true},
		"renewed late, at last": {[]float64{6, 6, 8, 8, 8, 8, 12}, false},
		"never renewed":         {[]float64{6, 6, 6, 6, 6, 6}, false},
	} {
		var now *state
		var h pgxlock.Holder
		for second, expires := range test.expires {
			before := now
			hold := pgxlock.Holder{Key: "k", Kind: pgxlock.KindLease, ID: "pod-1", Token: 1, State: pgxlock.StateLive, Since: began, Expires: at(expires)}
			now = &state{at: at(float64(second)), shot: monitor.Snapshot{At: at(float64(second)), Holders: []pgxlock.Holder{hold}}}
			now.remember(before)
			h = now.shot.Holders[0]
		}
		if h.Late != test.late {
			t.Errorf("%s: late %t", name, h.Late)
		}
		forest := plant(now.shot)
		row := new(Server).holder(now, forest, &h)
		if shown := strings.Contains(rendered(t, page{Holders: table[holderRow]{Rows: []holderRow{row}, All: 1}}), "renewal late"); shown != test.late {
			t.Errorf("%s: shown %t", name, shown)
		}
		next := monitor.Snapshot{At: now.shot.At, Holders: []pgxlock.Holder{h}}
		next.Holders[0].Token = 2 // another hold
		if now.renewals.With(&next); next.Holders[0].Late {
			t.Errorf("%s: the next hold is late", name)
		}
	}
}

// hoarded is a snapshot of one session that holds locks, each of which others wait for.
func hoarded(locks, waiters int) (shot monitor.Snapshot) {
	for i := range locks {
		key := fmt.Sprint("#", i)
		shot.Holders = append(shot.Holders, pgxlock.Holder{Key: key, Raw: true, Kind: pgxlock.KindAdvisory, ID: "hoarder:1", PID: 1})
		for j := range waiters {
			pid := int32(2 + i*waiters + j)
			shot.Waiters = append(shot.Waiters, monitor.Waiter{Key: key, Raw: true, Kind: pgxlock.KindAdvisory, PID: pid, Owner: fmt.Sprint("waiter:", pid)})
		}
	}
	return shot
}

func TestLeaseThatCannotBeSeenIsNotLost(t *testing.T) {
	t.Parallel()
	at := time.Now()
	before := &state{at: at, shot: monitor.Snapshot{At: at, Expired: []pgxlock.Holder{{Key: "k", Kind: pgxlock.KindLease, ID: "A", Expires: at.Add(-time.Minute)}}}}
	before.remember(nil)
	for _, unread := range []error{nil, errors.New("denied")} {
		now := &state{at: at, shot: monitor.Snapshot{At: at, Unread: monitor.Unread{Leases: unread}}}
		now.remember(before)
		if lost := len(now.losses) > 0; lost != (unread == nil) {
			t.Errorf("leases could not be read: %v; losses: %+v", unread, now.losses)
		}
		held, behind := now.plots()[0], now.plots()[3]
		if known := unread == nil; known != (held.Now == "0") || known != (behind.Now == "0") || !known && (held.Now != "≥ 0" || behind.Now != "–") || behind.Most != "1" {
			t.Errorf("leases could not be read: %v; held %+v; left behind %+v", unread, held, behind)
		}
	}
}

func TestArrowThatClosesACircleCrossesNoBox(t *testing.T) {
	t.Parallel()
	var shot monitor.Snapshot
	for _, session := range []struct {
		pid           int32
		name          string
		holds, awaits int32
	}{{4, "nightly", 74, 71}, {1, "ledger", 71, 72}, {2, "archive", 72, 73}, {3, "reports", 73, 71}} {
		shot.Holders = append(shot.Holders, pgxlock.Holder{Key: fmt.Sprint("#", session.holds), Raw: true, Kind: pgxlock.KindAdvisory, ID: session.name, PID: session.pid})
		shot.Waiters = append(shot.Waiters, monitor.Waiter{Key: fmt.Sprint("#", session.awaits), Raw: true, Kind: pgxlock.KindAdvisory, Owner: session.name, PID: session.pid})
	}
	d := plant(shot).draw(time.Now(), query{})
	closing := 0
	for _, l := range d.Lines {
		var x1, y1, x2, y2, x3, y3, x4, y4 float64
		if _, err := fmt.Sscanf(l.Path, "M%f %fC%f %f %f %f %f %f", &x1, &y1, &x2, &y2, &x3, &y3, &x4, &y4); err != nil {
			t.Fatalf("%q: %v", l.Path, err)
		}
		if x4 < x1 {
			continue
		}
		closing++
		for at := 0.05; at < 0.95; at += 0.01 {
			curve := func(a, b, c, d float64) float64 {
				rest := 1 - at
				return rest*rest*rest*a + 3*rest*rest*at*b + 3*rest*at*at*c + at*at*at*d
			}
			x, y := curve(x1, x2, x3, x4), curve(y1, y2, y3, y4)
			for _, b := range d.Nodes {
				if x > float64(b.X) && x < float64(b.X+b.Width) && y > float64(b.Y) && y < float64(b.Y+b.Height) {
					t.Fatalf("the arrow %q crosses %q: %+v", l.Path, b.Name, b)
				}
			}
		}
	}
	if closing != 1 || len(d.Deadlocks) != 1 {
		t.Errorf("%d arrows close circles: %q", closing, d.Deadlocks)
	}
}

func TestDrawingHasThreeHundredNodesAtMost(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ locks, waiters, nodes, hidden int }{
		{1, 1, 3, 0},
		{1, 300, 2 + mostAlike, 0},
		{100, 1, 201, 0},
		{50, 4, 251, 0},
		{400, 2, mostDrawn, 300}, // one holder, and 3 nodes for each of about 100 locks
	} {
		d := plant(hoarded(test.locks, test.waiters)).draw(time.Now(), query{})
		if len(d.Nodes) != test.nodes || d.Hidden < test.hidden || (test.hidden == 0) != (d.Hidden == 0) {
			t.Errorf("%d locks with %d waiters: %d nodes, want %d; %d locks are not drawn, want %d", test.locks, test.waiters, len(d.Nodes), test.nodes, d.Hidden, test.hidden)
		}
		for i, a := range d.Nodes {
			if a.X < 0 || a.Y < 0 || a.X+a.Width > d.Width || a.Y+a.Height > d.Height {
				t.Fatalf("%q is outside of the drawing: %+v in %d by %d", a.Name, a, d.Width, d.Height)
			}
			for _, b := range d.Nodes[:i] {
				if a.X < b.X+b.Width && b.X < a.X+a.Width && a.Y < b.Y+b.Height && b.Y < a.Y+a.Height {
					t.Fatalf("%q covers %q: %+v, %+v", a.Name, b.Name, a, b)
				}
			}
		}
	}
	// Many small trees stand in rows.
	shot := monitor.Snapshot{}
	for i := range 300 {
		key := fmt.Sprint("order:", i)
		shot.Holders = append(shot.Holders, pgxlock.Holder{Key: key, Kind: pgxlock.KindLease, ID: fmt.Sprint("pod:", i)})
		shot.Waiters = append(shot.Waiters, monitor.Waiter{Key: key, Kind: pgxlock.KindLease, Owner: "worker", Ticket: int64(i)})
	}
	d := plant(shot).draw(time.Now(), query{})
	if d.Hidden != 200 || len(d.Nodes) != mostDrawn || d.Width > rowWidth || !slices.ContainsFunc(d.Nodes[3:], func(b box) bool { return b.Y == d.Nodes[0].Y && b.X > d.Nodes[2].X }) {
		t.Errorf("%d nodes, %d locks are not drawn, %d by %d", len(d.Nodes), d.Hidden, d.Width, d.Height)
	}
	if d := plant(shot).draw(time.Now(), query{Kind: "advisory"}); len(d.Nodes) != 0 {
		t.Errorf("leases are drawn in a search for advisory locks: %+v", d.Nodes)
	}
}

func TestViewersWithTheSameSearchShareAnEvent(t *testing.T) {
	t.Parallel()
	s := &Server{}
	shot := hoarded(3, 1)
	now := &state{shot: shot, graph: func() *forest { return plant(shot) }, live: new(sync.Map)}
	all, some := s.live(now, query{}), s.live(now, query{Text: "nowhere", words: [][]byte{[]byte("nowhere")}})
	if again := s.live(now, query{}); &again[0] != &all[0] {
		t.Error("a second viewer is rendered for anew")
	}
	if !strings.Contains(string(all), "hoarder:1") || strings.Contains(string(some), "hoarder:1") {
		t.Errorf("viewers with different searches see the same:\n%s\n%s", all, some)
	}
}

func TestEvictionShowsAtOnceAlsoIfTheLastStateIsNew(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reads := 0
		answer := make(chan struct{}, 1)
		f := &feed{changed: make(chan struct{}), read: func(context.Context, *state) *state {
			reads++
			<-answer
			return &state{at: time.Now()}
		}}
		get := func() *state {
			t.Helper()
			s, err := f.get(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		answer <- struct{}{}
		before := get()
		if get() != before || reads != 1 {
			t.Fatal("a new state is read again")
		}
		f.change()
		answer <- struct{}{}
		if get() == before {
			t.Error("the state is older than the change")
		}

		// A read that began before a change does not show it.
		time.Sleep(minAge)
		got := make(chan *state)
		go func() { got <- get() }()
		synctest.Wait()
		f.change()
		answer <- struct{}{}
		synctest.Wait()
		answer <- struct{}{}
		if <-got; reads != 4 {
			t.Errorf("%d reads, want 4", reads)
		}
	})
}

func TestStateThatTookLongToReadIsShownForLonger(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reads, cannot := 0, ""
		takes := 200 * time.Millisecond
		f := &feed{changed: make(chan struct{}), read: func(context.Context, *state) *state {
			reads++
			time.Sleep(takes)
			return &state{at: time.Now(), cannot: cannot}
		}}
		after := func(rest time.Duration, want int) {
			t.Helper()
			time.Sleep(rest)
			if _, err := f.get(t.Context()); err != nil || reads != want {
				t.Errorf("%d reads, want %d: %v", reads, want, err)
			}
		}
		after(0, 1)
		after(minAge, 2) // the first one also took the time to connect
		after(restFactor*takes-1, 2)
		takes = time.Second
		after(1, 3)
		after(maxAge-1, 3)
		cannot = "no server"
		after(1, 4)
		after(minAge, 5) // the next one may work
	})
}

func TestFailureRecoveryAndWhatIsMissingAreLoggedOnce(t *testing.T) {
	t.Parallel()
	var said []string
	s := &Server{cfg: Config{Log: func(text string) { said = append(said, text) }}}
	var before *state
	for _, cannot := range []string{"no server", "no server", "", "", "wrong password", ""} {
		now := &state{cannot: cannot}
		if cannot == "" {
			now.shot = monitor.Snapshot{At: time.Now(), Missing: []string{"leases", "runs"}}
		} else if before != nil {
			now.shot = before.shot
		}
		s.report(before, now)
		before = now
	}
	if want := []string{"no server", "not shown: leases", "not shown: runs", "the database can be read again", "wrong password", "the database can be read again"}; !slices.Equal(said, want) {
		t.Errorf("%q, want %q", said, want)
	}
}

// leases is a snapshot of held leases.
func leases(n int) (shot monitor.Snapshot) {
	for i := range n {
		shot.Holders = append(shot.Holders, pgxlock.Holder{Key: fmt.Sprint("order:", i), Kind: pgxlock.KindLease, ID: "Grün:4711", State: pgxlock.StateLive})
	}
	return shot
}

func TestSearchSaysWhatItDidNotLookAt(t *testing.T) {
	t.Parallel()
	s := &Server{}
	const rows = mostLooks + 10
	shot := leases(rows)
	planted := plant(shot)
	now := &state{shot: shot, graph: func() *forest { return planted }}
	for _, test := range []struct {
		search    string
		all, left int
	}{
		{"", rows, 0},
		{"kind=lease", rows, 0},
		{"kind=advisory", 0, 0},
		{"kind=advisory&q=order", 0, 0},
		{"q=ORDER", mostLooks, 10},
		{"q=gr%C3%9CN", mostLooks, 10},
		{"q=nowhere", 0, 10},
		{"q=order+order", mostLooks, 10},
		{"q=o+r+d+e+g+4+7+1+l+i+v", mostLooks/11 + 1, rows - mostLooks/11 - 1},
	} {
		p := s.view(now, parseQuery(httptest.NewRequest("GET", "/?"+test.search, nil)))
		if p.Holders.All != test.all || p.Holders.left != test.left {
			t.Errorf("%q: %d rows match, want %d; in %d others nothing was looked for, want %d", test.search, p.Holders.All, test.all, p.Holders.left, test.left)
		}
		var html strings.Builder
		if err := pages.ExecuteTemplate(&html, "page.html", p); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(html.String(), "searched in part: ") != (test.left > 0) {
			t.Errorf("%q: %d rows were not looked at, and the page says something else", test.search, test.left)
		}
		if test.left > 0 && strings.Contains(html.String(), "Nothing matches") {
			t.Errorf("%q: nothing matches, says a search that is not complete", test.search)
		}
	}
}
