package main

import (
	"strings"
	"testing"
)

func TestEachGoalIsOfARowThatIsMeasured(t *testing.T) {
	verdicts := aReport().verdicts()
	if len(verdicts) != len(goals) {
		t.Errorf("%d verdicts on %d goals: %v", len(verdicts), len(goals), verdicts)
	}
	for _, g := range goals {
		if g.bound <= 0 {
			t.Errorf("%s: %s", g, g.aim())
		}
	}
}

func TestGoalIsReachedAtMostAtItsValue(t *testing.T) {
	r := aReport()
	set := func(name string, workers int, ratio, allocs float64) {
		for i, m := range r.rows {
			for j, f := range m.found {
				if f.String() == name && m.workers == workers {
					r.rows[i].found[j].median = ratio
				}
			}
			for j, c := range m.ways {
				if c.name == name && m.workers == workers {
					r.rows[i].ways[j].allocs = allocs
				}
			}
		}
		for i, s := range r.surveys {
			for j, f := range s.findings {
				if s.name+", "+f.what == name {
					r.surveys[i].findings[j].value = ratio
				}
			}
		}
	}
	for _, g := range goals {
		set(g.name, g.workers, g.bound, g.bound)
	}
	page := r.page()
	if strings.Contains(page, "missed") || strings.Count(page, " | reached |") != len(goals) {
		t.Errorf("a goal that is reached is said to be missed:\n%s", page)
	}
	for _, g := range goals {
		beyond := 2 * g.bound
		if g.of == atLeast {
			beyond = g.bound / 2
		}
		set(g.name, g.workers, beyond, beyond)
		missed := 0
		for _, v := range r.verdicts() {
			if v.reached() {
				continue
			}
			missed++
			if v.name != g.name || v.workers != g.workers || v.measured != beyond || !strings.HasSuffix(v.String(), ": missed") {
				t.Errorf("%s is missed, but %s", g, v)
			}
		}
		page := r.page()
		if missed != 1 || strings.Count(page, "**missed**") != 1 {
			t.Errorf("%s: %d verdicts are missed, and the page says:\n%s", g, missed, page)
		}
		set(g.name, g.workers, g.bound, g.bound)
	}
}
