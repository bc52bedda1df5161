package pgxlock

import (
	"fmt"
	"time"
)

// This file is how advisory locks are passed on between processes. A release costs as
// much as a round trip, so that it does not look who waits: who waits tells the
// holder. From then on the lock is wanted, and its release wakes the first who waits.

// wanted is told that other processes wait for a lock that this one has, or had.
func (a *advisoryLocks) wanted(name lockName) {
	a.mu.Lock()
	h := a.held[name.id]
	held := h != nil && h.granted
	if held {
		h.wanted = true
	}
	// It was given back before we were told. Or the server has not noticed the end of
	// a session yet, and whoever is woken will have us told again, at once.
	wake := !held && !time.Now().Before(a.vain[name.id])
	if wake {
		now := time.Now()
		for id, until := range a.vain {
			if now.After(until) {
				delete(a.vain, id)
			}
		}
		a.vain[name.id] = now.Add(turnTime)
	}
	a.mu.Unlock()
	if wake {
		a.locker.queue.freed([]lockName{name})
	}
}

// holdID: the backend that has the lock, and its number.
func (a *advisoryLocks) holdID(lock *Lock) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.has(lock) {
		return ""
	}
	return fmt.Sprintf("advisory:%d:%d:%d", a.pid, lock.hold.id.space(), lock.hold.id.number)
}

// yield leaves a lock that is given back to other processes, which are woken when it
// has been. a.mu is held.
func (a *advisoryLocks) yield(h *advisoryHold) {
	now := time.Now()
	if a.yields == nil {
		a.yields = make(map[advisoryID]time.Time)
	}
	for id, until := range a.yields {
		if now.After(until) {
			delete(a.yields, id)
		}
	}
	a.yields[h.id] = now.Add(turnTime)
	h.back.asker = wakesNext{a.locker.queue, lockName{id: h.id}}
}

// yielded reports whether others come first. a.mu is held.
func (a *advisoryLocks) yielded(id advisoryID) bool {
	until, ok := a.yields[id]
	return ok && time.Now().Before(until)
}

// wakesNext is told that a lock was given back.
type wakesNext struct {
	queue *queue
	name  lockName
}

func (w wakesNext) answered(bool, time.Duration) { w.queue.freed([]lockName{w.name}) }
