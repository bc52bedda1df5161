package judge

import (
	"slices"
	"sort"
	"time"

	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// turns (I7) is judged where no fault is open, and counted in turns, with wide room.
func turns(r *run, v *Verdict) {
	overtaking(r, v)
	share(r, v)
	idle(r, v)
}

// room is how many later callers may overtake a waiter: a call is known to wait a moment before it
// joins the queue, and a processor may be taken from it between.
const room = 16

// overtaking: the callers of a Locker are served in the order in which they came.
func overtaking(r *run, v *Verdict) {
	type queue struct {
		process string
		kind    history.Kind
		locker  int
		key     string
	}
	queues := map[queue][]*request{} // the grants that were waited for
	of := func(q *request) queue { return queue{q.ask.Process, q.ask.Kind, q.ask.Locker, q.ask.Key} }
	for _, l := range r.locks {
		for _, q := range l.granted() {
			if !q.ask.Try {
				queues[of(q)] = append(queues[of(q)], q)
			}
		}
	}
	for _, q := range r.requests {
		if q.waiting == never || q.answered == never || q.ask.Kind == history.Tx || r.faulty(q.waiting, q.answered, q.ask.Process) {
			continue
		}
		v.Checked++
		granted := queues[of(q)]
		var later []*request
		for _, o := range granted[sort.Search(len(granted), func(i int) bool { return granted[i].answered > q.waiting }):] {
			if o.answered >= q.answered {
				break
			}
			if o.ask.Mono > q.waiting {
				later = append(later, o)
			}
		}
		if len(later) > room {
			v.violated("%s %q: %s waited from %s to %s, and %d later callers of its process came before it, from %s on",
				q.ask.Kind, q.ask.Key, q, at(q.waiting), at(q.answered), len(later), later[0])
		}
	}
}

// The share of processes is judged in windows of twice the time, and by half the share, that is
// promised, where there are turns enough.
const (
	window     = 4 * time.Second
	partOfIt   = 8
	turnsOfOne = 2 * partOfIt
)

// share: where callers of several processes wait for a lock all the time, each has a part of the turns.
func share(r *run, v *Verdict) {
	for _, l := range r.locks {
		granted := l.granted()
		if l.kind == history.Tx || len(granted) == 0 || slices.ContainsFunc(l.requests, func(q *request) bool { return q.ask.Shared || q.ask.Set != 0 }) {
			continue
		}
		last := granted[len(granted)-1].answered
		for begin := granted[0].answered; begin+int64(window) <= last; begin += int64(window) {
			r.shareIn(l, begin, begin+int64(window), v)
		}
	}
}

// shareIn judges one window. A process is not judged while a fault concerns it.
func (r *run) shareIn(l *lock, begin, end int64, v *Verdict) {
	got, until := map[string]int{}, map[string]int64{} // until when each process has waited all the time
	all := 0
	for _, q := range l.requests {
		p := q.ask.Process
		answered := min(q.answered, r.seen[p]) // a dead process waits no longer
		if q.ask.Try || q.ask.Mono > end || answered < begin {
			continue
		}
		if _, ok := until[p]; !ok {
			until[p] = begin
		}
		if q.ask.Mono <= until[p] {
			until[p] = max(until[p], answered)
		}
		if q.granted() && q.answered <= end {
			got[p]++
			all++
		}
	}
	if len(until) < 2 || all < turnsOfOne*len(until) {
		return
	}
	for p, waited := range until {
		if waited < end || r.faulty(begin, end, p) {
			continue
		}
		v.Checked++
		if least := all / len(until) / partOfIt; got[p] < least {
			v.violated("%s: %s waited all the time from %s to %s, and had %d of %d turns of %d processes", l, p, at(begin), at(end), got[p], all, len(until))
		}
	}
}

// idleAtMost is how long a lock may be free while a caller waits for it. A lost wake-up delays a waiter by
// about a second.
const idleAtMost = 5 * time.Second

// idle: a lock is not free while callers wait for it. A set may wait for a lock whose holder waits for another:
// one of all locks of sets is not free.
func idle(r *run, v *Verdict) {
	var sets lock
	for _, l := range r.locks {
		if l.requests[0].ask.Set != 0 {
			sets.kind, sets.key = history.Set, "all"
			sets.requests = append(sets.requests, l.requests...)
		} else if l.kind != history.Tx { // whose callers may wait for a connection of their pool
			r.idle(l, v)
		}
	}
	r.idle(&sets, v)
}

func (r *run) idle(l *lock, v *Verdict) {
	type gap struct{ begin, end int64 }
	var gaps []gap
	free := int64(0) // from when on, as far as is known
	for _, q := range l.granted() {
		if q.answered-free > int64(idleAtMost) {
			gaps = append(gaps, gap{free, q.answered})
		}
		free = max(free, q.answered, q.heldUntil)
		if q.end != "" {
			free = max(free, q.ended)
		}
	}
	gaps = append(gaps, gap{free, never})
	for _, q := range l.requests {
		waited := min(q.answered, r.seen[q.ask.Process]) // a dead process waits no longer
		if q.ask.Try || waited-q.ask.Mono <= int64(idleAtMost) {
			continue
		}
		v.Checked++
		for _, g := range gaps {
			begin, end := max(q.ask.Mono, g.begin), min(waited, g.end)
			if end-begin > int64(idleAtMost) && !r.faulty(begin-int64(lingering), end, "") {
				v.violated("%s: %s waited from %s to %s, and it was free", l, q, at(begin), at(end))
			}
		}
	}
}
