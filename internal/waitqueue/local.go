package waitqueue

import (
	"container/list"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A localQueue is the callers of one Locker that wait for one lock: first come, first
// served. Only the first tries to acquire the lock. The next one tries when the first has
// given up, or when the lock was released. It exists while it has waiters. Queue.mu guards it
// and its positions.
type localQueue struct {
	name    lockkey.Name
	waiters list.List  // of *position
	refusal *hold.Busy // the server's last one, also for waiters that have not tried yet
	owned   bool       // a former first waiter has the lock exclusively, until Freed or HandOver
	ticket  *ticket    // its position among the processes; nil: none
	turn    turn       // the last one
}

// A position is that of one caller in a local queue.
type position struct {
	queue  *Queue
	local  *localQueue
	at     *list.Element
	mode   hold.Mode     // in which it wants the lock
	holds  []heldLock    // what its caller holds meanwhile
	woken  chan struct{} // has room for one signal: the waiter is first, and should try
	tried  bool          // it has tried since it joined; its caller's goroutine alone uses it
	sent   int           // how often its ticket had been sent before its last try
	rests  bool          // it waits to be woken
	handed bool          // its last try was of a lock that was left to it
	fate   error         // why its wait must fail; nil: it need not
}

// Idle reports whether no caller waits for any lock. Most calls read nothing but this.
func (q *Queue) Idle() bool { return q.count.Load() == 0 }

// Waiting reports whether callers wait for the lock.
func (q *Queue) Waiting(name lockkey.Name) bool {
	if q.Idle() {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.locals[name] != nil
}

// writerWaits returns the server's last refusal of the waiters for a lock, if one of them
// wants the lock exclusively, and nil otherwise.
func (q *Queue) writerWaits(name lockkey.Name) *hold.Busy {
	if q.Idle() {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.locals[name]
	if l == nil {
		return nil
	}
	for e := l.waiters.Front(); e != nil; e = e.Next() {
		if e.Value.(*position).mode == hold.Exclusive {
			return l.refusal
		}
	}
	return nil
}

// refusalFor returns the server's last refusal of the waiters for a lock. It returns nil if
// there are no waiters, or if the lock may have been freed since.
func (q *Queue) refusalFor(name lockkey.Name) *hold.Busy {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.locals[name]; l != nil && *l.refusal != (hold.Busy{}) {
		return l.refusal
	}
	return nil
}

// join adds a waiter at the end of a local queue. Where there is none, it makes one if refusal
// is not nil, and otherwise returns nil.
func (q *Queue) join(name lockkey.Name, refusal *hold.Busy, holds []heldLock, mode hold.Mode) *position {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.locals[name]
	if l == nil {
		if refusal == nil {
			return nil
		}
		if q.locals == nil {
			q.locals = make(map[lockkey.Name]*localQueue)
		}
		l = &localQueue{name: name, refusal: refusal}
		q.locals[name] = l
		q.waiting.Add(name)
		q.count.Add(1)
	}
	p := &position{queue: q, local: l, mode: mode, holds: holds, woken: make(chan struct{}, 1)}
	p.at = l.waiters.PushBack(p)
	return p
}

// leave removes a waiter that gave up.
func (p *position) leave() {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	first := p.firstLocked()
	if first {
		p.endTurnLocked()
	}
	if !p.removeLocked() {
		return
	}
	if t := p.local.ticket; t != nil && len(p.holds) > 0 {
		t.queue.addLocked(t) // the locks that this caller holds do not wait any more
	}
	if first {
		p.local.wakeLocked()
	}
}

// granted removes a waiter that has the lock, after a try with that ticket. owned: no other
// caller can have the lock before Freed or HandOver is called. Otherwise it reports whether the
// next waiter here shares the lock at once.
func (p *position) granted(number int64, owned bool) (joined bool) {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	t := p.local.ticket
	if !p.handed {
		p.local.turn.beginLocked(p.local)
	}
	if t != nil && !p.handed { // during a turn the ticket is that of the next turn
		t.spendLocked(number, p.sent)
	}
	if !p.removeLocked() {
		return false
	}
	p.local.owned = owned
	if t != nil && p.queue.contendedLocked(p.local.name) { // other processes wait as well: the next waiter's position counts from now on
		p.queue.enterLocked(p.local)
	}
	if !owned {
		joined = p.local.joinLocked(p.mode)
		p.local.wakeLocked()
	}
	return joined
}

// removeLocked removes the waiter from its local queue, and reports whether others are left
// there.
func (p *position) removeLocked() bool {
	l := p.local
	l.waiters.Remove(p.at)
	if l.waiters.Len() > 0 {
		return true
	}
	delete(p.queue.locals, l.name)
	p.queue.waiting.Forget(l.name, 0)
	p.queue.count.Add(-1)
	if l.ticket != nil {
		l.ticket.withdrawLocked()
	}
	return false
}

// firstLocked reports whether the waiter is first in its local queue. A waiter that is first
// stays first.
func (p *position) firstLocked() bool { return p.local.waiters.Front() == p.at }

// wakeLocked wakes the first waiter.
func (l *localQueue) wakeLocked() { l.waiters.Front().Value.(*position).signal() }

// signal wakes the waiter, which then checks whether to try.
func (p *position) signal() {
	select {
	case p.woken <- struct{}{}:
	default: // it has a signal already
	}
}

// Freed wakes the first waiter of a lock, which may be free. If the local queue has a ticket, it
// returns true and wakes no waiter: that ticket's turn decides when the first waiter tries, so
// the caller must wake the tickets after the release.
func (q *Queue) Freed(name lockkey.Name) (queued bool) {
	if q.Idle() {
		return false // a caller that joins now tries once more after that
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.locals[name]
	if l == nil {
		return false
	}
	l.freedLocked()
	if t := l.ticket; t != nil && (t.wokenInTurnLocked() || t.pendingLocked()) { // a ticket in flight makes its local queue try when it is published
		return true
	}
	l.wakeLocked()
	if l.ticket == nil && name.Kind() != 0 {
		q.handedOverLocked(name)
	}
	return false
}

// freedLocked records that a lock may be free. The next holder is not known.
func (l *localQueue) freedLocked() { l.owned, l.refusal = false, &hold.Busy{} }

// refused records the server's refusal of the first waiter.
func (p *position) refused(busy *hold.Busy) {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	p.local.refusal = busy
}

// try returns what the waiter's next try carries.
func (p *position) try() (t hold.Turn) {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	if t.Release, t.Handed = p.local.turn.takeLocked(); !t.Handed {
		t.Ticket, t.First = p.ticketLocked()
	}
	p.handed = t.Handed
	return t
}

// failed records that a try of the waiter failed.
func (p *position) failed() {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	if p.handed {
		p.endTurnLocked()
	}
}

// rest records whether the waiter waits to be woken.
func (p *position) rest(rests bool) {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	p.rests = rests
}

// look returns the state of the waiter: whether it is first, whether this process is known to
// have the lock, the server's last refusal, and why the wait must fail.
func (p *position) look() (first, here bool, refusal *hold.Busy, fate error) {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	l := p.local
	return p.firstLocked(), l.owned || l.refusal.Here, l.refusal, p.fate
}
