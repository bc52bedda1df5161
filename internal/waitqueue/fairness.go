package waitqueue

import (
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Processes that keep waiting for one lock get at least a quarter of an equal share of its
// grants (I7). A grant ends the ticket of its local queue, and the next caller's new ticket is
// behind those of all other processes: so between two grants to one process each other one is
// served once. Two things disturb that, and both are bounded: a woken process that does not try
// delays the others by clock.WakeTimeout; and callers of one process hand an advisory lock over
// among themselves without the queue, for handOverTime at most once others wait.

// handOverTime is for how long callers of one Locker hand an advisory lock over among
// themselves before the Locker asks the server whether other processes wait. Usually their
// notification comes within milliseconds; it may be lost, or not get through a pooler. One
// statement in that time is too little to slow down a Locker whose lock nobody else wants.
const handOverTime = 100 * time.Millisecond

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
// seen, that takes no mutex.
func (q *Queue) Contended(name lockkey.Name) bool {
	if name.Kind() != 0 && !q.seen.Load() {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.contendedLocked(name) {
		return true
	}
	delete(q.others, name)
	q.seen.Store(len(q.others) > 0)
	return false
}
