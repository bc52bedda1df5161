package judge

import (
	"cmp"
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// tries (I5): a try does not wait for others. Each call has a bound, and is judged by twice that,
// and only where no fault is open.
func tries(r *run, v *Verdict) {
	for _, q := range r.requests {
		if !q.ask.Try || q.answered == never || r.faulty(q.ask.Mono, q.answered, q.ask.Process) {
			continue
		}
		v.Checked++
		bound := 5 * time.Second
		switch {
		case q.ask.Kind == history.Advisory:
			bound = 12 * time.Second
		case q.ask.Shared:
			bound = 17 * time.Second
		}
		if took := time.Duration(q.answered - q.ask.Mono); took > 2*bound {
			v.violated("%s, a try of %s %q, took %v", q, q.ask.Kind, q.ask.Key, took)
		}
	}
}

// leftovers (I6): one TTL after the last process ended nothing is left, nor after a call that failed. Its release may
// take longer where a fault concerns its process.
func leftovers(r *run, v *Verdict) {
	for _, e := range r.left {
		if e.Op != 0 && r.faulty(e.Mono-int64(lingering), e.Mono, e.Process) {
			continue
		}
		v.Checked++
		if e.N != 0 {
			v.violated("%d are left of: %s", e.N, e.Err)
		}
	}
}

// connections (I8): a process has three connections at most, and what its options add. One that is
// cut stays at the server for a while: those of a process with a fault are not judged.
func connections(r *run, v *Verdict) {
	for _, e := range r.connections {
		if r.faulty(e.Mono-int64(lingering), e.Mono, e.Target) {
			continue
		}
		v.Checked++
		if most := cmp.Or(e.Limit, 3); e.N > most {
			v.violated("%s had %d connections at %s, and may have %d", e.Target, e.N, at(e.Mono), most)
		}
	}
}

// limits: in any time a limit allows a burst, and what its rate gives in that time. A crash or a
// failover empties the table, and allows one burst more, beside what calls wait for that it has interrupted:
// an event that was granted for later happens, though the table no longer has it.
func limits(r *run, v *Verdict) {
	byKey := map[string][]*request{}
	for _, q := range r.requests {
		if q.ask.Kind == history.Limit && q.granted() {
			byKey[q.ask.Key] = append(byKey[q.ask.Key], q)
		}
	}
	for key, asked := range byKey {
		answered := slices.SortedStableFunc(slices.Values(asked), func(a, b *request) int { return cmp.Compare(a.answered, b.answered) })
		for i, first := range asked {
			v.Checked++
			// What was asked from first on and answered until last happened between.
			begin, n := first.ask.Mono, 0
			from, _ := slices.BinarySearchFunc(answered, begin, func(q *request, t int64) int { return cmp.Compare(q.answered, t) })
			for _, last := range answered[from:] {
				if last.ask.Mono < begin {
					continue
				}
				n += last.ask.N
				passed := time.Duration(last.answered - begin)
				const drift = 1.001 // between the clocks of the server and the history
				most := float64(first.ask.Limit) + first.ask.Rate*passed.Seconds()*drift
				if float64(n) > most && float64(n) > most+float64(r.forgotten(asked, begin, last.answered)) {
					v.violated("limit %q of %d and %g a second: %d in %v, from %s (request %d) to %s", key, first.ask.Limit, first.ask.Rate, n, passed, first, i, last)
					break
				}
			}
		}
	}
}

// forgotten returns how many events of a limit may have been forgotten when the server emptied its unlogged tables.
func (r *run) forgotten(granted []*request, begin, end int64) (n int) {
	for _, f := range r.faults {
		if !slices.Contains([]history.Fault{history.Crash, history.Promote, history.PromoteAsync}, f.Fault) || f.Mono > end || f.ended < begin {
			continue
		}
		n += granted[0].ask.Limit
		for _, q := range granted {
			if q.ask.Mono < f.ended && q.answered > f.Mono {
				n += q.ask.N
			}
		}
	}
	return n
}
