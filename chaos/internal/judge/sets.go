package judge

import "slices"

// sets: a call for many locks is granted all of them, or none.
func sets(r *run, v *Verdict) {
	all := map[operation][]*request{}
	for _, q := range r.requests {
		if q.ask.Set != 0 {
			call := operation{q.ask.Process, q.ask.Set}
			all[call] = append(all[call], q)
		}
	}
	for _, set := range all {
		v.Checked++
		granted := slices.IndexFunc(set, (*request).granted)
		missing := slices.IndexFunc(set, func(q *request) bool { return !q.granted() && q.answer != "" })
		if granted >= 0 && missing >= 0 {
			v.violated("set of %d: %s was granted %q, and %s not %q", len(set), set[granted], set[granted].ask.Key, set[missing], set[missing].ask.Key)
		}
	}
}
