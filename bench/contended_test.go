package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// aHotKey is what settings might show: each way passes the key on 100 times a second.
func aHotKey(of []setting) (all []hotSetting) {
	for _, s := range of {
		h := hotSetting{setting: s}
		for _, name := range rivalries {
			h.ways = append(h.ways, hotWay{
				name: name, rates: []float64{100, 100, 100}, p50: 12 * time.Millisecond, p99: 123 * time.Millisecond, most: time.Second,
				served: []int{1000, 1000},
			})
		}
		all = append(all, h)
	}
	return all
}

func someHanded() (all []handed) {
	for _, name := range rivalries {
		all = append(all, handed{name, []time.Duration{time.Millisecond, 2 * time.Millisecond, 30 * time.Millisecond}})
	}
	return all
}

func someFleets() (all []fleetSize) {
	for _, n := range fleetSizes {
		f := fleetSize{processes: n}
		for _, name := range []string{"advisory", "bare", "lease"} {
			f.ways = append(f.ways, fleetWay{name, []float64{1000, 3000, 2000}, usage{20 * time.Microsecond, 10 * time.Microsecond}, 1})
		}
		all = append(all, f)
	}
	return all
}

// valueOf returns the value of a finding.
func valueOf(t *testing.T, found []finding, what string) float64 {
	t.Helper()
	i := slices.IndexFunc(found, func(f finding) bool { return f.what == what })
	if i < 0 {
		t.Fatalf("there is no %q: %v", what, found)
	}
	return found[i].value
}

func TestLeastOverMostIsOfTheProcessesThatWereServedLeastAndMost(t *testing.T) {
	for _, test := range []struct {
		served []int
		want   float64
	}{
		{[]int{7}, 1}, {[]int{5, 5}, 1}, {[]int{8, 2, 4}, 0.25}, {[]int{3, 0}, 0}, {[]int{0, 0}, 0},
	} {
		if got := leastOverMost(test.served); got != test.want {
			t.Errorf("%v: %v, not %v", test.served, got, test.want)
		}
	}
}

func TestRatioIsTheMedianOfTheRounds(t *testing.T) {
	if got := ratioOf([]float64{10, 90, 40}, []float64{20, 30, 80}); got != 0.5 { // 0.5, 3 and 0.5
		t.Errorf("%v", got)
	}
}

func TestHotFindingsAreOfTheShownSettingAndTheLeastEvenOne(t *testing.T) {
	all := aHotKey(settings())
	set := func(s setting, name string, change func(w *hotWay)) {
		for i, h := range all {
			for j, w := range h.ways {
				if h.setting == s && w.name == name {
					change(&all[i].ways[j])
				}
			}
		}
	}
	other := settings()[0]
	set(shown, "row", func(w *hotWay) { w.rates = []float64{200, 200, 50} })
	set(other, "row", func(w *hotWay) { w.rates = []float64{1} })
	set(other, "lease", func(w *hotWay) { w.served = []int{30, 40} })
	set(shown, "lease", func(w *hotWay) { w.served = []int{9, 1} }) // too few to be uneven
	found := hotFindings(all)
	for what, want := range map[string]float64{
		"4x4, grants of lease/row": 0.5, "4x4, grants of advisory/raw": 1, evenness("lease"): 0.75, evenness("advisory"): 1,
	} {
		if got := valueOf(t, found, what); got != want {
			t.Errorf("%s: %v, not %v", what, got, want)
		}
	}
}

func TestHandOverComparesMedians(t *testing.T) {
	all := someHanded()
	all[slices.Index(rivalries, "lease")].gaps = []time.Duration{3 * time.Millisecond, time.Second, time.Millisecond}
	if got := valueOf(t, handedFindings(all), "lease/row"); got != 1.5 {
		t.Errorf("3 ms over 2 ms is %v", got)
	}
	if cells := handedGrid(all).lines[0]; !slices.Equal(cells, []string{rivalries[0], "2.00", "30"}) {
		t.Errorf("%v", cells)
	}
}

func TestFleetIsComparedWithBareAndWithOneProcess(t *testing.T) {
	all := someFleets()
	last := &all[len(all)-1]
	last.ways[0].rates = []float64{3000, 9000, 6000}
	last.ways[0].used.client = 50 * time.Microsecond
	last.ways[0].connected = 0.5
	found := fleetFindings(all)
	for what, want := range map[string]float64{
		fleetOverBare(64): 3, fleetOverOne(64): 2.5, fleetConnected(64): 0.5, fleetOverBare(16): 1, fleetOverOne(1): 1,
	} {
		if got := valueOf(t, found, what); got != want {
			t.Errorf("%s: %v, not %v", what, got, want)
		}
	}
}

func TestFleetCountsAllProcessesAndTheSlowestOnesTime(t *testing.T) {
	r := response{server: 600 * time.Microsecond, tallies: []tally{
		{Done: 20, CPU: 900 * time.Microsecond, Elapsed: time.Second}, {Done: 10, CPU: 300 * time.Microsecond, Elapsed: 2 * time.Second},
	}}
	w := fleetWayOf("a way", []response{r, r})
	if w.perSecond() != 15 || w.used != (usage{40 * time.Microsecond, 20 * time.Microsecond}) {
		t.Errorf("%+v", w)
	}
}

// A lock that callers of one process hand on, as an acquirer.
func passing() acquirer {
	lock := make(chan struct{}, 1)
	return func(ctx context.Context, _ int, _ string) (releaser, error) {
		select {
		case lock <- struct{}{}:
			return func(context.Context) error { <-lock; return nil }, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Four callers keep a key for 10 ms each: every wait but the first ones is of 30 ms, and
// those that end after the span count as waits and not as grants.
func TestWaitsAreWholeAndGrantsAreThoseOfTheSpan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := member{acquire: passing()}
		o := order{Do: doContend, Callers: 4, Span: time.Second - time.Millisecond, Hold: 10 * time.Millisecond}
		one, err := m.do(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		two, err := m.do(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		w, err := hotWayOf("a way", []response{{tallies: []tally{one, two}}}, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if w.perSecond() != 200 || !slices.Equal(w.served, []int{100, 100}) {
			t.Errorf("%v grants a second, %v", w.perSecond(), w.served)
		}
		for name, d := range map[string]time.Duration{"p50": w.p50, "p99": w.p99, "max": w.most} {
			if off := math.Abs(d.Seconds() - 0.03); off > 0.0001 {
				t.Errorf("%s is %s", name, d)
			}
		}
		waits := newLatencies(0)
		r := response{tallies: []tally{one, two}}
		if err := r.addWaits(waits.all); err != nil {
			t.Fatal(err)
		}
		if n := waits.all.TotalCount(); n <= 200 {
			t.Errorf("%d waits, none of which ended after the span", n)
		}
	})
}

func TestAcquireThatFailsEndsContention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var turns atomic.Int32
		good, begun := passing(), time.Now()
		m := member{acquire: func(ctx context.Context, caller int, key string) (releaser, error) {
			if turns.Add(1) == 6 {
				return nil, broken
			}
			return good(ctx, caller, key)
		}}
		_, err := m.do(t.Context(), order{Do: doContend, Callers: 3, Span: time.Hour, Hold: time.Second})
		if took := time.Since(begun); !errors.Is(err, broken) || took > time.Minute {
			t.Errorf("after %s the error is %v", took, err)
		}
	})
}

// answering is a child process that gives such answers.
func answering(at ...time.Duration) childProcess {
	out, in := io.Pipe()
	go func() {
		for _, d := range at {
			_ = json.NewEncoder(in).Encode(tally{At: d})
		}
	}()
	return childProcess{orders: json.NewEncoder(io.Discard), answers: json.NewDecoder(out)}
}

func TestGrantBeforeTheReleaseIsAnError(t *testing.T) {
	for granted, wanted := range map[time.Duration]string{
		1500 * time.Millisecond: "", 999 * time.Millisecond: "1ms before another released it",
	} {
		from, to := answering(0, time.Second), answering(granted, 0)
		gap, err := from.handTo(t.Context(), to, 0)
		if said := fmt.Sprint(err); wanted == "" && (err != nil || gap != 500*time.Millisecond) || !strings.Contains(said, wanted) {
			t.Errorf("granted after %s: %s, %v", granted, gap, err)
		}
	}
}

func TestSpansHaveTurnsForAllCallers(t *testing.T) {
	for _, test := range []struct{ s, want string }{{"2x1", "500ms"}, {"4x16", "500ms"}, {"16x1", "1.92s"}, {"16x16", "1.92s"}} {
		for _, s := range settings() {
			if got := s.span(500 * time.Millisecond); s.String() == test.s && got.String() != test.want {
				t.Errorf("%s: %s", s, got)
			}
		}
	}
}

// Each way excludes other processes: a hand-over before the release is an error.
func TestEachWayContendsAndHandsOver(t *testing.T) {
	if _, err := findDaemons(t.Context(), nil, surveys); err != nil {
		t.Fatal(err)
	}
	err := withServer(t.Context(), pgserver.Config{}, 0, func(server *pgserver.Server) (err error) {
		s := newStage(server, 4)
		defer func() { err = errors.Join(err, s.clear()) }()
		ways := available(rivalries)
		idle := func(w hotWay) bool { return w.perSecond() <= 0 }
		var all []hotSetting
		for again, tries := true, 0; again && tries < 5; tries++ { // where a machine stands still for a slice, nothing is granted in it
			if all, err = contend(t.Context(), s, ways, []setting{{2, 2, time.Millisecond, 2}, {1, 1, 0, 1}}, 50*time.Millisecond); err != nil {
				return err
			}
			again = slices.ContainsFunc(all, func(h hotSetting) bool { return slices.ContainsFunc(h.ways, idle) })
		}
		for _, h := range all {
			for i, w := range h.ways {
				if w.name != ways[i] || len(w.rates) != h.rounds || len(w.served) != h.processes || idle(w) || w.most < w.p50 {
					t.Errorf("%s: %+v", h, w)
				}
			}
			if len(h.ways) != len(ways) {
				t.Errorf("%s: %d ways", h, len(h.ways))
			}
		}
		handed, err := handOver(t.Context(), s, ways, 4)
		for i, h := range handed {
			if h.name != ways[i] || len(h.gaps) != 4 || slices.Min(h.gaps) <= 0 {
				t.Errorf("%+v", h)
			}
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestFleetMeasuresClientsAndServer(t *testing.T) {
	err := withServer(t.Context(), pgserver.Config{}, 0, func(server *pgserver.Server) (err error) {
		s := newStage(server, 4)
		defer func() { err = errors.Join(err, s.clear()) }()
		f, err := fleet(t.Context(), s, []string{"advisory", "bare", "lease"}, 2, 2, 50*time.Millisecond)
		for _, w := range f.ways {
			if len(w.rates) != 2 || w.perSecond() <= 0 || w.connected != 1 || w.used.client <= 0 || canCountServers && w.used.server <= 0 {
				t.Errorf("%+v", w)
			}
		}
		if len(f.ways) != 3 {
			t.Errorf("%d ways", len(f.ways))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
