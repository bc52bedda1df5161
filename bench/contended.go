package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"
)

// rivalries are the ways that wait for one key, in the order in which they are shown.
var rivalries = []string{"advisory", "raw", "lease", "lease-async", "row", "locktx", "redislock", "redsync", "etcd"}

// hotRatios are the ways that are compared: each with what PostgreSQL has for the job.
var hotRatios = []ratio{{"advisory", "raw"}, {"locktx", "raw"}, {"lease", "row"}, {"lease-async", "row"}}

// ours are the ways of pgxlock's.
func ours() []string {
	var names []string
	for _, of := range hotRatios {
		names = append(names, of.system)
	}
	return names
}

// A setting is how many processes of how many callers want one key, and how long each
// keeps it.
type setting struct {
	processes, callers int
	hold               time.Duration
	rounds             int
}

// String is such as 4x16.
func (s setting) String() string { return fmt.Sprintf("%dx%d", s.processes, s.callers) }

// shown is the setting that is compared and shown first.
var shown = setting{processes: 4, callers: 4, rounds: 3}

var holds = []time.Duration{0, time.Millisecond}

// settings are all of them.
func settings() []setting {
	var all []setting
	for _, hold := range holds {
		for _, of := range [][2]int{{2, 1}, {2, 16}, {4, 1}, {4, 4}, {4, 16}, {16, 1}, {16, 16}} {
			s := setting{of[0], of[1], hold, 1}
			if s.String() == shown.String() && hold == shown.hold {
				s = shown
			}
			all = append(all, s)
		}
	}
	return all
}

// span is how long a slice is: so long that each caller has several turns, and each process so many
// that a few more or less do not make them uneven.
func (s setting) span(least time.Duration) time.Duration {
	const turnsOfCaller, turnsOfProcess, each = 2, 40, 3 * time.Millisecond
	return max(least, time.Duration(s.processes*max(turnsOfCaller*s.callers, turnsOfProcess))*each)
}

// warmSpan is how long callers contend before that is measured.
const warmSpan = 100 * time.Millisecond

// mostConnected is how many processes there may be at a time: the server has 400
// connections, and a process has 16 where each caller needs one.
const mostConnected = 28

// A hotSetting is what a setting showed.
type hotSetting struct {
	setting
	ways []hotWay
}

// A hotWay is how a way passed one key on.
type hotWay struct {
	name           string
	rates          []float64 // grants a second, of each round
	p50, p99, most time.Duration
	served         []int // how often each process was granted the key
}

func (w hotWay) perSecond() float64 { return quantile(w.rates, 0.5) }

// of returns the way with a name; ok is false if it was left out.
func (h hotSetting) of(name string) (w hotWay, ok bool) {
	i := slices.IndexFunc(h.ways, func(w hotWay) bool { return w.name == name })
	if i < 0 {
		return w, false
	}
	return h.ways[i], true
}

// contend measures each setting of each way. Ways take turns, as many at a time as the
// server has connections for.
func contend(ctx context.Context, s *stage, ways []string, of []setting, least time.Duration) ([]hotSetting, error) {
	found := make([]hotSetting, len(of))
	byProcesses := make(map[int][]int) // indexes of settings
	for i, setting := range of {
		found[i].setting = setting
		byProcesses[setting.processes] = append(byProcesses[setting.processes], i)
	}
	for _, processes := range slices.Sorted(maps.Keys(byProcesses)) {
		for some := range slices.Chunk(ways, max(1, mostConnected/processes)) {
			if err := contendWith(ctx, s, some, found, byProcesses[processes], least); err != nil {
				return nil, err
			}
		}
	}
	return found, nil
}

// contendWith measures those settings with one start of processes.
func contendWith(ctx context.Context, s *stage, ways []string, found []hotSetting, of []int, least time.Duration) (err error) {
	callers := 0
	for _, i := range of {
		callers = max(callers, found[i].callers)
	}
	crews, err := startCrews(ctx, s, ways, found[of[0]].processes, callers)
	if err != nil {
		return err
	}
	defer func() {
		for _, c := range crews {
			err = errors.Join(err, c.end())
		}
	}()
	if _, err := takeTurns(crews, 1, order{Do: doContend, Callers: callers, Span: warmSpan}); err != nil {
		return err
	}
	for _, i := range of {
		h := &found[i]
		span := h.span(least)
		responses, err := takeTurns(crews, h.rounds, order{Do: doContend, Callers: h.callers, Span: span, Hold: h.hold})
		if err != nil {
			return err
		}
		for _, way := range ways {
			w, err := hotWayOf(way, responses[way], span)
			if err != nil {
				return err
			}
			h.ways = append(h.ways, w)
		}
	}
	return nil
}

func hotWayOf(name string, rounds []response, span time.Duration) (hotWay, error) {
	w := hotWay{name: name, served: make([]int, len(rounds[0].tallies))}
	waits := newLatencies(0)
	for _, r := range rounds {
		w.rates = append(w.rates, float64(r.done())/span.Seconds())
		for i, n := range r.served() {
			w.served[i] += n
		}
		if err := r.addWaits(waits.all); err != nil {
			return w, err
		}
	}
	p := waits.percentiles()
	w.p50, w.p99, w.most = p.p50, p.p99, time.Duration(waits.all.Max())
	return w, nil
}

// enough reports whether the processes were served so often that one turn more or less
// does not make them uneven.
func (w hotWay) enough() bool {
	const turns = 10
	return slices.Max(w.served) >= turns
}

// leastOverMost is 1 if all processes were served equally often.
func leastOverMost(served []int) float64 {
	if most := slices.Max(served); most > 0 {
		return float64(slices.Min(served)) / float64(most)
	}
	return 0
}

// ratioOf returns the median of the rounds' ratios.
func ratioOf(over, under []float64) float64 {
	ratios := make([]float64, len(over))
	for i := range over {
		ratios[i] = over[i] / under[i]
	}
	return quantile(ratios, 0.5)
}

// evenness is the name of a finding.
func evenness(way string) string { return "least over most served, " + way }

// hotFindings compares the ways of the setting that is shown, and has the least even
// setting of each of pgxlock's ways.
func hotFindings(all []hotSetting) (found []finding) {
	for _, h := range all {
		if h.setting != shown {
			continue
		}
		for _, of := range hotRatios {
			system, ok := h.of(of.system)
			peer, okPeer := h.of(of.peer)
			if ok && okPeer {
				found = append(found, finding{h.String() + ", grants of " + of.String(), ratioOf(system.rates, peer.rates), ""})
			}
		}
	}
	for _, name := range ours() {
		var shares []float64
		for _, h := range all {
			if w, ok := h.of(name); ok && w.enough() {
				shares = append(shares, leastOverMost(w.served))
			}
		}
		if len(shares) > 0 {
			found = append(found, finding{evenness(name), slices.Min(shares), ""})
		}
	}
	return found
}

func takeContended(ctx context.Context, s *stage, span time.Duration) ([]finding, []grid, error) {
	all, err := contend(ctx, s, available(rivalries), settings(), span/6)
	if err != nil {
		return nil, nil, err
	}
	return hotFindings(all), hotGrids(all), nil
}

// hotGrids shows one setting on the first page, and all of them on the other.
func hotGrids(all []hotSetting) []grid {
	first := grid{
		title: "One key that all callers want",
		means: fmt.Sprintf("%d processes of %d callers want one key and keep it for no time: how many grants a second one hot key carries. "+
			"Waits are in ms, from the call to the grant; *least/most* is how often the least served process had the key, over the most served one. "+
			"*raw* is `pg_advisory_lock` and *row* a durable `UPDATE`, both with a connection for each caller. [All settings](figures-ratios.md#one-key-that-all-callers-want).",
			shown.processes, shown.callers),
		head: []string{"way", "grants/s", "p50", "p99", "max", "least/most"},
	}
	grids := []grid{first}
	for _, hold := range holds {
		g := grid{
			title: "One key that all callers want",
			means: "Processes x callers. Grants/s; p50/p99/max of the wait in ms; least over most served.",
			head:  []string{"kept for " + hold.String()},
		}
		for _, h := range all {
			if h.setting == shown {
				grids[0].lines = linesOf(h, hotWay.cells)
			}
			if h.hold != hold {
				continue
			}
			g.head = append(g.head, h.String())
			for i, w := range h.ways {
				if len(g.lines) == i {
					g.lines = append(g.lines, []string{w.name})
				}
				g.lines[i] = append(g.lines[i], w.cell())
			}
		}
		grids = append(grids, g)
	}
	grids[2].title, grids[2].means = "", ""
	return grids
}

func linesOf(h hotSetting, cells func(hotWay) []string) (lines [][]string) {
	for _, w := range h.ways {
		lines = append(lines, cells(w))
	}
	return lines
}

func (w hotWay) cells() []string {
	return []string{w.name, rate(w.perSecond()), inMillis(w.p50), inMillis(w.p99), inMillis(w.most), share(leastOverMost(w.served))}
}

// cell has the same in one.
func (w hotWay) cell() string {
	return fmt.Sprintf("%s; %s/%s/%s; %s", rate(w.perSecond()), inMillis(w.p50), inMillis(w.p99), inMillis(w.most), share(leastOverMost(w.served)))
}

// inMillis prints a number of milliseconds with two digits at least.
func inMillis(d time.Duration) string {
	return strconv.FormatFloat(d.Seconds()*1000, 'f', map[bool]int{true: 2, false: 0}[d < 10*time.Millisecond], 64)
}

func share(of float64) string { return strconv.FormatFloat(of, 'f', 2, 64) }

// A handed is how long a way took to hand a key over to another process.
type handed struct {
	name string
	gaps []time.Duration
}

// waitLong is how long the holder keeps a key, at least, so that the other process
// waits for it in its steady state. Ways that poll would always be caught at the same
// moment, so the time differs from turn to turn.
const waitLong = 10 * time.Millisecond

// warmTurns are not counted.
const warmTurns = 10

// handOver has two processes of each way take turns with one key.
func handOver(ctx context.Context, s *stage, ways []string, turns int) ([]handed, error) {
	crews, err := startCrews(ctx, s, ways, 2, 1)
	if err != nil {
		return nil, err
	}
	all := make([]handed, len(ways))
	for turn := range warmTurns + turns {
		for i, c := range crews {
			from, to := c.children[turn%2], c.children[1-turn%2]
			gap, err := from.handTo(ctx, to, waitLong+time.Duration(turn*7%10)*time.Millisecond)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", c.way, err)
			}
			all[i].name = c.way
			if turn >= warmTurns {
				all[i].gaps = append(all[i].gaps, gap)
			}
		}
	}
	return all, nil
}

// handTo acquires a key for which the other process waits then, and releases it. It
// returns the time from the begin of the release to the grant.
func (c childProcess) handTo(ctx context.Context, to childProcess, wait time.Duration) (time.Duration, error) {
	if _, err := c.ask(order{Do: doAcquire}); err != nil {
		return 0, err
	}
	if err := to.orders.Encode(order{Do: doAcquire}); err != nil {
		return 0, err
	}
	if err := pause(ctx, wait); err != nil {
		return 0, err
	}
	released, err := c.ask(order{Do: doRelease})
	if err != nil {
		return 0, err
	}
	granted, err := to.answer()
	if err != nil {
		return 0, err
	}
	if granted.At < released.At {
		return 0, fmt.Errorf("a process was granted the lock %s before another released it", released.At-granted.At)
	}
	_, err = to.ask(order{Do: doRelease})
	return granted.At - released.At, err
}

func takeHandOver(ctx context.Context, s *stage, span time.Duration) ([]finding, []grid, error) {
	all, err := handOver(ctx, s, available(rivalries), max(2, int(span/(30*time.Millisecond))))
	if err != nil {
		return nil, nil, err
	}
	return handedFindings(all), []grid{handedGrid(all)}, nil
}

// handedFindings compares the medians.
func handedFindings(all []handed) (found []finding) {
	medians := make(map[string]float64)
	for _, h := range all {
		medians[h.name] = float64(quantile(h.gaps, 0.5))
	}
	for _, of := range hotRatios {
		if medians[of.system] > 0 && medians[of.peer] > 0 {
			found = append(found, finding{of.String(), medians[of.system] / medians[of.peer], ""})
		}
	}
	return found
}

func handedGrid(all []handed) grid {
	g := grid{
		title: "From a release to a grant elsewhere",
		means: "One process releases a key for which another one waits: the time from the begin of the release to the grant, in ms, which is what each holder loses in a queue.",
		head:  []string{"way", "p50", "p99"},
	}
	for _, h := range all {
		g.lines = append(g.lines, []string{h.name, inMillis(quantile(h.gaps, 0.5)), inMillis(quantile(h.gaps, 0.99))})
	}
	return g
}
