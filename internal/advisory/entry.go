package advisory

import (
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// An entry is a lock that the lock session has or requests, for one or many holds.
type entry struct {
	id      lockkey.ID
	mode    hold.Mode
	granted bool
	wanted  bool          // other processes wait for it
	pending int32         // callers whose answer has not arrived
	token   int64         // of the grant: all holds that share the lock have this token
	failed  error         // why callers that wait for its answer fail
	holds   []*hold.Hold  // one, or many that share the lock
	named   time.Duration // when its name was published; 0: it was not

	one  [1]*hold.Hold // room for holds
	back call          // the call that releases it
	ask1 [1]ask        // the request in back
}

// ask returns the request for the mode of the lock.
func (e *entry) ask(exclusive, shared lockkey.Ask) ask {
	if e.mode == hold.Shared {
		return ask{shared, e.id}
	}
	return ask{exclusive, e.id}
}

func (e *entry) try() ask    { return e.ask(lockkey.AskTry, lockkey.AskTryShared) }
func (e *entry) unlock() ask { return e.ask(lockkey.AskUnlock, lockkey.AskUnlockShared) }

// admits reports whether a hold of that mode may join the entry.
func (e *entry) admits(mode hold.Mode) bool {
	return mode == e.mode && (mode == hold.Shared || len(e.holds) == 0)
}

// unused reports whether the entry has no holds and no caller waits for its answer.
func (e *entry) unused() bool { return len(e.holds) == 0 && e.pending == 0 }

// entryOfLocked returns the entry of a hold, and the hold's index in it. It returns nil if the
// session does not have the lock for that hold.
func (a *Locks) entryOfLocked(lock *hold.Hold) (e *entry, at int) {
	if e = a.held[lock.Queue.ID]; e == nil || !e.granted {
		return nil, 0
	}
	if at = slices.Index(e.holds, lock); at < 0 {
		return nil, 0
	}
	return e, at
}
