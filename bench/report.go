package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
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
	say("\nA bar is how many pairs all workers together do in a second, on a scale where each line is ten times the one before:\n")
	say("longer is better. The blue bars are pgxlock's. One worker shows what a round trip costs, and for durable locks a commit;\n")
	say("many workers show what is left when requests share both. etcd is the peer of a lease, because both write to the disk.\n")
	say("Redis keeps nothing on disk here, and forgets its locks when it restarts. The floor is `SELECT 1` twice.\n")
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
			if g := m.goalOf(f.ratio); g > 0 {
				goal = fmt.Sprintf("%.2f", g)
			}
			say("| `%s` | %d | %.2f | %.2f to %.2f | %s |\n", f.ratio, m.workers, f.median, f.low, f.top, goal)
		}
	}
	if missed := r.missed(); missed != "" {
		say("\n### Goals that are missed\n\nA goal is the greatest ratio that pgxlock aims for. This run misses some:\n\n%s", missed)
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

// inWords finds a goal that a row's description has, and that depends on nothing.
var inWords = regexp.MustCompile(`goal: <= ([0-9.]+)$`)

// goalOf returns the goal of a ratio of the row, or 0.
func (m measured) goalOf(of ratio) float64 {
	if found := inWords.FindStringSubmatch(m.about); of.goal == 0 && found != nil {
		of.goal, _ = strconv.ParseFloat(found[1], 64)
	}
	return of.goal
}

// reasons say why a goal may be missed, by the name of the ratio.
var reasons = map[string]string{
	"locktx/floor":     "its statement also asks whether the server is a standby and whether the snapshot stays; over a local socket each function that a statement names costs some 5 % of the round trip.",
	"advisory/floor":   "measured alone, bare `pg_try_advisory_lock` and `pg_advisory_unlock` cost what the floor does. The rest is the Locker's own work: the table of its locks, their deadlines, and the connection that its callers share. A busy machine adds to that, as the quartiles show.",
	"advisory/rueidis": "both ways send the requests of all workers in batches, so the processors limit both, and the servers and this program share them. The goal is a multiple of Redis's throughput.",
	"lease/redislock":  "a lease is committed to the disk before its caller has it, and Redis keeps nothing on disk here. The commit of a batch takes as long as a Redis client needs for several pairs.",
	"lease/rueidis":    "a pair with its guards, fencing tokens and check for waiters takes the server longer than Redis and its client need for a whole pair in memory. [Design](design.md) has what each part takes.",
}

// missed lists the goals that the run misses, and why.
func (r report) missed() string {
	var text strings.Builder
	for _, m := range slices.Concat(r.ofTables(false), r.ofTables(true)) {
		for _, f := range m.found {
			if goal := m.goalOf(f.ratio); goal > 0 && f.median > goal {
				fmt.Fprintf(&text, "- `%s` with %s, %.2f instead of %.2f: %s\n", f.ratio, workers(m.workers), f.median, goal, reasons[f.String()])
			}
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
