package main

import (
	"fmt"
	"strconv"
)

// A goal is a bound of what a run measures.
type goal struct {
	name    string // of the ratio, of the way whose objects are counted, or of a survey and its finding
	workers int    // 0 for a finding, whose name has them
	bound   float64
	of      goalKind
}

type goalKind int

const (
	cost    goalKind = iota // a ratio, at most
	objects                 // allocations for an operation, at most
	atMost                  // a finding
	atLeast                 // a finding
)

// goals are all of them, in the order in which they are shown.
var goals = []goal{
	{"locktx/floor", 1, 1.15, cost},
	{"locktx/floor", 8, 1.15, cost},
	{"advisory/floor", 1, 1.10, cost},
	{"advisory-tcp/floor-tcp", 1, 1.10, cost},
	{"advisory/rueidis", 32, 1.00, cost},
	{"advisory/rueidis", 256, 0.65, cost},
	{"advisory/redislock", 32, 0.45, cost},
	{"advisory/redislock", 256, 0.20, cost},
	{"lease/floor", 1, 1.35, cost},
	{"lease/redislock-aof", 32, 0.70, cost},
	{"lease/redislock-aof", 256, 0.30, cost},
	{"lease/rueidis-aof", 32, 1.30, cost},
	{"lease/rueidis-aof", 256, 1.20, cost},
	{"lease/rueidis", 256, 2.50, cost},
	{"lease-async/rueidis", 256, 1.50, cost},
	{"advisory", 256, 4, objects},
	{"lease", 1, 60, objects},
	{"lease", 256, 20, objects},
	{"contended, 4x4, grants of advisory/raw", 0, 0.50, atLeast},
	{"contended, 4x4, grants of lease/row", 0, 0.55, atLeast},
	{"contended, " + evenness("advisory"), 0, 0.70, atLeast},
	{"contended, " + evenness("lease"), 0, 0.70, atLeast},
	{"hand-over, advisory/raw", 0, 1.60, atMost},
	{"hand-over, lease/row", 0, 1.80, atMost},
	{"fleet, " + fleetOverBare(16), 0, 1.60, atLeast},
	{"fleet, " + fleetOverBare(48), 0, 2.00, atLeast},
	{"fleet, " + fleetOverBare(64), 0, 2.00, atLeast},
	{"fleet, " + fleetOverOne(64), 0, 2.50, atMost},
	{"fleet, " + fleetConnected(64), 0, 1.00, atLeast},
}

func (g goal) String() string {
	switch g.of {
	case cost:
		return fmt.Sprintf("%s, %s", g.name, workers(g.workers))
	case objects:
		return fmt.Sprintf("objects of %s, %s", g.name, workers(g.workers))
	}
	return g.name
}

// value is a measure of this goal as it is printed.
func (g goal) value(measured float64) string {
	if g.of == objects {
		return fmt.Sprintf("%.0f objects", measured)
	}
	return fmt.Sprintf("%.2f", measured)
}

// aim is the bound as it is printed.
func (g goal) aim() string {
	if g.of == atLeast {
		return ">= " + g.value(g.bound)
	}
	return "<= " + g.value(g.bound)
}

// crowd is the number of workers as a table has it.
func (g goal) crowd() string {
	if g.workers == 0 {
		return ""
	}
	return strconv.Itoa(g.workers)
}

// A verdict is what a run says about a goal.
type verdict struct {
	goal
	measured float64
}

func (v verdict) reached() bool {
	if v.of == atLeast {
		return v.measured >= v.bound
	}
	return v.measured <= v.bound
}

func (v verdict) String() string {
	word := "reached"
	if !v.reached() {
		word = "missed"
	}
	return fmt.Sprintf("%s: %s, goal: %s: %s", v.goal, v.value(v.measured), v.aim(), word)
}

// verdicts returns one for each goal whose row was measured.
func (r report) verdicts() []verdict {
	var found []verdict
	for _, g := range goals {
		if measured, ok := r.measureOf(g); ok {
			found = append(found, verdict{g, measured})
		}
	}
	return found
}

// measureOf returns what the goal is about. Objects are those of a table's way.
func (r report) measureOf(g goal) (float64, bool) {
	for _, m := range r.rows {
		if m.workers != g.workers {
			continue
		}
		for _, f := range m.found {
			if g.of == cost && f.String() == g.name {
				return f.median, true
			}
		}
		for _, c := range m.ways {
			if g.of == objects && m.isTable() && c.name == g.name {
				return c.allocs, true
			}
		}
	}
	for _, s := range r.surveys {
		for _, f := range s.findings {
			if s.name+", "+f.what == g.name {
				return f.value, true
			}
		}
	}
	return 0, false
}
