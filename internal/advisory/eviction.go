package advisory

import (
	"context"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
)

// Evicted is called when an operator may have evicted the holder of one of the locks.
func (a *Locks) Evicted() { a.evicting.Add(struct{}{}) }

// lookEvicted releases the locks whose holders were evicted. An eviction that is older than
// the acquisition was meant for the holder before. Both ages are measured so that in doubt
// we keep the lock; the evictor retries.
func (a *Locks) lookEvicted([]struct{}) error {
	var kinds []int32
	var names, holders []string
	var locks []*hold.Hold
	for _, lock := range a.all() {
		if id := a.ID(lock); id != "" {
			name := lock.Queue
			kinds, names, holders, locks = append(kinds, int32(name.Kind())), append(names, name.Text()), append(holders, id), append(locks, lock)
		}
	}
	if len(locks) == 0 {
		return nil
	}
	var found map[int]hold.Eviction
	asked := time.Now()
	err := a.queueing.DoWithin(dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		found, err = hold.Evictions(ctx, &a.place, q, kinds, names, holders, make([]int64, len(locks)))
		return err
	})
	if err != nil {
		a.host.Log.Warn("pgxlock: cannot ask which locks were evicted", "error", err)
		return nil
	}
	for i, why := range found {
		if lock := locks[i]; why.Age+time.Millisecond < asked.Sub(lock.Since) {
			a.host.Log.Warn("pgxlock: a lock was evicted", "key", lock.Key, "error", why.Err)
			_ = lock.Lose(why.Err) // a lock that has ended already stays as it is
		}
	}
	return nil
}
