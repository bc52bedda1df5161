package judge

import (
	"sort"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// tokens (I3): a lock's token is greater than that of each grant that had returned before it was
// asked for. Readers have no order among themselves.
func tokens(r *run, v *Verdict) {
	for _, l := range r.locks {
		for _, granted := range l.byToken() {
			all := newGrants(granted, func(*request) bool { return true })
			writers := newGrants(granted, func(q *request) bool { return !q.ask.Shared })
			has := map[int64]*request{} // the writer that has a token
			for _, q := range granted {
				v.Checked++
				before := all.before(q.ask.Mono)
				if q.ask.Shared {
					before = writers.before(q.ask.Mono)
				}
				if before != nil && q.token <= before.token {
					v.violated("%s: %s has token %d, and %s had %d before", l, q, q.token, before, before.token)
				}
				if o := has[q.token]; o != nil {
					v.violated("%s: %s and %s have one token, %d", l, q, o, q.token)
				}
				if !q.ask.Shared {
					has[q.token] = q
				}
			}
		}
	}
}

// byToken returns the requests that were granted with a token, by the number of the permit: each
// permit of a semaphore has tokens of its own. A permit whose number is not known is left out.
func (l *lock) byToken() map[int][]*request {
	by := map[int][]*request{}
	for _, q := range l.granted() {
		if q.token != 0 && (l.kind != history.Permit || q.permit != 0) {
			by[q.permit] = append(by[q.permit], q)
		}
	}
	return by
}

// grants finds the greatest token of all grants that had returned at a time.
type grants struct {
	answered []int64
	greatest []*request // of the grant with that index and all before it
}

// newGrants takes requests in the order of their answers.
func newGrants(granted []*request, which func(*request) bool) grants {
	var g grants
	for _, q := range granted {
		if !which(q) {
			continue
		}
		greatest := q
		if n := len(g.greatest); n > 0 && g.greatest[n-1].token > q.token {
			greatest = g.greatest[n-1]
		}
		g.answered, g.greatest = append(g.answered, q.answered), append(g.greatest, greatest)
	}
	return g
}

// before returns the grant with the greatest token of those that had returned before t, or nil.
func (g grants) before(t int64) *request {
	i := sort.Search(len(g.answered), func(i int) bool { return g.answered[i] >= t })
	if i == 0 {
		return nil
	}
	return g.greatest[i-1]
}
