package advisory

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// withdrawLocked takes a hold out of its entry, and returns the call that releases the lock.
// While other holds share the lock, that call has no requests. withdrawLocked returns nil if
// the hold is in no entry.
func (a *Locks) withdrawLocked(lock *hold.Hold) *call {
	e, i := a.entryOfLocked(lock)
	if e == nil {
		return nil
	}
	e.holds = slices.Delete(e.holds, i, i+1)
	if e.unused() {
		return a.removeLocked(e)
	}
	if a.cfg.Tokens && e.mode == hold.Exclusive { // a fence may be open: calls that wait for the answer must ask the server themselves
		e.failed = a.busyLocked(e)
		return a.removeLocked(e)
	}
	return &call{bound: true}
}

// Release implements [hold.Backend].
func (a *Locks) Release(lock *hold.Hold) error {
	a.mu.Lock()
	c := a.withdrawLocked(lock)
	if c == nil {
		a.mu.Unlock()
		return fmt.Errorf("%w: %w", lockerr.ErrLost, lockerr.ErrSessionEnded)
	}
	// If other holds share the lock, c releases nothing, but its answer shows whether the session
	// still lives.
	leads := a.mux.submit(context.Background(), c)
	a.mu.Unlock()
	a.mux.await(c, leads)
	switch {
	case errors.Is(c.err, lockerr.ErrSessionEnded):
		return fmt.Errorf("%w: %w", lockerr.ErrLost, c.err)
	case c.err != nil:
		return nil // a statement that failed is undone, which releases the lock
	case len(c.asks) > 0 && !c.answers[0].granted:
		return fmt.Errorf("%w: the server says that the lock was not held", lockerr.ErrLost)
	}
	return nil
}

// Discard implements [hold.Backend].
func (a *Locks) Discard(lock *hold.Hold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.withdrawLocked(lock); c != nil && len(c.asks) > 0 {
		a.mux.do(c)
	}
}

// Drop implements [hold.Backend]. It releases a lock that is lost while its session lives,
// because its deadline passed between two answers of the server.
func (a *Locks) Drop(lock *hold.Hold, lost bool) {
	if lost {
		a.Discard(lock)
	}
}

// removeLocked removes an entry, and returns the call that releases its lock. The caller submits
// that call before it unlocks a.mu, unless the session has ended.
func (a *Locks) removeLocked(e *entry) *call {
	a.dropLocked(e.id)
	e.granted = false
	name := lockkey.Name{ID: e.id}
	handed := a.host.Queue.HandOver(name, a)
	if !handed && (a.host.Queue.Freed(name) || e.wanted) {
		a.yieldLocked(e)
	}
	// Where nobody is known to want it, callers elsewhere that poll find it free for a moment each time.
	e.back.joins = handed && e.wanted
	e.ask1[0] = e.unlock()
	e.back.bound, e.back.asks = true, e.ask1[:]
	return &e.back
}

// dropLocked removes an entry. A notification of a waiter may still be on its way. Later than
// knownFor it changes nothing: the waiter has published its ticket again, and tried.
func (a *Locks) dropLocked(id lockkey.ID) {
	delete(a.held, id)
	a.known.Forget(id, knownFor)
}

const knownFor = clock.CheckInterval + clock.CheckInterval/4 // the longest that clock.Jitter makes of it
