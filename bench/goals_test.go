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
		if g.most <= 0 {
			t.Errorf("%s: at most %v", g, g.most)
		}
	}
}

func TestAGoalIsReachedAtMostAtItsValue(t *testing.T) {
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
	}
	for _, g := range goals {
		set(g.name, g.workers, g.most, g.most)
	}
	page := r.page()
	if strings.Contains(page, "missed") || strings.Count(page, " | reached |") != len(goals) {
		t.Errorf("a goal that is reached is said to be missed:\n%s", page)
	}
	for _, g := range goals {
		set(g.name, g.workers, 2*g.most, 2*g.most)
		missed := 0
		for _, v := range r.verdicts() {
			if v.reached() {
				continue
			}
			missed++
			if v.name != g.name || v.workers != g.workers || v.measured != 2*g.most || !strings.HasSuffix(v.String(), ": missed") {
				t.Errorf("%s is missed, but %s", g, v)
			}
		}
		page := r.page()
		if missed != 1 || strings.Count(page, "**missed**") != 1 {
			t.Errorf("%s: %d verdicts are missed, and the page says:\n%s", g, missed, page)
		}
		set(g.name, g.workers, g.most, g.most)
	}
}
