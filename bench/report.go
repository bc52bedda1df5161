package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// A report is what a run found, as a page and a chart for docs/. They are written
// when everything was measured, so that all of it is of one run on one machine.
type report struct {
	machine []string // what it was measured on
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
	allocs    float64
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
}

// measureAll measures one after the other. The first error ends it: a run that has
// one shows no ratio of that row, and no report.
func measureAll(ctx context.Context, server *pgserver.Server, rows []row, counts []survey, span time.Duration) (r report, err error) {
	title := ""
	for _, row := range rows {
		if row.title != title {
			title = row.title
			fmt.Printf("\n%s: %s\n", title, row.about)
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
		found, err := v.measure(ctx, server)
		if err != nil {
			return r, fmt.Errorf("%s: %w", v.name, err)
		}
		found.print()
		r.surveys = append(r.surveys, found)
	}
	return r, nil
}

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

// write replaces figures.md and figures.svg in the folder.
func (r report) write(folder string) error {
	err := os.WriteFile(filepath.Join(folder, "figures.md"), []byte(r.page()), 0o644)
	return errors.Join(err, os.WriteFile(filepath.Join(folder, "figures.svg"), []byte(chart(r.ofTables(true))), 0o644))
}

// ofTables returns the rows that are of tables, or those that are not.
func (r report) ofTables(wanted bool) []measured {
	return slices.DeleteFunc(slices.Clone(r.rows), func(m measured) bool {
		return slices.ContainsFunc(tables, func(t table) bool { return t.name == m.title }) != wanted
	})
}

// page is the page.
func (r report) page() string {
	var text strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&text, format, args...) }
	say("# What pgxlock costs\n\nWritten by `make bench`; [bench/README.md](../bench/README.md) says what each row is, and how to measure it on your\n")
	say("machine. Absolute figures are those of this machine on that day; the ratios are of ways that took turns.\n\n")
	for _, line := range r.machine {
		say("- %s\n", line)
	}
	say("\n## Beside other locks\n\nPairs of acquire and release a second, a new key each time. Only leases and etcd are durable.\n\n![%s](figures.svg)\n", "pairs a second, by the number of workers")
	for _, m := range r.ofTables(true) {
		say("\n%s\n\n| way | pairs/s | each | allocations |\n|---|--:|--:|--:|\n", workers(m.workers))
		for _, c := range m.ways {
			say("| %s | %s | %s | %.0f |\n", c.name, rate(c.perSecond), brief(c.each), c.allocs)
		}
	}
	say("\n## Ratios\n\nThe cost of pgxlock's way divided by that of the peer: below 1 pgxlock is the cheaper one.\n\n")
	say("| row | workers | ratio | quartiles | goal |\n|---|--:|--:|---|--:|\n")
	for _, m := range slices.Concat(r.ofTables(false), r.ofTables(true)) {
		for _, f := range m.found {
			goal := ""
			if f.goal > 0 {
				goal = fmt.Sprintf("%.2f", f.goal)
			}
			say("| `%s` | %d | %.2f | %.2f to %.2f | %s |\n", f.ratio, m.workers, f.median, f.low, f.top, goal)
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
