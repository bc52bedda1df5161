package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// A report is what a run found, as two pages and a chart for docs/. They are written
// when everything was measured, so that all of it is of one run on one machine.
type report struct {
	machine []string // what it was measured on
	calm    calm
	runs    int // of which this is the quietest
	rows    []measured
	surveys []surveyed
}

// measured is the outcome of a row.
type measured struct {
	row
	ways   []wayCost
	found  []foundRatio
	gauged []wayGauge // what the row's gauge showed, if it has one
}

// wayCost is what an operation costs, as one worker sees it.
type wayCost struct {
	name      string
	perSecond float64 // of all workers
	each      time.Duration
	percentiles
	used   usage // of the processors, for an operation
	allocs float64
}

// foundRatio has the median of the rounds' ratios, and the quartiles.
type foundRatio struct {
	ratio
	rounds           int
	low, median, top float64
}

type wayGauge struct {
	way  string
	each float64
}

// surveyed is the outcome of a survey.
type surveyed struct {
	survey
	findings []finding
	grids    []grid // the first is for the page of figures, the others for that of ratios
}

// measureAll measures one after the other. The first error ends it: a run that has
// one shows no ratio of that row, and no report.
func measureAll(ctx context.Context, server *pgserver.Server, rows []row, counts []survey, span time.Duration) (r report, err error) {
	watch, err := newWatch(ctx, server)
	if err != nil {
		return r, err
	}
	defer watch.end(&r.calm, &err)
	title := ""
	for _, row := range rows {
		if row.title != title {
			title = row.title
			fmt.Printf("\n%s: %s\n", title, row.about)
		}
		if err := watch.look(ctx); err != nil {
			return r, err
		}
		m, err := row.measure(ctx, server, span)
		if err != nil {
			return r, fmt.Errorf("%s: %w", row, err)
		}
		m.print()
		r.rows = append(r.rows, m)
	}
	for _, v := range counts {
		fmt.Printf("\n%s: %s\n", v.name, v.about)
		if err := watch.look(ctx); err != nil {
			return r, err
		}
		found, err := v.measure(ctx, server, span)
		if err != nil {
			return r, fmt.Errorf("%s: %w", v.name, err)
		}
		found.print()
		r.surveys = append(r.surveys, found)
	}
	return r, watch.look(ctx)
}

func (r report) calmness() calm { return r.calm }

// describe says what a report is made on, but not where things lie there. It needs
// all peers: a report without some would be taken for one with all.
func describe(version string, daemons []*daemon, sync time.Duration) ([]string, error) {
	lines := []string{
		fmt.Sprintf("%d CPUs, %s/%s, %s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, runtime.Version()),
		fmt.Sprintf("PostgreSQL %s, fsync and synchronous_commit on; one fdatasync of %d bytes beside its data takes %s (median)", version, syncBytes, brief(sync)),
	}
	for _, d := range daemons {
		if d.path == "" {
			return nil, fmt.Errorf("a report has all peers, and there is no %s: %w", d.called, d.missing)
		}
		lines = append(lines, fmt.Sprintf("%s %s, %s", d.called, d.version, d.keeps))
	}
	return lines, nil
}

// write replaces the pages and the chart in the folder.
func (r report) write(folder string) error {
	var errs []error
	for name, text := range map[string]string{
		"figures.md": r.page(), "figures-ratios.md": r.ratiosPage(), "figures.svg": chart(r.ofTables(true)),
	} {
		errs = append(errs, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644))
	}
	return errors.Join(errs...)
}

func (m measured) isTable() bool {
	return slices.ContainsFunc(tables, func(t table) bool { return t.name == m.title })
}

// ofTables returns the rows that are of tables, or those that are not.
func (r report) ofTables(wanted bool) []measured {
	return slices.DeleteFunc(slices.Clone(r.rows), func(m measured) bool {
		return m.isTable() != wanted
	})
}

// page has the tables and the goals.
func (r report) page() string {
	var text strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&text, format, args...) }
	say("# What pgxlock costs\n\nWritten by `make bench`. Absolute figures are those of this machine on that day; the ratios are of ways that took turns,\n")
	say("and [all of them](figures-ratios.md) are on a page of their own. [bench/README.md](../bench/README.md) says what each way\n")
	say("does, and how to measure it on your machine.\n\n")
	for _, line := range r.machine {
		say("- %s\n", line)
	}
	say("- %s\n", r.calm)
	if r.runs > 1 {
		say("- This is the quietest of %d runs.\n", r.runs)
	}
	say("\n## Beside other locks\n\nPairs of acquire and release, a new key each time. Longer bars are better, each line is ten times the one before, and\n")
	say("the blue bars are pgxlock's.\n\n![%s](figures.svg)\n\n", "pairs a second, by the number of workers")
	say("One worker shows what a round trip costs, and for durable locks a commit; many workers show what is left when requests\n")
	say("share both. Only leases, etcd and the ways with `-aof` are durable: Redis then writes each lock to the disk before it\n")
	say("answers, and otherwise forgets its locks when it restarts. The floor is `SELECT 1` twice.\n\n")
	say("*pairs/s* is of all workers together. p50, p99 and p99.9 are the times within which so many %% of all pairs ended, *client*\n")
	say("and *server* the processor time of a pair in the Go program and in all processes of the server: all in µs. *objects* is\n")
	say("how many the program allocates for a pair.\n")
	for _, m := range r.ofTables(true) {
		say("\n%s\n\n| way | pairs/s | p50 | p99 | p99.9 | client | server | objects |\n|---|--:|--:|--:|--:|--:|--:|--:|\n", workers(m.workers))
		for _, c := range m.ways {
			say("| %s | %s | %s | %s | %s | %s | %s | %.0f |\n", c.name, rate(c.perSecond),
				inMicros(c.p50), inMicros(c.p99), inMicros(c.p999), inMicros(c.used.client), c.server(), c.allocs)
		}
	}
	for _, s := range r.surveys {
		if len(s.grids) > 0 {
			text.WriteString(s.grids[0].markdown())
		}
	}
	say("\n## Goals\n\nWhat pgxlock aims for: a ratio of costs or the objects of a pair at most, and what several processes do beside others.\n")
	say("[Design](design.md#what-bounds-the-speed) says what takes the time.\n\n")
	say("| row | workers | goal | measured | |\n|---|--:|--:|--:|---|\n")
	for _, v := range r.verdicts() {
		word := "reached"
		if !v.reached() {
			word = "**missed**"
		}
		say("| `%s` | %s | %s | %s | %s |\n", v.name, v.crowd(), v.aim(), v.value(v.measured), word)
	}
	return text.String()
}

// server is the time of the server's processes, as it is printed.
func (c wayCost) server() string {
	return inServerMicros(c.used.server)
}

func inServerMicros(d time.Duration) string {
	if !canCountServers {
		return "?"
	}
	return inMicros(d)
}

// ratiosPage has all that the other page has no room for.
func (r report) ratiosPage() string {
	var text strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&text, format, args...) }
	say("# All ratios and counts\n\nOf the same run as [What pgxlock costs](figures.md), which says on what machine, and how quiet it was.\n")
	say("\n## Ratios\n\nThe cost of pgxlock's way divided by that of the peer, with the quartiles, by the number of workers: below 1 pgxlock is\nthe cheaper one.\n")
	say("%s%s", ratioTable(r.ofTables(false)), ratioTable(r.ofTables(true)))
	for _, s := range r.surveys {
		for i, g := range s.grids {
			if i > 0 {
				text.WriteString(g.markdown())
			}
		}
	}
	say("\n## Counts\n\n| what | |\n|---|--:|\n")
	for _, m := range r.rows {
		for _, g := range m.gauged {
			say("| %s, %s: %s for each operation of %s | %.2f |\n", m.title, workers(m.workers), m.gauge.name, g.way, g.each)
		}
	}
	for _, s := range r.surveys {
		for _, f := range s.findings {
			say("| %s, %s | %.4g %s |\n", s.name, f.what, f.value, f.unit)
		}
	}
	return text.String()
}

// ratioTable has a line for each ratio, and a column for each number of workers.
func ratioTable(rows []measured) string {
	var counts []int
	var names []string
	cells := make(map[string]map[int]string)
	for _, m := range rows {
		for _, f := range m.found {
			name := f.String()
			if !slices.Contains(counts, m.workers) {
				counts = append(counts, m.workers)
			}
			if cells[name] == nil {
				names, cells[name] = append(names, name), make(map[int]string)
			}
			cells[name][m.workers] = fmt.Sprintf(" %.2f (%.2f–%.2f) ", f.median, f.low, f.top)
		}
	}
	if len(names) == 0 {
		return ""
	}
	slices.Sort(counts)
	var text strings.Builder
	text.WriteString("\n| ratio |")
	for _, n := range counts {
		fmt.Fprintf(&text, " %d |", n)
	}
	text.WriteString("\n|---|" + strings.Repeat("--:|", len(counts)) + "\n")
	for _, name := range names {
		text.WriteString("| `" + name + "` |")
		for _, n := range counts {
			text.WriteString(cells[name][n] + "|")
		}
		text.WriteString("\n")
	}
	return text.String()
}

// inMicros prints a number of microseconds with three digits, and whole ones in full.
func inMicros(d time.Duration) string {
	us := float64(d) / float64(time.Microsecond)
	if us >= 1000 {
		digit := math.Pow(10, math.Floor(math.Log10(us))-2)
		return strconv.FormatFloat(math.Round(us/digit)*digit, 'f', 0, 64)
	}
	return fmt.Sprintf("%.3g", us)
}

func workers(n int) string {
	if n == 1 {
		return "1 worker"
	}
	return fmt.Sprintf("%d workers", n)
}

// rate prints how often a second with three digits.
func rate(perSecond float64) string {
	unit := ""
	for _, larger := range []string{"k", "M"} {
		if perSecond >= 999.5 {
			perSecond, unit = perSecond/1000, larger
		}
	}
	return fmt.Sprintf("%.3g%s", perSecond, unit)
}
