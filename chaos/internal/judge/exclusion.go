package judge

import (
	"fmt"
	"slices"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// exclusion (I1): no two holders that exclude each other are known to hold a lock at one moment.
func exclusion(r *run, v *Verdict) {
	for _, l := range r.locks {
		if l.kind == history.Permit {
			continue
		}
		l.overlaps(v, func(q *request, others []*request) {
			for _, o := range others {
				if q.conflicts(o) {
					v.violated("%s: %s was granted it at %s, though %s held it until %s", l, q, at(q.answered), o, at(o.heldUntil))
				}
			}
		})
	}
}

// permits: a semaphore never has more holders than permits.
func permits(r *run, v *Verdict) {
	for _, l := range r.locks {
		if l.kind != history.Permit {
			continue
		}
		l.overlaps(v, func(q *request, others []*request) {
			if len(others) >= q.ask.Limit {
				v.violated("%s: %s was granted one of %d permits at %s, though %v held one", l, q, q.ask.Limit, at(q.answered), others)
			}
		})
	}
}

// overlaps calls each for every request that is known to have been held, with the others that are
// known to be held when it was granted.
func (l *lock) overlaps(v *Verdict, each func(q *request, others []*request)) {
	var others []*request
	for _, q := range l.granted() {
		if !q.held() {
			continue
		}
		v.Checked++
		others = slices.DeleteFunc(others, func(o *request) bool { return o.heldUntil <= q.answered })
		each(q, others)
		others = append(others, q)
	}
}

// runs: a run begins once in its period.
func runs(r *run, v *Verdict) {
	begun := map[string]*request{}
	for _, q := range r.requests {
		if q.ask.Kind != history.Once || !q.granted() {
			continue
		}
		v.Checked++
		run := fmt.Sprintf("%q of %s", q.ask.Key, q.period)
		if o := begun[run]; o != nil {
			v.violated("run %s began in %s and in %s", run, o, q)
		}
		begun[run] = q
	}
}
