package waitqueue

import (
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Processes that keep waiting for one lock get at least a quarter of an equal share of its
// turns (I7). A turn ends the ticket of its local queue, and the ticket for the next turn is
// behind those of all other processes: so between two turns of one process each other one has
// one. Two things disturb that, and both are bounded: a woken process that does not try
// delays the others by clock.WakeTimeout; and callers of one process hand an advisory lock over
// among themselves without the queue, for handOverTime at most once others wait.

// handOverTime is for how long callers of one Locker hand a lock over among themselves: in a turn
// where others wait, and otherwise an advisory lock, before the Locker asks the server whether
// other processes wait. Usually their notification comes within milliseconds; it may be lost, or
// not get through a pooler. One statement in that time is too little to slow down a Locker whose
// lock nobody else wants.
const handOverTime = 100 * time.Millisecond

// A turn serves sureInTurn of the callers that waited when it began, within handOverTime, and mostInTurn
// callers while it is younger than shortTurn. From one process to another a lock takes ten times as
// long as from one caller to the next here, so callers that keep it for a moment get many times as much
// together, and a waiter elsewhere loses little. Where they keep it for longer that gains nothing, and a
// process of one caller beside ones of many has more than a quarter of an equal share of the grants.
const (
	sureInTurn = 4
	mostInTurn = 16
	shortTurn  = 10 * time.Millisecond
)

// A turn begins with a grant to the first waiter of a local queue. Each caller that it serves releases an
// exclusive lock for the next one, and shares another at once.
type turn struct {
	left    int // how many it may still serve
	sure    int // how many of them it serves even if it is no short turn
	began   time.Time
	handed  bool // the lock is left to the first waiter, which has not tried since
	release hold.Release
}

// beginLocked begins a turn with the grant to the first waiter.
func (t *turn) beginLocked(l *localQueue) {
	*t = turn{left: mostInTurn - 1, sure: min(l.waiters.Len(), sureInTurn) - 1, began: time.Now()}
}

// goesOnLocked reports whether the turn may serve one more caller.
func (t *turn) goesOnLocked() bool {
	lasts := shortTurn
	if t.sure > 0 {
		lasts = handOverTime
	}
	return t.left > 0 && time.Since(t.began) <= lasts
}

// joinLocked leaves a lock that was granted to the next waiter as well, if both share it.
func (l *localQueue) joinLocked(granted hold.Mode) bool {
	if granted != hold.Shared || l.waiters.Front().Value.(*position).mode != hold.Shared || !l.turn.goesOnLocked() {
		return false
	}
	l.turn.leaveLocked(nil)
	return true
}

// leaveLocked leaves the lock to the first waiter.
func (t *turn) leaveLocked(release hold.Release) {
	t.left--
	t.sure--
	t.handed, t.release = true, release
}

// HandOver implements [hold.Queue].
func (q *Queue) HandOver(name lockkey.Name, release hold.Release) bool {
	if q.Idle() {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.locals[name]
	if l == nil || !l.owned || !l.turn.goesOnLocked() {
		return false
	}
	next := l.waiters.Front().Value.(*position)
	if !next.rests || next.mode != hold.Exclusive {
		return false
	}
	l.freedLocked()
	l.turn.leaveLocked(release)
	next.signal()
	return true
}

// handsOver reports whether an advisory lock that other processes want is just left from one caller here to
// the next, so that the end of the turn wakes them. Meanwhile the lock session does not have it.
func (q *Queue) handsOver(name lockkey.Name) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.locals[name]
	return l != nil && (l.turn.handed || l.waiters.Front().Value.(*position).handed) && q.contendedLocked(name)
}

// takeLocked reports whether the lock is left to the first waiter, which then tries, and finishes the
// release.
func (t *turn) takeLocked() (release hold.Release, handed bool) {
	release, handed = t.release, t.handed
	t.release, t.handed = nil, false
	return release, handed
}

// endTurnLocked ends a turn if its lock was left to the first waiter, which did not get it. It wakes the
// first of all processes: the release did not.
func (p *position) endTurnLocked() {
	release, handed := p.local.turn.takeLocked()
	if release != nil {
		release.Return()
	}
	if handed || p.handed {
		p.handed, p.local.turn.left = false, 0
		if p.queue.installed() && p.queue.removing[p.local.name] == 0 { // as Wake does
			p.queue.waking.Add(wakeUp{name: p.local.name})
		}
	}
}

// handedOverLocked records a handover of an advisory lock from one caller here to the next.
func (q *Queue) handedOverLocked(name lockkey.Name) {
	if q.closed || !q.installed() {
		return
	}
	q.handed[name] = struct{}{}
	if time.Since(q.checked) < handOverTime {
		return
	}
	q.checked = time.Now()
	for name := range q.handed {
		q.waking.Add(wakeUp{name: name, check: true})
	}
	clear(q.handed)
}

// contendedFor is how long a Locker goes on publishing tickets for an advisory lock after it
// last saw that other processes have it or wait for it. Each waiter tries once a second.
const contendedFor = 3 * clock.CheckInterval

// seeLocked records that other processes have a lock, or wait for it.
func (q *Queue) seeLocked(name lockkey.Name) {
	if name.Kind() == 0 {
		return
	}
	if len(q.others) >= q.forget { // there may be thousands: checking all of them each time takes too long
		for name := range q.others {
			if !q.contendedLocked(name) {
				delete(q.others, name)
			}
		}
		q.forget = max(2*len(q.others), batcher.MaxRows)
	}
	q.others[name] = time.Now()
	q.seen.Store(true)
}

// contendedLocked reports whether other processes were seen within contendedFor to have an
// advisory lock, or to wait for it. A Locker that is alone again needs no tickets. For a lease
// it is always true, because the server itself knows the waiters.
func (q *Queue) contendedLocked(name lockkey.Name) bool {
	return name.Kind() == 0 || time.Since(q.others[name]) < contendedFor
}

// Contended implements [hold.Queue]. Each grant of an advisory lock asks: where no other process was
// seen, and one would be heard of, that takes no mutex.
func (q *Queue) Contended(name lockkey.Name) bool {
	hears := q.Listening() || !q.installed()
	if name.Kind() != 0 && !q.seen.Load() && hears {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.contendedLocked(name) {
		return true
	}
	delete(q.others, name)
	q.seen.Store(len(q.others) > 0)
	if !hears && !q.closed {
		q.unheard.granted(q, name)
	}
	return false
}

// An unheardGrant is that of an advisory lock while nobody listens: the listener connects more slowly
// than the lock session, or it cannot. Other processes cannot say then that they wait, and callers
// here that never meet one at the lock would keep it to themselves.
type unheardGrant struct {
	name lockkey.Name
	at   time.Time
}

// granted has the server asked whether other processes wait for a lock that is granted again: for one
// lock each handOverTime at most, and rather for one that is granted often.
func (u *unheardGrant) granted(q *Queue, name lockkey.Name) {
	if time.Since(u.at) < handOverTime {
		return
	}
	if u.name == name {
		q.waking.Add(wakeUp{name: name, check: true})
	}
	u.name, u.at = name, time.Now()
}
