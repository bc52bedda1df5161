package pgxlock

import (
	"context"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Processes pass advisory locks on to each other here. A release costs one round trip, so it
// does not check for waiters: a waiter notifies the holder. From then on the lock is wanted,
// and its release wakes the first waiter.

// wanted is told that other processes wait for a lock that this one has, or had.
func (a *advisoryLocks) wanted(name lockkey.Name) {
	a.mu.Lock()
	h := a.held[name.ID]
	held := h != nil && h.granted
	if h != nil {
		h.wanted = true // or will be, when it is granted
	}
	// It was given back before we were told: callers here that come now would have it again
	// before a waiter that is woken. Or the server has not noticed the end of a session yet,
	// and that waiter will have us told again, at once.
	if !held {
		a.yields.begin(name.ID)
	}
	wake := !held && !a.vain.last(name.ID)
	if wake {
		a.vain.begin(name.ID)
	}
	a.mu.Unlock()
	if wake {
		a.locker.queue.freed([]lockkey.Name{name})
	}
}

// waitedFor tells for which of the keys others have a ticket. The server knows of no
// waiters, so that it would grant a share beside the readers that a writer waits for.
func (a *advisoryLocks) waitedFor(ctx context.Context, keys []string) []bool {
	a.mu.Lock()
	connected := a.session != 0
	a.mu.Unlock()
	if !connected { // where the queue is, if there is one, is found by connecting
		c := &lockCall{}
		a.wire.await(c, a.wire.submit(ctx, c))
	}
	names := make([]lockkey.Name, len(keys))
	for i, key := range keys {
		names[i] = a.name(key)
	}
	return a.locker.queue.waitedFor(ctx, names)
}

// holdID: the backend that has the lock, and its number.
func (a *advisoryLocks) holdID(lock *Lock) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.has(lock) {
		return ""
	}
	return lock.hold.id.HeldBy(a.pid)
}

// yield leaves a lock that is given back to other processes, which are woken when it
// has been. a.mu is held.
func (a *advisoryLocks) yield(h *advisoryHold) {
	a.yields.begin(h.id)
	h.back.asker = wakesNext{a.locker.queue, lockkey.Name{ID: h.id}}
}

// turns are locks that somebody has a turn for, and until when.
type turns map[lockkey.ID]time.Time

// begin begins a turn, and forgets those that are over.
func (t turns) begin(id lockkey.ID) {
	now := time.Now()
	for id, until := range t {
		if now.After(until) {
			delete(t, id)
		}
	}
	t[id] = now.Add(turnTime)
}

// last reports whether the lock's turn lasts.
func (t turns) last(id lockkey.ID) bool { return time.Now().Before(t[id]) }

// wakesNext is told that a lock was given back.
type wakesNext struct {
	queue *queue
	name  lockkey.Name
}

func (w wakesNext) answered(bool, time.Duration) { w.queue.freed([]lockkey.Name{w.name}) }
