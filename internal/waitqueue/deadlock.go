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

// holdsLocked returns, as JSON, the locks that the waiters of the local queue hold meanwhile;
// nil for none.
func (l *localQueue) holdsLocked() *string {
	var ids []string
	for e := l.waiters.Front(); e != nil; e = e.Next() {
		for _, held := range e.Value.(*position).holds {
			ids = append(ids, held.id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	quoted, err := json.Marshal(ids)
	if err != nil {
		return nil
	}
	text := string(quoted)
	return &text
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
