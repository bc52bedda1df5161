package advisory

import (
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A Locker publishes the names of its advisory locks for people, because the server knows
// only their numbers. That costs an acquire nothing: the listener publishes them from time to
// time, and only names of locks that are held for long.
const (
	// nameAfter is how long a lock is held before its name is published.
	nameAfter = 2 * time.Second

	// nameAgain is how often it is published again. The table forgets it after an hour.
	nameAgain = 20 * time.Minute

	// maxNames is how many names one statement publishes.
	maxNames = 100
)

// Unpublished returns the keys of locks that were held for nameAfter, and whose names were
// not published within nameAgain.
func (a *Locks) Unpublished() []string {
	now, clock := time.Now(), a.host.Clock()
	var names []string
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.held {
		if len(names) == maxNames {
			break
		}
		if !e.granted || len(e.holds) == 0 || now.Sub(e.holds[0].Since) < nameAfter || e.named != 0 && clock-e.named < nameAgain {
			continue
		}
		e.named = clock
		if key := lockkey.In(a.cfg.Namespace, e.holds[0].Key); !lockkey.IsNumber(key) {
			names = append(names, key)
		}
	}
	return names
}
