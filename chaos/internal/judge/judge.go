// Package judge says whether the history of a run keeps what pgxlock promises. It shares no code
// with pgxlock, so that it shares no mistake with it.
//
// A history is read into requests, writes and faults (run.go). Porcupine judges those parts that are
// an object's operations (models.go, linearizable.go); checkers judge the rest, a promise each.
// The times of events are those of one clock, read before calls and after their returns, so that a
// call had its effect between: nothing is judged by how long something took, but for calls that
// must not wait, which have a bound of seconds.
package judge

import (
	"fmt"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// A Rule is a promise that a history is judged by.
type Rule struct {
	Name, Says string
	check      func(*run, *Verdict)
	always     bool // also where the server's clock has jumped, or commits may have been lost
}

// Rules are all rules, in the order of a Report.
var Rules = []Rule{
	{"linearizable", "acquires and ends of each lock, claims and runs, by porcupine", linearizable, false},
	{"I1", "no two known holders exclude each other", exclusion, false},
	{"I2", "a loss is noticed before the next grant, and stays one", loss, false},
	{"I3", "tokens grow", tokens, true},
	{"I4", "no late holder writes", zombies, true},
	{"I5", "a try does not wait", tries, false},
	{"I6", "nothing is left after a TTL", leftovers, false},
	{"I7", "waiters have their turns", turns, false},
	{"I8", "three connections a process", connections, false},
	{"sets", "all locks of a set are granted, or none", sets, false},
	{"evicted", "an evicted holder writes no longer, and notices", evicted, false},
	{"step-down", "a leader steps down if it is asked to", stepDowns, false},
	{"permits", "no more holders than permits", permits, false},
	{"limits", "no more events than burst and rate", limits, false},
	{"once", "a run begins once in its period", runs, false},
}

// A Verdict is what a rule says of a history, or of several.
type Verdict struct {
	Rule       Rule
	Excused    int      // in how many histories the rule is not judged, because of a fault
	Checked    int      // how many events or operations were judged
	Violations []string // what was not as promised
	Unknown    []string // what could not be decided: neither right nor wrong
}

func (v *Verdict) violated(format string, arg ...any) {
	v.Violations = append(v.Violations, fmt.Sprintf(format, arg...))
}

// Judge judges events by all rules. Pictures of what porcupine refuses go into the folder, if one
// is named. The error says that the events are no history.
func Judge(events []history.Event, pictures string) (*Report, error) {
	r, err := read(events)
	if err != nil {
		return nil, err
	}
	r.pictures = pictures
	// These two take away what all but tokens and fences build on.
	excused := r.faulty(0, never, "", history.ClockJump, history.PromoteAsync)
	report := newReport(events, r)
	for _, rule := range Rules {
		v := Verdict{Rule: rule}
		if excused && !rule.always {
			v.Excused++
		} else {
			rule.check(r, &v)
		}
		report.Verdicts = append(report.Verdicts, v)
	}
	return report, nil
}
