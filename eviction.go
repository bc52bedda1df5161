package pgxlock

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/sql"
)

// An eviction says who took a lock away and why, and how long ago. The holder of a lease
// asks for it when a renewal finds the lease gone. The lock session is notified, and then
// releases the lock.
type eviction struct {
	error
	age time.Duration
}

// evictNotice is the payload of the notification after which a Locker checks whether its
// advisory locks were evicted.
const evictNotice = "evict"

// evictions asks which of these holds were evicted, and returns the evictions by index.
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

// whyGone asks why renewals found leases gone. Without an answer the leases are lost all the
// same.
func (t *leaseTable) whyGone(ctx context.Context, q dbconn.Querier, names, holders []string, tokens []int64) map[int]eviction {
	found, err := evictions(ctx, &t.place, q, make([]int32, len(names)), names, holders, tokens)
	if err != nil {
		t.locker.log.Debug("pgxlock: cannot ask who evicted the holder of a lease", "error", err)
	}
	return found
}

// evicted is called on an evictNotice.
func (a *advisoryLocks) evicted() { a.evicting.Add(struct{}{}) }

// lookEvicted releases the locks whose holders were evicted. An eviction that is older than
// the acquisition was meant for the holder before. Both ages are measured so that in doubt
// we keep the lock; the evictor retries.
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
			_ = lock.lose(why.error) // a lock that has ended already stays as it is
		}
	}
	return nil
}
