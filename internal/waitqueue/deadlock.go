package waitqueue

import (
	"encoding/json"
	"fmt"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Callers that wait while they hold other locks may wait for each other. A ticket carries what
// its waiters hold, and pgxlock_publish_batch() looks for cycles among the tickets when it
// stores them. Its answer names the held lock whose waiter must give up.

// A heldLock is a lock that a waiter holds. Other processes know it by its id.
type heldLock struct{ id, key string }

// What one ticket says of held locks, at most: pgxlock_publish_batch() refuses more.
const (
	maxHolds     = 1000
	maxHoldBytes = 65536
)

// holdsLocked returns, as JSON, the locks that the waiters of the local queue hold meanwhile;
// nil for none. A deadlock through one that has no room is not detected, and MaxWait ends it.
func (l *localQueue) holdsLocked() *string {
	text, n := []byte{'['}, 0
	for e := l.waiters.Front(); e != nil; e = e.Next() {
		for _, held := range e.Value.(*position).holds {
			quoted, err := json.Marshal(held.id)
			if err != nil || n == maxHolds || len(text)+len(quoted)+1 > maxHoldBytes {
				continue
			}
			if n++; n > 1 {
				text = append(text, ',')
			}
			text = append(text, quoted...)
		}
	}
	if n == 0 {
		return nil
	}
	list := string(append(text, ']'))
	return &list
}

// failLocked ends the wait of the caller whose held lock, the one with this id, closes a
// deadlock.
func (l *localQueue) failLocked(id string) {
	for e := l.waiters.Front(); e != nil; e = e.Next() {
		p := e.Value.(*position)
		for _, held := range p.holds {
			if held.id == id && p.fate == nil {
				p.fate = fmt.Errorf("%w: the holder of the lock waits, directly or through others, for %s, which the caller holds", lockerr.ErrDeadlock, lockkey.Shown(held.key))
				p.signal()
				return
			}
		}
	}
}
