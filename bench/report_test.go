package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// aReport has an outcome for each row and each survey there is.
func aReport() report {
	r := report{machine: []string{"a machine"}, calm: calmOf([]time.Duration{90 * time.Microsecond}), runs: 1}
	for _, row := range rowsMatching(matchAll) {
		m := measured{row: row}
		for i, name := range row.names() {
			m.ways = append(m.ways, wayCost{
				name: name, perSecond: 1234 * float64(i+1), each: 810 * time.Microsecond,
				percentiles: percentiles{801 * time.Microsecond, 1902 * time.Microsecond, 29030 * time.Microsecond},
				used:        usage{21 * time.Microsecond, 7500 * time.Nanosecond}, allocs: 7,
			})
		}
		for _, of := range row.ratios {
			m.found = append(m.found, foundRatio{of, rounds, 0.5, 0.75, 1})
		}
		if row.gauge != nil {
			m.gauged = append(m.gauged, wayGauge{"a way", 0})
		}
		r.rows = append(r.rows, m)
	}
	for _, v := range surveys {
		found := surveyed{survey: v, findings: []finding{{"what was found", 42, "things"}}}
		switch v.name {
		case "contended":
			all := aHotKey(settings())
			found.findings, found.grids = hotFindings(all), hotGrids(all)
		case "hand-over":
			all := someHanded()
			found.findings, found.grids = handedFindings(all), []grid{handedGrid(all)}
		case "fleet":
			all := someFleets()
			found.findings, found.grids = fleetFindings(all), []grid{fleetGrid(all)}
		}
		r.surveys = append(r.surveys, found)
	}
	return r
}

func TestReportHasAllThatWasMeasured(t *testing.T) {
	r := aReport()
	folder := t.TempDir()
	if err := r.write(folder); err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	page, ratios := read("figures.md"), read("figures-ratios.md")
	for _, m := range r.rows {
		for _, f := range m.found {
			if cell := cellOf(ratios, "`"+f.String()+"`", strconv.Itoa(m.workers)); cell != "0.75 (0.50–1.00)" {
				t.Errorf("%s is %q", m.name(f.ratio), cell)
			}
		}
		for _, c := range m.ways {
			_, table, _ := strings.Cut(page, "\n"+workers(m.workers)+"\n")
			if got := cellOf(table, c.name, "client"); m.isTable() && got != "21" {
				t.Errorf("the program takes %q for %s, %s", got, c.name, workers(m.workers))
			}
		}
	}
	for _, want := range []string{"- a machine", "](figures.svg)", "1.23k | 801 | 1900 | 29000 | 21 | 7.5 | 7 |", "The machine was quiet"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q:\n%s", want, page)
		}
	}
	for _, s := range r.surveys {
		for i, g := range s.grids {
			where := page
			if i > 0 {
				where = ratios
			}
			for _, line := range g.lines {
				if !strings.Contains(where, "| "+strings.Join(line, " | ")+" |") {
					t.Errorf("%s: no page has %v", s.name, line)
				}
			}
		}
	}
	for _, want := range []string{"MultiXact members", "42 things", "(figures.md), which says on what machine, and how quiet"} {
		if !strings.Contains(ratios, want) {
			t.Errorf("the page of ratios does not have %q", want)
		}
	}
}

// cellOf returns the cell of the first table with such a line and such a column, "" if there is none.
func cellOf(text, line, column string) string {
	at := -1
	for row := range strings.SplitSeq(text, "\n") {
		cells := strings.Split(row, "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case len(cells) == 1:
			at = -1 // no table
		case at < 0:
			at = slices.Index(cells, column)
			if at < 0 {
				at = len(cells)
			}
		case cells[1] == line && at < len(cells):
			return cells[at]
		}
	}
	return ""
}

// The longest pages that there can be: internal/documents allows no longer ones.
func TestPagesAreShortWhereAllGoalsAreMissed(t *testing.T) {
	r := aReport()
	r.calm, r.runs = calmOf([]time.Duration{1, 2, 3, 4}), 5
	for i, s := range r.surveys {
		for j := range s.findings {
			r.surveys[i].findings[j].value = 1000
		}
	}
	for i, m := range r.rows {
		for j := range m.ways {
			r.rows[i].ways[j].allocs = 1000
		}
		for j := range m.found {
			r.rows[i].found[j].median = 1000
		}
	}
	for _, page := range []string{r.page(), r.ratiosPage()} {
		if words := len(strings.Fields(page)); words > 2000 {
			t.Errorf("%d words: %s", words, page)
		}
	}
	if !strings.Contains(r.page(), "not quiet") || !strings.Contains(r.page(), "quietest of 5 runs") {
		t.Error("the page does not say how quiet it was")
	}
}

func TestChartIsXMLThatNamesEachWay(t *testing.T) {
	r := aReport()
	text := chart(r.ofTables(true))
	words := make(map[string]int)
	for d := xml.NewDecoder(strings.NewReader(text)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if data, ok := token.(xml.CharData); ok {
			words[string(data)]++
		}
	}
	for _, m := range r.ofTables(true) {
		for _, c := range m.ways {
			if words[c.name] == 0 {
				t.Errorf("%s is not named", c.name)
			}
		}
		if words[workers(m.workers)] != 1 {
			t.Errorf("%s: named %d times", workers(m.workers), words[workers(m.workers)])
		}
	}
}

func TestReportNeedsAllPeers(t *testing.T) {
	there, absent := &daemon{called: "one", path: "/a/path", version: "1.0", keeps: "nothing"}, &daemon{called: "such server", missing: errors.New("no package")}
	lines, err := describe("15.1", []*daemon{there}, time.Millisecond)
	if err != nil || strings.Contains(strings.Join(lines, "\n"), "/a/path") {
		t.Errorf("%q, %v", lines, err)
	}
	if _, err := describe("15.1", []*daemon{there, absent}, time.Millisecond); err == nil || !strings.Contains(err.Error(), "such server") {
		t.Errorf("without a peer: %v", err)
	}
}

func TestRatesHaveThreeDigits(t *testing.T) {
	for perSecond, want := range map[float64]string{0.5: "0.5", 42: "42", 999.7: "1k", 1000: "1k", 1234: "1.23k", 139396: "139k", 999900: "1M", 1e6: "1M"} {
		if got := rate(perSecond); got != want {
			t.Errorf("%v: %s, want %s", perSecond, got, want)
		}
	}
}
