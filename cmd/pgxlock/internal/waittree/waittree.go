// Package waittree computes from a Snapshot who blocks whom: each lock that somebody waits
// for, and below each waiter the locks that it holds and others wait for.
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

// A Queue is a lock that somebody waits for, with its holders and its waiters.
type Queue struct {
	Key     string // of a semaphore: its name followed by #
	Kind    pgxlock.Kind
	Holders []pgxlock.Holder // none while the lock is passed on, or while a fenced transaction keeps it
	Waiters []Blocked
	Unread  bool // holders of this kind of lock could not be read, or not all
}

// Blocked is a waiter with the locks that it holds and others wait for.
type Blocked struct {
	pgxlock.Waiter
	Blocks []Queue
}

// String names the waiter, the lock that it waits for, and the locks it keeps from others.
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

// lockID identifies a lock within a snapshot.
type lockID struct {
	kind pgxlock.Kind
	key  string
}

func (id lockID) compare(other lockID) int {
	return cmp.Or(cmp.Compare(id.kind, other.kind), strings.Compare(id.key, other.key))
}

// A forest is the state of one computation.
type forest struct {
	waiters map[lockID][]pgxlock.Waiter
	holders map[lockID][]pgxlock.Holder

	// The locks that somebody waits for, by the server process that holds them and by
	// the hold's id, as a ticket records it in Waiter.Holds.
	byPID map[int32][]lockID
	byID  map[string][]lockID

	seen map[lockID]bool // its waiters are in the tree

	unread map[pgxlock.Kind]error // why holders of a kind are left out
}

// Of returns the locks that somebody waits for, sorted by kind and key. Locks whose holders
// wait for nothing are the roots; below a waiter are the locks that it holds and others
// wait for. A lock appears with its waiters once: where several of its holders wait, and in
// a circle, its other appearances have no waiters. What a waiter in a process holds is
// known only if it waits with a context from [pgxlock.Lock.Context]. Below a waiter are at most
// mostBlocks locks: what it holds is what its process says.
func Of(s pgxlock.Snapshot) []Queue {
	f := forest{make(map[lockID][]pgxlock.Waiter), make(map[lockID][]pgxlock.Holder), make(map[int32][]lockID), make(map[string][]lockID), make(map[lockID]bool), map[pgxlock.Kind]error{pgxlock.KindLease: s.Unread.Leases, pgxlock.KindAdvisory: s.Unread.Advisory}}
	for _, w := range s.Waiters {
		id := lockID{w.Kind, w.Key}
		f.waiters[id] = append(f.waiters[id], w)
	}
	for _, h := range s.Holders {
		f.add(lockID{h.Kind, h.Key}, h)
		if name := strings.TrimRight(h.Key, "0123456789"); h.Kind == pgxlock.KindLease && len(name) < len(h.Key) && strings.HasSuffix(name, "#") {
			f.add(lockID{h.Kind, name}, h) // a permit: a waiter for any permit waits for this one
		}
	}
	all := slices.SortedFunc(maps.Keys(f.waiters), lockID.compare)
	held := make(map[lockID]bool) // by a waiter for another lock
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
	for _, id := range all { // circles have no root
		if !f.seen[id] {
			roots = append(roots, f.queue(id))
		}
	}
	return roots
}

// add records the holder of a lock, if somebody waits for that lock.
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

const mostBlocks = 100

// blockedBy returns the locks that a waiter holds and somebody waits for.
func (f *forest) blockedBy(w pgxlock.Waiter) []lockID {
	var ids []lockID
	add := func(more []lockID) { ids = append(ids, more[:min(len(more), mostBlocks-len(ids))]...) }
	if w.PID != 0 {
		add(f.byPID[w.PID])
	}
	for _, hold := range w.Holds {
		add(f.byID[hold])
	}
	slices.SortFunc(ids, lockID.compare)
	return slices.Compact(ids)
}

// queue builds the tree below a lock.
func (f *forest) queue(id lockID) Queue {
	q := Queue{Key: id.key, Kind: id.kind, Holders: f.holders[id], Unread: f.unread[id.kind] != nil}
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
