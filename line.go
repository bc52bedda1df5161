package pgxlock

import (
	"container/list"
	"sync"
	"sync/atomic"

	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Callers of one Locker who wait for the same lock form a line: first come, first served. Only
// the first one asks for the lock. The next one asks when the first has given up, or when the
// lock was released.

// lines are those of one Locker.
type lines struct {
	count atomic.Int32 // most calls find none, and need not look for theirs

	mu     sync.Mutex
	of     map[lockkey.Name]*line
	handed func(lockkey.Name) // is called when a lock goes to the next caller here, and no ticket says that others wait; may be nil
}

// A line exists while somebody stands in it.
type line struct {
	name   lockkey.Name
	places list.List  // of *waiter
	said   *busyError // what the server said last; shared by those who have not asked
	owned  bool       // whoever was in front has the lock exclusively: freed tells when that is over
	ticket *ticket    // its place among the processes; nil: it has none
}

// A waiter is one caller who stands in a line.
type waiter struct {
	lines *lines
	line  *line
	at    *list.Element
	mode  Mode          // in which it wants the lock
	holds []hold        // what its caller holds meanwhile
	turn  chan struct{} // has room for one signal: it is in front, and should ask
	asked bool          // since it stands here
	sent  int           // how often its line's ticket had been sent when it asked
	fate  error         // why its wait makes no sense; lines.mu guards it
}

// A hold is what other processes know a lock by that is held.
type hold struct{ id, key string }

// exists reports whether somebody waits for that lock.
func (ls *lines) exists(name lockkey.Name) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.of[name] != nil
}

// writerWaits returns what the server said last to those who wait for a lock, if one of
// them wants it exclusively; else nil.
func (ls *lines) writerWaits(name lockkey.Name) *busyError {
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
		if e.Value.(*waiter).mode == Exclusive {
			return l.said
		}
	}
	return nil
}

// said returns what the server said last to those who wait for that lock; nil if nobody does,
// or nothing that still counts was said.
func (ls *lines) said(name lockkey.Name) *busyError {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if l := ls.of[name]; l != nil && *l.said != (busyError{}) {
		return l.said
	}
	return nil
}

// join takes the last place of a line. It makes one if said tells that the lock is
// busy; else it returns nil where there is none.
func (ls *lines) join(name lockkey.Name, said *busyError, holds []hold, mode Mode) *waiter {
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

// leave gives the place up without the lock.
func (p *waiter) leave() {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	front := p.first()
	if !p.remove() {
		return
	}
	if t := p.line.ticket; t != nil && len(p.holds) > 0 {
		t.queue.add(t) // it does not wait any more with those in hand
	}
	if front {
		p.line.wake()
	}
}

// granted gives the place up with the lock, for which it asked with that ticket. owned
// says that nobody else can have the lock before freed is called.
func (p *waiter) granted(number int64, owned bool) {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	t := p.line.ticket
	if t != nil {
		t.spend(number, p.sent)
	}
	if !p.remove() {
		return
	}
	p.line.owned = owned
	if t != nil && t.queue.contended(p.line.name) { // others will want their turn, too: the next one's counts from now on
		t.queue.enter(p.line)
	}
	if !owned {
		p.line.wake()
	}
}

// remove takes the place out of its line, and reports whether others stand there.
func (p *waiter) remove() bool {
	l := p.line
	l.places.Remove(p.at)
	if l.places.Len() > 0 {
		return true
	}
	delete(p.lines.of, l.name)
	p.lines.count.Add(-1)
	if l.ticket != nil {
		l.ticket.withdraw()
	}
	return false
}

// first reports whether the place is in front; lines.mu is held, or the answer may be
// out of date unless it is true: who is in front stays there.
func (p *waiter) first() bool { return p.line.places.Front() == p.at }

// wake tells the one in front to ask; lines.mu is held.
func (l *line) wake() { l.places.Front().Value.(*waiter).signal() }

// signal makes the waiter look how it stands.
func (p *waiter) signal() {
	select {
	case p.turn <- struct{}{}:
	default: // it will
	}
}

// freed tells that the lock may be free. It reports whether those who wait here have a
// place among the processes, so that they ask only when they are woken as the first of
// all: somebody has to see to that, when the lock has been given back.
func (ls *lines) freed(name lockkey.Name) (queued bool) {
	if ls.count.Load() == 0 {
		return false // who joins now asks when it has joined
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.of[name]
	if l == nil {
		return false
	}
	l.owned, l.said = false, &busyError{}                     // nobody knows who is next
	if t := l.ticket; t != nil && (t.told() || t.pending()) { // who is being published asks then
		return true
	}
	l.wake()
	if ls.handed != nil && l.ticket == nil {
		ls.handed(name)
	}
	return false
}

// tell keeps what the server said to the one in front.
func (p *waiter) tell(busy *busyError) {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	p.line.said = busy
}

// look returns how it stands with the place: whether it is in front, whether what
// keeps the lock from it is known to be in this process, what the server said last, and
// why there is no sense in waiting.
func (p *waiter) look() (first, here bool, said *busyError, fate error) {
	p.lines.mu.Lock()
	defer p.lines.mu.Unlock()
	l := p.line
	return p.first(), l.owned || l.said.here, l.said, p.fate
}
