package monitor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Waits is the wait graph of a [Snapshot]: it shows which holders block which waiters. It points
// into the lists of the Snapshot.
type Waits struct {
	// Queues are the locks that callers wait for, by kind and key.
	Queues []Queue

	byLock  map[LockID]int       // where in Queues a lock is
	callers map[identity]*Waiter // the first waiter of each caller
	held    map[identity][]int   // where in Queues the locks are that a caller holds
}

// A LockID identifies a lock within a [Snapshot].
type LockID struct {
	Kind pgxlock.Kind
	Key  string // of a waiter for any permit of a semaphore: its name followed by #
	Raw  bool   // as in [pgxlock.Holder]
}

// LockOf identifies the lock of a holder.
func LockOf(h *pgxlock.Holder) LockID { return LockID{h.Kind, h.Key, h.Raw} }

// A HoldID identifies an acquisition in successive snapshots.
type HoldID struct {
	LockID
	ID    string // as in [pgxlock.Holder]
	Token int64
}

// HoldOf identifies the acquisition of a holder.
func HoldOf(h *pgxlock.Holder) HoldID { return HoldID{LockOf(h), h.ID, h.Token} }

// Lock identifies the lock that the waiter waits for.
func (w *Waiter) Lock() LockID { return LockID{w.Kind, w.Key, w.Raw} }

// A Queue is a lock that callers wait for, with its holders and its waiters. The holders of a
// semaphore are those of its permits.
type Queue struct {
	LockID
	Holders []*pgxlock.Holder // none while the lock is passed on, or while a fenced transaction keeps it
	Waiters []Blocked
	Callers int  // how many wait: several may do so in the process of one Waiter
	Unread  bool // holders of this kind of lock could not be read, or not all
}

// Blocked is a waiter. Caller is the first of the waiters that are known to be the same caller:
// the same session, or callers that hold the same lock. Blocks are the locks that the waiter
// holds and others wait for; only [Waits.Tree] sets it.
type Blocked struct {
	*Waiter
	Caller *Waiter
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
		text += before + fmt.Sprintf("%s %s", q.Kind, lockkey.Shown(lockkey.Join(q.Key, q.Raw)))
	}
	return text
}

// An identity is a property by which a caller is known: the process of its session on the
// server, or the id of a hold, as a ticket records it in Waiter.Holds.
type identity struct {
	pid  int32
	hold string
}

// identities returns the identities of a waiter.
func (w *Waiter) identities() []identity {
	var known []identity
	if w.PID != 0 {
		known = append(known, identity{pid: w.PID})
	}
	for _, hold := range w.Holds {
		known = append(known, identity{hold: hold})
	}
	return known
}

// identities returns the identities of a holder.
func identities(h *pgxlock.Holder) []identity {
	known := []identity{{hold: h.ID}}
	if h.Kind == pgxlock.KindAdvisory {
		known[0].hold = lockkey.Identify(h.LockKey()).HeldBy(h.PID)
	}
	if h.PID != 0 {
		known = append(known, identity{pid: h.PID})
	}
	return known
}

// semaphore returns the lock for which waiters for any permit of a semaphore wait, if a holder
// has a permit.
func semaphore(h *pgxlock.Holder) (LockID, bool) {
	name := strings.TrimRight(h.Key, "0123456789")
	return LockID{Kind: h.Kind, Key: name}, h.Kind == pgxlock.KindLease && len(name) < len(h.Key) && strings.HasSuffix(name, "#")
}

// Waits returns the wait graph. What a waiter in a process holds is known only if it waits with a
// context from [pgxlock.Lock.Context].
func (s Snapshot) Waits() *Waits {
	w := &Waits{byLock: make(map[LockID]int), callers: make(map[identity]*Waiter), held: make(map[identity][]int)}
	for i := range s.Waiters {
		waiter := &s.Waiters[i]
		id := waiter.Lock()
		at, found := w.byLock[id]
		if !found {
			at = len(w.Queues)
			w.byLock[id] = at
			w.Queues = append(w.Queues, Queue{LockID: id, Unread: s.Unread.holders(id.Kind) != nil})
		}
		known := waiter.identities()
		caller := cmp.Or(w.caller(known), waiter)
		for _, id := range known {
			w.callers[id] = caller
		}
		q := &w.Queues[at]
		q.Waiters, q.Callers = append(q.Waiters, Blocked{Waiter: waiter, Caller: caller}), q.Callers+1+waiter.Behind
	}
	slices.SortStableFunc(w.Queues, func(a, b Queue) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Key, b.Key))
	})
	for i, q := range w.Queues {
		w.byLock[q.LockID] = i
	}
	for i := range s.Holders {
		h := &s.Holders[i]
		for _, at := range w.queuesFor(h) {
			w.Queues[at].Holders = append(w.Queues[at].Holders, h)
			for _, id := range identities(h) {
				w.held[id] = append(w.held[id], at)
			}
		}
	}
	return w
}

// queuesFor returns the queues in which callers wait for the lock of a holder: for that lock, or
// for any permit.
func (w *Waits) queuesFor(h *pgxlock.Holder) (all []int) {
	if len(w.Queues) == 0 {
		return nil
	}
	if at, known := w.byLock[LockOf(h)]; known {
		all = append(all, at)
	}
	if id, permit := semaphore(h); permit {
		if at, known := w.byLock[id]; known {
			all = append(all, at)
		}
	}
	return all
}

// caller returns the first waiter of the caller with one of these identities; nil: it does not wait.
func (w *Waits) caller(known []identity) *Waiter {
	for _, id := range known {
		if caller := w.callers[id]; caller != nil {
			return caller
		}
	}
	return nil
}

// Caller returns the first waiter of the caller that is the holder of a lock; nil: the holder is
// not known to wait.
func (w *Waits) Caller(h *pgxlock.Holder) *Waiter { return w.caller(identities(h)) }

// Count returns how many callers wait for the lock of a holder, or for any permit.
func (w *Waits) Count(h *pgxlock.Holder) (n int) {
	for _, at := range w.queuesFor(h) {
		n += w.Queues[at].Callers
	}
	return n
}

const (
	mostBlocks = 100
	mostLevels = 10
)

// blockedBy returns the queues of the locks that a waiter holds, at most mostBlocks.
func (w *Waits) blockedBy(waiter *Waiter) []int {
	var all []int
	for _, id := range waiter.identities() {
		more := w.held[id]
		all = append(all, more[:min(len(more), mostBlocks-len(all))]...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// Tree returns the queues as trees. Locks whose holders wait for nothing are the roots; below a
// waiter are the locks that it holds and others wait for. A lock appears with its waiters once:
// where several of its holders wait, and in a circle, its other appearances have no waiters.
// Below a waiter are at most 100 locks, and below a lock at most 10 levels: what a waiter holds is what its
// process says. A lock below them has its waiters in a tree of its own.
func (w *Waits) Tree() []Queue {
	held := make([]bool, len(w.Queues)) // by a waiter for another lock, at the same place as in Queues
	for at, q := range w.Queues {
		for _, b := range q.Waiters {
			for _, blocks := range w.blockedBy(b.Waiter) {
				held[blocks] = held[blocks] || blocks != at
			}
		}
	}
	var roots []Queue
	seen := make([]bool, len(w.Queues)) // its waiters are in the tree
	for at := range w.Queues {
		if !held[at] {
			roots = append(roots, w.tree(at, seen, 0))
		}
	}
	for at := range w.Queues { // circles have no root, and what is too deep has one of its own
		if !seen[at] {
			roots = append(roots, w.tree(at, seen, 0))
		}
	}
	return roots
}

// tree builds the tree below a lock.
func (w *Waits) tree(at int, seen []bool, level int) Queue {
	q := w.Queues[at]
	if seen[at] || level > mostLevels {
		q.Waiters = nil
		return q
	}
	seen[at] = true
	q.Waiters = slices.Clone(q.Waiters)
	for i, b := range q.Waiters {
		for _, blocks := range w.blockedBy(b.Waiter) {
			q.Waiters[i].Blocks = append(q.Waiters[i].Blocks, w.tree(blocks, seen, level+1))
		}
	}
	return q
}
