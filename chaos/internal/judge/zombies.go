package judge

import (
	"cmp"
	"slices"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// zombies (I4): no fenced write commits once another has been granted the lock, and none twice. What is
// committed is what the server's table has at the end of the run, and what a commit returned.
func zombies(r *run, v *Verdict) {
	type permit struct {
		of     *lock
		number int
	}
	locks := map[*request]permit{}
	all, writers := map[permit]grants{}, map[permit]grants{} // readers have no order among themselves
	for _, l := range r.locks {
		for number, granted := range l.byToken() {
			p := permit{l, number}
			all[p] = newGrants(granted, func(*request) bool { return true })
			writers[p] = newGrants(granted, func(q *request) bool { return !q.ask.Shared })
			for _, q := range granted {
				locks[q] = p
			}
		}
	}
	for _, w := range r.writes {
		v.Checked++
		switch {
		case w.answer == history.WriteRefused && w.rows > 0:
			v.violated("%s was refused, and is there", w)
		case w.rows > 1:
			v.violated("%s is there %d times", w, w.rows)
		case w.answer == history.Wrote && w.rows == 0 && len(r.rows) > 0 && !r.faulty(0, never, "", history.PromoteAsync):
			v.violated("%s was committed, and is not there", w)
		}
		if w.answer != history.Wrote && w.rows == 0 {
			continue
		}
		began := w.commitAsked
		if began == never { // killed before it wrote that
			began = w.ask.Mono
		}
		later := all
		if w.under.ask.Shared {
			later = writers
		}
		if q := later[locks[w.under]].before(began); q != nil && q.token > w.under.token {
			v.violated("%s: %s with token %d began its commit at %s, and %s had token %d at %s",
				locks[w.under].of, w, w.under.token, at(began), q, q.token, at(q.answered))
		}
	}
	// A fence keeps the lock for its transaction, so that rows are inserted in the order of tokens.
	slices.SortStableFunc(r.rows, func(a, b row) int { return cmp.Compare(a.Position, b.Position) })
	last, lastWriter := map[permit]row{}, map[permit]row{}
	for _, row := range r.rows {
		lock, known := locks[row.of.under]
		if !known {
			continue
		}
		v.Checked++
		conflicting := last
		if row.of.under.ask.Shared {
			conflicting = lastWriter
		}
		if before, ok := conflicting[lock]; ok && row.Token < before.Token {
			v.violated("%s: row %d of %s has token %d, and row %d of %s before it had %d",
				lock.of, row.Position, row.of, row.Token, before.Position, before.of, before.Token)
		}
		if before, ok := last[lock]; !ok || row.Token > before.Token {
			last[lock] = row
		}
		if !row.of.under.ask.Shared {
			lastWriter[lock] = row
		}
	}
}
