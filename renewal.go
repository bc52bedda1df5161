package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// maxRenewals bounds a statement that renews.
const maxRenewals = 1000

// A renewer keeps the leases of a Locker alive: all those of one TTL together,
// on a connection of its own, so that neither the number of leases nor requests
// under way can delay a renewal beyond its deadline.
type renewer struct {
	table *leaseTable

	mu      sync.Mutex
	classes map[time.Duration]*renewalClass // by TTL
	stopped bool
}

// renewalClass is the leases of one TTL.
type renewalClass struct {
	ttl   time.Duration
	every time.Duration
	locks map[*Lock]struct{}
	timer *time.Timer
}

func (r *renewer) add(lock *Lock) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return
	}
	class := r.classes[lock.ttl]
	if class == nil {
		class = &renewalClass{ttl: lock.ttl, every: lock.ttl / 3, locks: make(map[*Lock]struct{})}
		if lock.ttl == r.table.cfg.TTL {
			class.every = r.table.cfg.Renew
		}
		class.timer = time.AfterFunc(class.every, func() { r.tick(class) })
		r.classes[lock.ttl] = class
	}
	class.locks[lock] = struct{}{}
}

func (r *renewer) remove(lock *Lock) {
	r.mu.Lock()
	defer r.mu.Unlock()
	class := r.classes[lock.ttl]
	if class == nil {
		return
	}
	delete(class.locks, lock)
	if len(class.locks) == 0 {
		class.timer.Stop()
		delete(r.classes, lock.ttl)
	}
}

func (r *renewer) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopped = true
	for ttl, class := range r.classes {
		class.timer.Stop()
		delete(r.classes, ttl)
	}
}

// keeps reports whether the lock is still to be renewed.
func (r *renewer) keeps(lock *Lock) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	class := r.classes[lock.ttl]
	if class == nil {
		return false
	}
	_, ok := class.locks[lock]
	return ok
}

// tick renews a class, in the order of the keys, and sets the next tick.
func (r *renewer) tick(class *renewalClass) {
	started := time.Now()
	r.mu.Lock()
	locks := make([]*Lock, 0, len(class.locks))
	for lock := range class.locks {
		locks = append(locks, lock)
	}
	r.mu.Unlock()
	slices.SortFunc(locks, func(a, b *Lock) int { return cmp.Compare(a.key, b.key) })
	for batch := range slices.Chunk(locks, maxRenewals) {
		r.renew(batch)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.classes[class.ttl] == class {
		class.timer.Reset(max(class.every-time.Since(started), 0))
	}
}

// renew renews a batch, and tries again soon what was not settled: all of it if
// the server was not reached, and alone what somebody has locked, so that it
// costs no other lease its renewal.
func (r *renewer) renew(batch []*Lock) {
	unsettled, err := r.send(batch)
	if err != nil {
		r.table.locker.log.Warn("pgxlock: renewal failed", "leases", len(batch), "error", err)
		r.again(unsettled)
		return
	}
	for _, lock := range unsettled {
		r.again([]*Lock{lock})
	}
}

// again renews what is then still held, a little later.
func (r *renewer) again(batch []*Lock) {
	if len(batch) == 0 {
		return
	}
	time.AfterFunc(withJitter(retryDelay(batch[0])), func() {
		batch = slices.DeleteFunc(batch, func(lock *Lock) bool { return !r.keeps(lock) })
		if len(batch) > 0 {
			r.renew(batch)
		}
	})
}

// retryDelay leaves time for several attempts before the deadline.
func retryDelay(lock *Lock) time.Duration {
	return min(max(lock.ttl/20, 25*time.Millisecond), time.Second)
}

// now renews one lock at a caller's wish.
func (r *renewer) now(ctx context.Context, lock *Lock) error {
	for {
		settled := make(chan bool, 1)
		failed := make(chan error, 1)
		go func() {
			if unsettled, err := r.send([]*Lock{lock}); err != nil {
				failed <- err
			} else {
				settled <- len(unsettled) == 0
			}
		}()
		select {
		case err := <-failed:
			return err
		case ok := <-settled:
			if err := lock.Err(); ok || err != nil {
				return err
			}
		case <-ctx.Done():
			return contextError(ctx)
		}
		if !sleep(ctx, retryDelay(lock)) { // somebody has its row locked
			return contextError(ctx)
		}
	}
}

// send renews a batch in one statement. It returns the locks that are neither
// renewed nor lost.
func (r *renewer) send(batch []*Lock) (unsettled []*Lock, err error) {
	names := make([]string, len(batch))
	holders := make([]string, len(batch))
	tokens := make([]int64, len(batch))
	ttls := make([]int64, len(batch))
	for i, lock := range batch {
		names[i], holders[i], tokens[i], ttls[i] = lock.key, lock.holder, lock.token, lock.ttl.Milliseconds()
	}
	var outcomes []string
	var sent time.Duration
	t := r.table
	patience := min(max(batch[0].ttl/3, 500*time.Millisecond), ioTimeout) // else one lost answer would cost the lease
	err = t.do(t.renewals, patience, func(ctx context.Context, conn *pgx.Conn, _ bool) (err error) {
		sent = t.locker.now()
		rows, _ := conn.Query(ctx, statement("renew", t.place.schema), names, holders, tokens, ttls) // CollectRows returns the error
		outcomes, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err == nil && len(outcomes) != len(batch) {
		err = errors.New("the server answered for other leases than it was asked for")
	}
	if err != nil {
		return batch, err
	}
	for i, lock := range batch {
		switch outcomes[i] {
		case outcomeRenewed:
			_ = lock.renewed(sent)
		case outcomeGone:
			_ = lock.lose("the server says that it expired, was released or was taken over")
		default:
			unsettled = append(unsettled, lock)
		}
	}
	return unsettled, nil
}
