package advisory

import (
	"context"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Where callers here and elsewhere wait for a lock, and it is still the turn of those here, its release waits
// in the mux's queue for the try of the next one, and goes in the same message.

// Return implements [hold.Release]. From the handover on a.mu is locked until the release is queued.
func (a *Locks) Return() {
	go func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.mux.rouse()
	}()
}

// Had reports, without a mutex, whether this process has a lock, requests it, or had it within
// knownFor.
func (a *Locks) Had(id lockkey.ID) bool { return a.known.Has(id) }

// Wanted is called when other processes wait for a lock that this one has, or had. A release
// costs one round trip, so it does not check for waiters: a waiter notifies the holder. From
// then on the lock is wanted, and its release wakes the first waiter.
func (a *Locks) Wanted(name lockkey.Name) {
	a.mu.Lock()
	e := a.held[name.ID]
	held := e != nil && e.granted
	if e != nil {
		e.wanted = true // or will be, when it is granted
	}
	// The lock was released before the notification arrived: without a yield, callers here would
	// acquire it again before the waiter that is woken. Or the server has not noticed the end of
	// a session yet; then that waiter has us notified again, at once.
	if !held {
		a.yielded.begin(name.ID)
	}
	wake := !held && !a.wakes.last(name.ID)
	if wake {
		a.wakes.begin(name.ID)
	}
	a.mu.Unlock()
	if wake {
		a.host.Queue.Wake([]lockkey.Name{name})
	}
}

// WakesOnRelease reports whether this process has a lock exclusively that others wait for.
func (a *Locks) WakesOnRelease(id lockkey.ID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.held[id]
	return e != nil && e.granted && e.wanted && e.mode == hold.Exclusive
}

// waitedFor reports for which of the locks other processes have a ticket. A try for a shared
// lock needs to know, because the server knows no tickets: it would let the caller join the
// readers that a writer waits for.
func (a *Locks) waitedFor(ctx context.Context, attempts []hold.Attempt) []bool {
	a.mu.Lock()
	connected := a.session != 0
	a.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, dbconn.Timeout)
	defer cancel()
	if !connected { // connecting finds the queue, if there is one
		c := &call{closing: a.host.Closing.Done()}
		a.mux.await(c, a.mux.submit(ctx, c))
	}
	names := make([]lockkey.Name, len(attempts))
	for i := range attempts {
		names[i] = attempts[i].Hold.Queue
	}
	return a.host.Queue.WaitedFor(ctx, names)
}

// ID implements [hold.Backend]. It returns the backend that has the lock, and the number of the lock.
func (a *Locks) ID(lock *hold.Hold) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if e, _ := a.entryOfLocked(lock); e == nil {
		return ""
	}
	return lock.Queue.ID.HeldBy(a.pid)
}

// yieldLocked leaves a lock that is being released to other processes, which are woken after
// the release.
func (a *Locks) yieldLocked(e *entry) {
	a.yielded.begin(e.id)
	e.back.asker = wakesNext{a.host.Queue, lockkey.Name{ID: e.id}}
}

// turns are locks with the end of a wake timeout that runs for each.
type turns map[lockkey.ID]time.Time

// begin begins a wake timeout. It removes those that are over, of a few that it checks: there
// may be thousands.
func (t turns) begin(id lockkey.ID) {
	now, checks := time.Now(), 4
	for id, until := range t {
		if now.After(until) {
			delete(t, id)
		}
		if checks--; checks == 0 {
			break
		}
	}
	t[id] = now.Add(clock.WakeTimeout)
}

// last reports whether the lock's wake timeout still runs.
func (t turns) last(id lockkey.ID) bool {
	until, runs := t[id]
	return runs && time.Now().Before(until)
}

// wakesNext wakes the next waiter after the answer to a release.
type wakesNext struct {
	queue hold.Queue
	name  lockkey.Name
}

func (w wakesNext) answered(bool, instant) { w.queue.Wake([]lockkey.Name{w.name}) }
