package judge

import (
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// evicted: the fenced transactions that an evicted holder begins do not commit, and it does not find a lease held
// for longer than its TTL, which it cannot renew. It has lost an advisory lock before the eviction is over.
func evicted(r *run, v *Verdict) {
	for _, f := range r.faults {
		if f.failed || f.ended == never {
			continue
		}
		for _, q := range r.requests {
			if !f.evicts(q) {
				continue
			}
			v.Checked++
			latest := f.ended
			if q.ask.Kind != history.Advisory {
				latest += int64(q.ttl)
			}
			if i := slices.IndexFunc(q.checks, func(began int64) bool { return began > latest }); i >= 0 {
				v.violated("%s of %q: evicted by %s, it found it held at %s", q, f.Key, at(f.ended), at(q.checks[i]))
			}
		}
		for _, w := range r.writes {
			if f.evicts(w.under) && w.ask.Mono > f.ended && (w.rows > 0 || w.answer == history.Wrote) {
				v.violated("%s of %q began at %s, and was evicted by %s", w, f.Key, at(w.ask.Mono), at(f.ended))
			}
		}
	}
}

// stepsWithin is how long a leader may take to notice a request to step down where no fault is open. It checks
// once a second if no notification reaches it.
const stepsWithin = 5 * time.Second

// stepDowns: a leader steps down if, and only if, that is asked for during its term.
func stepDowns(r *run, v *Verdict) {
	asked := map[string][]*request{}
	for _, q := range r.requests {
		if q.ask.Kind == history.StepDown {
			asked[q.ask.Key] = append(asked[q.ask.Key], q)
		}
	}
	for _, q := range r.requests {
		if q.ask.Kind != history.Lead || !q.granted() {
			continue
		}
		v.Checked++
		during := func(a *request) bool { return a.ask.Mono < q.steps && (!a.granted() || a.answered > q.ask.Mono) }
		if q.steps != never && !slices.ContainsFunc(asked[q.ask.Key], during) {
			v.violated("%s of %q stepped down at %s, and was not asked to", q, q.ask.Key, at(q.steps))
		}
		for _, a := range asked[q.ask.Key] {
			latest := a.answered + int64(stepsWithin)
			if !a.granted() || a.ask.Mono < q.answered || len(q.checks) == 0 || r.faulty(a.ask.Mono, latest, "") {
				continue
			}
			if last := slices.Max(q.checks); last > latest {
				v.violated("%s of %q was asked to step down by %s, and led at %s", q, q.ask.Key, at(a.answered), at(last))
			}
		}
	}
}
