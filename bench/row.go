package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// A ratio is what an operation costs one of pgxlock's ways, over what it costs a
// peer.
type ratio struct {
	system, peer string
}

func (r ratio) String() string { return r.system + "/" + r.peer }

// A row is one contest and the ratios that it is held for.
type row struct {
	title   string // of the figure or the table
	about   string
	workers int
	ratios  []ratio

	// prepare makes the named ways ready on an empty stage, in the order in which
	// they are shown. It leaves out those that cannot be had here.
	prepare func(ctx context.Context, s *stage, names []string) ([]way, error)

	daemons map[string]*daemon // what ways need, by their names

	gauge *gauge // read around one more slice of each way, if not nil
}

func (r row) String() string { return fmt.Sprintf("%s, %d workers", r.title, r.workers) }

// name is what a ratio is called in this row, and chosen by.
func (r row) name(of ratio) string { return fmt.Sprintf("%s %d", of, r.workers) }

// rowsMatching returns the rows that have a ratio with such a name, without their
// other ratios.
func rowsMatching(wanted *regexp.Regexp) []row {
	var all []row
	for _, f := range figures {
		all = append(all, f.rows()...)
	}
	for _, t := range tables {
		all = append(all, t.rows()...)
	}
	var rows []row
	for _, r := range all {
		r.ratios = slices.DeleteFunc(r.ratios, func(of ratio) bool { return !wanted.MatchString(r.name(of)) })
		if len(r.ratios) > 0 {
			rows = append(rows, r)
		}
	}
	return rows
}

// names returns the ways that the ratios are made of.
func (r row) names() []string {
	var names []string
	for _, of := range r.ratios {
		names = append(names, of.system, of.peer)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// measure holds the contest. What it returns is empty where there is nothing to
// compare.
func (r row) measure(ctx context.Context, server *pgserver.Server, span time.Duration) (m measured, err error) {
	s := newStage(server, r.workers)
	defer func() { err = errors.Join(err, s.clear()) }()
	m.row = r
	c := contest{stage: s, span: span / (2 * rounds)}
	if c.ways, err = r.prepare(ctx, s, r.names()); err != nil {
		return m, err
	}
	ratios := slices.DeleteFunc(slices.Clone(r.ratios), func(of ratio) bool { return !c.has(of.system) || !c.has(of.peer) })
	if len(ratios) == 0 {
		return m, nil
	}
	o, err := c.hold(ctx)
	if err != nil {
		return m, err
	}
	for _, w := range c.ways {
		cost := quantile(of(o, w.name, slice.cost), 0.5)
		m.ways = append(m.ways, wayCost{
			name: w.name, perSecond: float64(r.workers) / cost.Seconds(), each: cost, percentiles: w.took.percentiles(),
			used: o.usedEach(w.name), allocs: quantile(of(o, w.name, slice.allocsEach), 0.5),
		})
	}
	for _, of := range ratios {
		values := o.ratios(of.system, of.peer)
		m.found = append(m.found, foundRatio{of, len(values), quantile(values, 0.25), quantile(values, 0.5), quantile(values, 0.75)})
	}
	if r.gauge != nil {
		m.gauged, err = r.gauge.measure(ctx, c)
	}
	return m, err
}

// print prints the outcome of a row.
func (m measured) print() {
	if len(m.ways) == 0 {
		return
	}
	fmt.Printf("%s:\n", workers(m.workers))
	for _, c := range m.ways {
		fmt.Printf("  %-16s %8.0f/s %8s each (p50 %s, p99 %s, p99.9 %s), CPU of client and server %s and %s, %.0f allocations\n", c.name, c.perSecond, brief(c.each),
			brief(c.p50), brief(c.p99), brief(c.p999), micros(c.used.client), serverMicros(c.used.server), c.allocs)
	}
	for _, g := range m.gauged {
		fmt.Printf("  %s for each operation of %s: %.2f\n", m.gauge.name, g.way, g.each)
	}
	for _, f := range m.found {
		fmt.Printf("  %s: %d rounds, quartiles %.2f to %.2f\n", f.ratio, f.rounds, f.low, f.top)
		fmt.Printf("RATIO %s %.2f\n", m.name(f.ratio), f.median)
	}
}

// micros prints processor time in microseconds, with two digits at least.
func micros(d time.Duration) string {
	us := float64(d) / float64(time.Microsecond)
	if us < 10 {
		return fmt.Sprintf("%.1f µs", us)
	}
	return fmt.Sprintf("%.0f µs", us)
}

// serverMicros prints what a server used, where that can be known.
func serverMicros(d time.Duration) string {
	if !canCountServers {
		return "?"
	}
	return micros(d)
}
