package main

import "fmt"

// A goal is the most that a row may cost: a ratio, or how many objects the program
// allocates for an operation.
type goal struct {
	name    string // of the ratio, or of the way whose objects are counted
	workers int
	most    float64
	unit    string // empty for a ratio
}

// objects is the unit of goals that count allocations.
const objects = " objects"

// goals are all of them, in the order in which they are shown.
var goals = []goal{
	{"locktx/floor", 1, 1.15, ""},
	{"locktx/floor", 8, 1.15, ""},
	{"advisory/floor", 1, 1.10, ""},
	{"advisory-tcp/floor-tcp", 1, 1.10, ""},
	{"advisory/rueidis", 32, 1.00, ""},
	{"advisory/rueidis", 256, 0.65, ""},
	{"advisory/redislock", 32, 0.45, ""},
	{"advisory/redislock", 256, 0.20, ""},
	{"lease/floor", 1, 1.35, ""},
	{"lease/redislock-aof", 32, 0.70, ""},
	{"lease/redislock-aof", 256, 0.30, ""},
	{"lease/rueidis-aof", 32, 1.30, ""},
	{"lease/rueidis-aof", 256, 1.20, ""},
	{"lease/rueidis", 256, 2.50, ""},
	{"lease-async/rueidis", 256, 1.50, ""},
	{"advisory", 256, 4, objects},
	{"lease", 1, 60, objects},
	{"lease", 256, 20, objects},
}

func (g goal) String() string {
	if g.unit == objects {
		return fmt.Sprintf("objects of %s, %s", g.name, workers(g.workers))
	}
	return fmt.Sprintf("%s, %s", g.name, workers(g.workers))
}

// value is a measure of this goal as it is printed.
func (g goal) value(measured float64) string {
	if g.unit == objects {
		return fmt.Sprintf("%.0f%s", measured, g.unit)
	}
	return fmt.Sprintf("%.2f", measured)
}

// A verdict is what a run says about a goal.
type verdict struct {
	goal
	measured float64
}

func (v verdict) reached() bool { return v.measured <= v.most }

func (v verdict) String() string {
	word := "reached"
	if !v.reached() {
		word = "missed"
	}
	return fmt.Sprintf("%s: %s, goal: <= %s: %s", v.goal, v.value(v.measured), v.value(v.most), word)
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
			if g.unit == "" && f.String() == g.name {
				return f.median, true
			}
		}
		for _, c := range m.ways {
			if g.unit == objects && m.isTable() && c.name == g.name {
				return c.allocs, true
			}
		}
	}
	return 0, false
}
