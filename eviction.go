package pgxlock

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/sql"
)

// This file is how a holder hears that it was evicted: whoever has a lease asks when a
// renewal finds it gone; the session of advisory locks is told, and gives them back.

// evictNotice is what the session of advisory locks is told.
const evictNotice = "evict"

// An eviction is who took a lock away and why, and how long ago.
type eviction struct {
	error
	age time.Duration
}

// evictions asks which of these holdings were evicted; by their places.
func evictions(ctx context.Context, in *dbconn.Installation, q dbconn.Querier, kinds []int32, names, holders []string, tokens []int64) (map[int]eviction, error) {
	type row struct {
		N       int64
		By, Why string
		MS      int64
	}
	rows, err := pgx.CollectRows(q.Query(ctx, in.Statement(statements.EvictReasons), kinds, names, holders, tokens), pgx.RowToStructByPos[row])
	found := make(map[int]eviction, len(rows))
	for _, r := range rows {
		if r.N < 1 || r.N > int64(len(names)) {
			continue
		}
		found[int(r.N-1)] = eviction{fmt.Errorf("%w by %s: %s", ErrEvicted, r.By, r.Why), time.Duration(r.MS) * time.Millisecond}
	}
	return found, err
}

// whyGone asks why renewals found leases gone. That it cannot be known changes nothing.
func (t *leaseTable) whyGone(ctx context.Context, q dbconn.Querier, names, holders []string, tokens []int64) map[int]eviction {
	found, err := evictions(ctx, &t.place, q, make([]int32, len(names)), names, holders, tokens)
	if err != nil {
		t.locker.log.Debug("pgxlock: cannot ask who evicted the holder of a lease", "error", err)
	}
	return found
}

// evicted is told that locks of the session were asked for.
func (a *advisoryLocks) evicted() { a.evicting.Add(struct{}{}) }

// lookEvicted gives back the locks that were asked for. A request that is older than an
// acquisition was for who had the lock before: both ages are measured so that a doubt
// leaves the lock alone, and who asks goes on asking.
func (a *advisoryLocks) lookEvicted([]struct{}) error {
	var kinds []int32
	var names, holders []string
	var locks []*Lock
	for _, lock := range a.all() {
		if id := a.holdID(lock); id != "" {
			name := a.name(lock.key)
			kinds, names, holders, locks = append(kinds, int32(name.Kind())), append(names, name.Text()), append(holders, id), append(locks, lock)
		}
	}
	if len(locks) == 0 {
		return nil
	}
	var found map[int]eviction
	asked := time.Now()
	err := a.locker.queue.run(func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		found, err = evictions(ctx, &a.place, q, kinds, names, holders, make([]int64, len(locks)))
		return err
	})
	if err != nil {
		a.locker.log.Warn("pgxlock: cannot ask which locks were taken away", "error", err)
		return nil
	}
	for i, why := range found {
		if lock := locks[i]; why.age+time.Millisecond < asked.Sub(lock.since) {
			a.locker.log.Warn("pgxlock: a lock is taken away", "key", lock.key, "error", why.error)
			_ = lock.lose(why.error) // one that has ended stays so
		}
	}
	return nil
}
