package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// aReport has an outcome for each row and each survey there is.
func aReport() report {
	r := report{machine: []string{"a machine"}}
	for _, row := range rowsMatching(regexp.MustCompile("")) {
		m := measured{row: row}
		for i, name := range row.names() {
			m.ways = append(m.ways, wayCost{name, 1234 * float64(i+1), 810 * time.Microsecond, 7})
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
		r.surveys = append(r.surveys, surveyed{v, []finding{{"what was found", 42, "things"}}})
	}
	return r
}

func TestAReportHasAllThatWasMeasured(t *testing.T) {
	r := aReport()
	folder := t.TempDir()
	if err := r.write(folder); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(folder, "figures.md"))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(page), "\n")
	for _, m := range r.rows {
		for _, f := range m.found {
			found := slices.ContainsFunc(lines, func(line string) bool {
				cells := strings.Split(line, "|")
				return len(cells) == 7 && strings.TrimSpace(cells[1]) == "`"+f.String()+"`" && regexp.MustCompile(`^ \d+ $`).MatchString(cells[2])
			})
			if !found {
				t.Errorf("there is no line for %s", m.name(f.ratio))
			}
		}
	}
	for _, want := range []string{"- a machine", "](figures.svg)", "| 810 µs |", "1.23k", "MultiXact members", "42 things", "0.50 to 1.00"} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page does not have %q", want)
		}
	}
}

func TestAReportSaysWhichGoalsAreMissedAndWhy(t *testing.T) {
	r := aReport()
	goals := 0
	for i, m := range r.rows {
		for j, f := range m.found {
			if goal := m.goalOf(f.ratio); goal > 0 {
				goals++
				r.rows[i].found[j].median = goal
				if reasons[f.String()] == "" {
					t.Errorf("nothing says why the goal of %s may be missed", m.name(f.ratio))
				}
			}
		}
	}
	if goals != 7 {
		t.Errorf("%d goals", goals)
	}
	if page := r.page(); strings.Contains(page, "missed") {
		t.Error("a goal that is met is said to be missed")
	}
	m := &r.rows[0]
	m.found[0].median *= 2
	page := r.page()
	want := fmt.Sprintf("- `%s` with %s, 2.30 instead of 1.15: %s\n", m.found[0].ratio, workers(m.workers), reasons[m.found[0].String()])
	if _, missed, _ := strings.Cut(page, "\n### Goals that are missed\n"); !strings.Contains(missed, want) || strings.Count(page, " instead of ") != 1 {
		t.Errorf("the page does not say %q:\n%s", want, missed)
	}
}

func TestTheChartIsXMLThatNamesEachWay(t *testing.T) {
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

func TestAReportNeedsAllPeers(t *testing.T) {
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
