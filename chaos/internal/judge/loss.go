package judge

import (
	"slices"
	"sort"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// loss (I2): a lock that is lost stays lost, and the holder of a lease does not find it held once
// another has been granted it. The holder of another lock may, because its session can end before
// it knows.
func loss(r *run, v *Verdict) {
	for _, l := range r.locks {
		granted := l.granted()
		for i, q := range granted {
			beliefs := slices.Clone(q.checks)
			if q.end == history.Released {
				beliefs = append(beliefs, q.endAsked)
			}
			v.Checked += len(beliefs)
			if len(beliefs) == 0 {
				continue
			}
			last := slices.Max(beliefs)
			if last > q.lost {
				v.violated("%s: %s found it held at %s, and had lost it at %s", l, q, at(last), at(q.lost))
			}
			if l.kind != history.Lease || !r.believed(q) {
				continue
			}
			later := granted[i+1:]
			later = later[:sort.Search(len(later), func(i int) bool { return later[i].answered >= last })]
			for _, o := range later {
				// o had the lock after q: it asked when q had it, or is known to have had it since.
				if q.conflicts(o) && (o.ask.Mono > q.answered || o.held()) {
					v.violated("%s: %s found it held at %s, and %s had been granted it at %s", l, q, at(last), o, at(o.answered))
				}
			}
		}
	}
}
