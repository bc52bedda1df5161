package pgxlock

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Callers of one Locker that wait for the same lock form a local queue, a line: first come,
// first served. Only the first waiter tries to acquire the lock. The next one tries when the
// first has given up, or when the lock was released.

// lines are the local queues of one Locker.
type lines struct {
	count atomic.Int32 // of queues; most calls read 0 here and skip the mutex

	mu    sync.Mutex // guards what follows, the lines and their waiters
	of    map[lockkey.Name]*line
	queue *queue // counts handovers of advisory locks from a caller here to the next one; may be nil
}

// A line is the local queue for one lock. It exists while it has waiters.
type line struct {
	name   lockkey.Name
	places list.List  // of *waiter
	said   *hold.Busy // the server's last refusal, also for waiters that have not tried yet
	owned  bool       // a former first waiter has the lock exclusively, until Freed
	ticket *ticket    // its position among the processes; nil: none
}

// A waiter is one caller in a line.
type waiter struct {
	lines *lines
	line  *line
	at    *list.Element
	mode  hold.Mode     // in which it wants the lock
	holds []heldLock    // what its caller holds meanwhile
	turn  chan struct{} // has room for one signal: the waiter is first, and should try
	asked bool          // it has tried since it joined; its caller's goroutine alone uses it
	sent  int           // how often its line's ticket had been sent before its last try
	fate  error         // why its wait must fail; nil: it need not
}

// A heldLock is a lock that a waiter holds. Other processes know it by its id.
type heldLock struct{ id, key string }

// exists reports whether callers wait for the lock.
func (ls *lines) exists(name lockkey.Name) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.of[name] != nil
}

// writerWaits returns the server's last refusal of the waiters for a lock, if one of them
// wants the lock exclusively, and nil otherwise.
func (ls *lines) writerWaits(name lockkey.Name) *hold.Busy {
	if ls.count.Load() == 0 {
		return nil
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.of[name]
	if l == nil {
		return nil
	}
	for e := l.places.Front(); e != nil; e = e.Next() {
		if e.Value.(*waiter).mode == hold.Exclusive {
			return l.said
		}
	}
	return nil
}

// said returns the server's last refusal of the waiters for a lock. It returns nil if there
// are no waiters, or if the lock may have been freed since.
func (ls *lines) said(name lockkey.Name) *hold.Busy {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if l := ls.of[name]; l != nil && *l.said != (hold.Busy{}) {
		return l.said
	}
	return nil
}

// join adds a waiter at the end of a line. Where there is no line, it makes one if said is not
// nil, and otherwise returns nil.
func (ls *lines) join(name lockkey.Name, said *hold.Busy, holds []heldLock, mode hold.Mode) *waiter {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.of[name]
	if l == nil {
		if said == nil {
			return nil
		}
		if ls.of == nil {
			ls.of = make(map[lockkey.Name]*line)
		}
		l = &line{name: name, said: said}
		ls.of[name] = l
		ls.count.Add(1)
	}
	p := &waiter{lines: ls, line: l, mode: mode, holds: holds, turn: make(chan struct{}, 1)}
	p.at = l.places.PushBack(p)
	return p
}

// leave removes a waiter that gave up.
func (p *waiter) leave() {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	first := p.firstLocked()
	if !p.removeLocked() {
		return
	}
	if t := p.line.ticket; t != nil && len(p.holds) > 0 {
		t.queue.addLocked(t) // the locks that this caller holds do not wait any more
	}
	if first {
		p.line.wakeLocked()
	}
}

// granted removes a waiter that has the lock, after a try with that ticket. owned: no other
// caller can have the lock before Freed is called.
func (p *waiter) granted(number int64, owned bool) {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	t := p.line.ticket
	if t != nil {
		t.spendLocked(number, p.sent)
	}
	if !p.removeLocked() {
		return
	}
	p.line.owned = owned
	if t != nil && t.queue.contendedLocked(p.line.name) { // other processes wait as well: the next waiter's position counts from now on
		t.queue.enterLocked(p.line)
	}
	if !owned {
		p.line.wakeLocked()
	}
}

// removeLocked removes the waiter from its line, and reports whether others are left there.
func (p *waiter) removeLocked() bool {
	l := p.line
	l.places.Remove(p.at)
	if l.places.Len() > 0 {
		return true
	}
	delete(p.lines.of, l.name)
	p.lines.count.Add(-1)
	if l.ticket != nil {
		l.ticket.withdrawLocked()
	}
	return false
}

// firstLocked reports whether the waiter is first in its line. A waiter that is first stays
// first.
func (p *waiter) firstLocked() bool { return p.line.places.Front() == p.at }

// wakeLocked wakes the first waiter.
func (l *line) wakeLocked() { l.places.Front().Value.(*waiter).signal() }

// signal wakes the waiter, which then checks whether to try.
func (p *waiter) signal() {
	select {
	case p.turn <- struct{}{}:
	default: // it has a signal already
	}
}

// Freed wakes the first waiter of a lock, which may be free. If the line has a ticket, it
// returns true and wakes no waiter: that ticket's turn decides when the first waiter tries, so
// the caller must wake the tickets after the release.
func (ls *lines) Freed(name lockkey.Name) (queued bool) {
	if ls.count.Load() == 0 {
		return false // a caller that joins now tries once more after that
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.of[name]
	if l == nil {
		return false
	}
	l.owned, l.said = false, &hold.Busy{}                                        // the next holder is not known
	if t := l.ticket; t != nil && (t.wokenInTurnLocked() || t.pendingLocked()) { // a ticket in flight makes its line try when it is published
		return true
	}
	l.wakeLocked()
	if ls.queue != nil && l.ticket == nil && name.Kind() != 0 {
		ls.queue.handedOverLocked(name)
	}
	return false
}

// tell records the server's refusal of the first waiter.
func (p *waiter) tell(busy *hold.Busy) {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	p.line.said = busy
}

// look returns the state of the waiter: whether it is first, whether this process is known to
// have the lock, the server's last refusal, and why the wait must fail.
func (p *waiter) look() (first, here bool, said *hold.Busy, fate error) {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	l := p.line
	return p.firstLocked(), l.owned || l.said.Here, l.said, p.fate
}
