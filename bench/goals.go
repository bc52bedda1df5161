package main

import "fmt"

// A goal is the most that a row may cost: a ratio, or how many objects the program
// allocates for an operation.
type goal struct {
	name    string // of the ratio, or of the way whose objects are counted
	workers int
	most    float64
	unit    string // empty for a ratio
	bound   string // what the rest of the cost is, for a row that misses the goal
}

// objects is the unit of goals that count allocations.
const objects = " objects"

const (
	boundLockTx   = "its statement also asks whether the server is a standby and whether the snapshot stays; over a local socket each function that a statement names costs some 5 % of the round trip."
	boundFloor    = "measured alone, bare `pg_try_advisory_lock` and `pg_advisory_unlock` cost what the floor does. The rest is the Locker's own work: the table of its locks, their deadlines, and the connection that its callers share."
	boundAdvisory = "both ways send the requests of all workers in batches, so the processors limit both, and the servers and this program share them. A pair takes this program 4.5 µs at least; [Design](design.md#what-bounds-the-speed) has the parts."
	boundLease    = "the server checks the row, its guard, the waiters and the fencing token of each lease, which an upsert does not."
	boundDurable  = "both wait for the disk. PostgreSQL's part of a pair takes more of the processors than Redis's, with its guards, tokens and the check for waiters."
	boundMemory   = "a pair with its guards, fencing tokens and check for waiters takes the server longer than Redis and its client need for a whole pair in memory. [Design](design.md) has what each part takes."
	boundObjects  = "what is left are the lock itself, its key, and what the statement and its answer take."
)

// goals are all of them, in the order in which they are shown.
var goals = []goal{
	{"locktx/floor", 1, 1.15, "", boundLockTx},
	{"locktx/floor", 8, 1.15, "", boundLockTx},
	{"advisory/floor", 1, 1.10, "", boundFloor},
	{"advisory-tcp/floor-tcp", 1, 1.10, "", boundFloor},
	{"advisory/rueidis", 32, 1.00, "", boundAdvisory},
	{"advisory/rueidis", 256, 0.65, "", boundAdvisory},
	{"advisory/redislock", 32, 0.45, "", boundAdvisory},
	{"advisory/redislock", 256, 0.20, "", boundAdvisory},
	{"lease/floor", 1, 1.35, "", boundLease},
	{"lease/redislock-aof", 32, 0.70, "", boundDurable},
	{"lease/redislock-aof", 256, 0.30, "", boundDurable},
	{"lease/rueidis-aof", 32, 1.30, "", boundDurable},
	{"lease/rueidis-aof", 256, 1.20, "", boundDurable},
	{"lease/rueidis", 256, 2.50, "", boundMemory},
	{"lease-async/rueidis", 256, 1.50, "", boundMemory},
	{"advisory", 256, 4, objects, boundObjects},
	{"lease", 1, 60, objects, boundObjects},
	{"lease", 256, 20, objects, boundObjects},
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
