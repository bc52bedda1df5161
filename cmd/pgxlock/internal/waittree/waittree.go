package waittree

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// This file tells who blocks whom, as a tree.

// A Queue is a lock that somebody waits for: who holds it, and who waits for that.
type Queue struct {
	Key     string // of a [Semaphore], its name with # behind it
	Kind    pgxlock.Kind
	Holders []pgxlock.Holder // nobody, if it is just passed on, or kept by a fenced transaction
	Waiters []Blocked
}

// Blocked is a waiter with what it holds meanwhile and others wait for.
type Blocked struct {
	pgxlock.Waiter
	Blocks []Queue
}

// String says who waits, and for which locks others wait that it holds.
func (b Blocked) String() string {
	text := b.Waiter.String()
	for i, q := range b.Blocks {
		before := ", and holds "
		if i > 0 {
			before = " and "
		}
		text += before + fmt.Sprintf("%s %s", q.Kind, lockkey.Shown(q.Key))
	}
	return text
}

// lockID names a lock of a snapshot.
type lockID struct {
	kind pgxlock.Kind
	key  string
}

func (id lockID) compare(other lockID) int {
	return cmp.Or(cmp.Compare(id.kind, other.kind), strings.Compare(id.key, other.key))
}

// forest is how the tree of a snapshot is made.
type forest struct {
	waiters map[lockID][]pgxlock.Waiter
	holders map[lockID][]pgxlock.Holder

	// What is waited for, by who holds it: a server's process, and the id that a
	// ticket says is held.
	byPID map[int32][]lockID
	byID  map[string][]lockID

	seen map[lockID]bool
}

// Tree returns the locks that somebody waits for, by kind and key, with those first
// whose holders wait for nothing: behind a waiter stand the locks that it holds and
// others wait for, and so on. A lock stands in the tree with its waiters once; where
// several hold what others wait for, and in a circle, it stands without them the other
// times. Of who waits in a process it is known what they hold if they wait with a
// context from [Lock.Context].
func Of(s pgxlock.Snapshot) []Queue {
	f := forest{make(map[lockID][]pgxlock.Waiter), make(map[lockID][]pgxlock.Holder), make(map[int32][]lockID), make(map[string][]lockID), make(map[lockID]bool)}
	for _, w := range s.Waiters {
		id := lockID{w.Kind, w.Key}
		f.waiters[id] = append(f.waiters[id], w)
	}
	for _, h := range s.Holders {
		f.add(lockID{h.Kind, h.Key}, h)
		if name := strings.TrimRight(h.Key, "0123456789"); h.Kind == pgxlock.KindLease && len(name) < len(h.Key) && strings.HasSuffix(name, "#") {
			f.add(lockID{h.Kind, name}, h) // a permit: who waits for any waits for it
		}
	}
	all := slices.SortedFunc(maps.Keys(f.waiters), lockID.compare)
	held := make(map[lockID]bool) // by who waits for another one
	for id, waiters := range f.waiters {
		for _, w := range waiters {
			for _, blocks := range f.blockedBy(w) {
				held[blocks] = held[blocks] || blocks != id
			}
		}
	}
	var roots []Queue
	for _, id := range all {
		if !held[id] {
			roots = append(roots, f.queue(id))
		}
	}
	for _, id := range all { // circles have no beginning
		if !f.seen[id] {
			roots = append(roots, f.queue(id))
		}
	}
	return roots
}

// add adds who holds a lock that somebody waits for.
func (f *forest) add(id lockID, h pgxlock.Holder) {
	if f.waiters[id] == nil {
		return
	}
	f.holders[id] = append(f.holders[id], h)
	name := h.ID
	if h.Kind == pgxlock.KindAdvisory {
		name = lockkey.Identify(h.Key).HeldBy(h.PID)
	}
	f.byID[name] = append(f.byID[name], id)
	f.byPID[h.PID] = append(f.byPID[h.PID], id)
}

// blockedBy are the locks that a waiter holds and somebody waits for.
func (f *forest) blockedBy(w pgxlock.Waiter) []lockID {
	var ids []lockID
	if w.PID != 0 {
		ids = append(ids, f.byPID[w.PID]...)
	}
	for _, hold := range w.Holds {
		ids = append(ids, f.byID[hold]...)
	}
	slices.SortFunc(ids, lockID.compare)
	return slices.Compact(ids)
}

func (f *forest) queue(id lockID) Queue {
	q := Queue{Key: id.key, Kind: id.kind, Holders: f.holders[id]}
	if f.seen[id] {
		return q
	}
	f.seen[id] = true
	for _, w := range f.waiters[id] {
		b := Blocked{Waiter: w}
		for _, blocks := range f.blockedBy(w) {
			b.Blocks = append(b.Blocks, f.queue(blocks))
		}
		q.Waiters = append(q.Waiters, b)
	}
	return q
}
