package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// maxRenewals bounds a statement that renews.
const maxRenewals = 1000

// A renewer keeps the leases of a Locker alive: all those of one TTL together,
// on a connection of its own, so that neither the number of leases nor requests
// under way can delay a renewal beyond its deadline.
type renewer struct {
	table   *leaseTable
	sending batcher.Batcher[renewal]

	mu       sync.Mutex
	classes  map[time.Duration]*renewalClass // by TTL
	retrying map[*Lock]struct{}              // not settled, and soon tried again
	stopped  bool
}

// renewalClass is the leases of one TTL.
type renewalClass struct {
	ttl   time.Duration
	every time.Duration
	locks map[*Lock]struct{}
	timer *time.Timer
}

// renewal is one renewal under way.
type renewal struct {
	lock   *Lock
	answer chan<- error // nil if nobody waits for it; has room for the answer
}

// errTakenAway means that the lease is somebody else's, or nobody's.
var errTakenAway = errors.New("the server says that it expired, was released or was taken over")

// errRowLocked means that somebody keeps the row of a lease locked.
var errRowLocked = errors.New("the row of the lease is locked by another transaction")

func newRenewer(t *leaseTable) *renewer {
	r := &renewer{table: t, classes: make(map[time.Duration]*renewalClass), retrying: make(map[*Lock]struct{})}
	r.sending = batcher.Batcher[renewal]{Limit: maxRenewals, Run: r.send, Fail: r.fail}
	return r
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

// tick renews a class and sets its next tick.
func (r *renewer) tick(class *renewalClass) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.classes[class.ttl] != class {
		return
	}
	due := make([]renewal, 0, len(class.locks))
	for lock := range class.locks {
		due = append(due, renewal{lock: lock})
	}
	r.sending.Add(due...)
	class.timer.Reset(class.every)
}

// soon renews a lock without waiting for the answer.
func (r *renewer) soon(lock *Lock) { r.sending.Add(renewal{lock: lock}) }

// renew renews a lock at a caller's wish.
func (r *renewer) renew(ctx context.Context, lock *Lock) error {
	for {
		answer := make(chan error, 1)
		r.sending.Add(renewal{lock, answer})
		select {
		case err := <-answer:
			if !errors.Is(err, errRowLocked) {
				return err
			}
		case <-ctx.Done():
			return lockerr.ContextError(ctx)
		}
		if !clock.Sleep(ctx, retryDelay(lock)) {
			return lockerr.ContextError(ctx)
		}
	}
}

// patience is how long an exchange may take, so that there is time for another
// before the first deadline of all leases that wait for it.
func (r *renewer) patience() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	patience := dbconn.Timeout
	for ttl := range r.classes {
		patience = min(patience, ttl/2)
	}
	return patience
}

// send renews a batch, those of one mode in one statement.
func (r *renewer) send(batch []renewal) error {
	return inModes(batch, func(entry renewal) Mode { return entry.lock.mode }, r.sendAs, r.fail)
}

func (r *renewer) sendAs(mode Mode, batch []renewal) error {
	var locks []*Lock
	var asked []renewal
	waiting := make(map[*Lock][]chan<- error, len(batch))
	for _, entry := range batch {
		if err := entry.lock.Err(); err != nil { // it ended while the entry stood in the queue
			tell([]chan<- error{entry.answer}, err)
			continue
		}
		asked = append(asked, entry)
		if _, ok := waiting[entry.lock]; !ok {
			locks = append(locks, entry.lock)
		}
		waiting[entry.lock] = append(waiting[entry.lock], entry.answer)
	}
	if len(locks) == 0 {
		return nil
	}
	names := make([]string, len(locks))
	holders := make([]string, len(locks))
	tokens := make([]int64, len(locks))
	ttls := make([]int64, len(locks))
	for i, lock := range locks {
		names[i], holders[i], tokens[i], ttls[i] = lock.key, lock.holder, lock.token, lock.ttl.Milliseconds()
	}
	var outcomes []string
	var evicted map[int]eviction
	var sent time.Duration
	t := r.table
	err := t.renewal(func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		sent = t.locker.now()
		outcomes, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(byMode(mode, statements.LeaseRenew, statements.LeaseRenewShared)), names, holders, tokens, ttls), pgx.RowTo[string])
		if slices.Contains(outcomes, outcomeGone) {
			evicted = t.whyGone(ctx, q, names, holders, tokens)
		}
		return err
	})
	if err == nil && len(outcomes) != len(locks) {
		err = errors.New("the server answered for other leases than it was asked for")
	}
	if err != nil {
		r.fail(asked, err) // the others have their answer, and there is room for one
		if t.renewals.Reached() {
			return nil
		}
		return err
	}
	for i, lock := range locks {
		var err error
		switch outcomes[i] {
		case outcomeRenewed:
			err = lock.renewed(sent)
		case outcomeGone:
			err = lock.lose(cmp.Or(evicted[i].error, errTakenAway))
		default:
			err = errRowLocked
			lock.notRenewed(err)
			r.again(lock) // alone, so that it costs no other lease its renewal
		}
		tell(waiting[lock], err)
	}
	return nil
}

// fail answers for a batch that got no answer, and tries it again together.
func (r *renewer) fail(batch []renewal, err error) {
	if len(batch) == 0 {
		return
	}
	if !errors.Is(err, ErrClosed) {
		r.table.locker.log.Warn("pgxlock: renewal failed", "leases", len(batch), "error", err)
	}
	locks := make([]*Lock, 0, len(batch))
	for _, entry := range batch {
		tell([]chan<- error{entry.answer}, err)
		if !errors.Is(err, ErrClosed) {
			entry.lock.notRenewed(err)
		}
		locks = append(locks, entry.lock)
	}
	r.again(locks...)
}

func tell(answers []chan<- error, err error) {
	for _, answer := range answers {
		if answer != nil {
			answer <- err
		}
	}
}

// again renews, a little later, those of the locks that are then still held.
func (r *renewer) again(locks ...*Lock) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return
	}
	locks = slices.DeleteFunc(locks, func(lock *Lock) bool {
		_, already := r.retrying[lock]
		r.retrying[lock] = struct{}{}
		return already
	})
	if len(locks) == 0 {
		return
	}
	first := slices.MinFunc(locks, func(a, b *Lock) int { return cmp.Compare(a.ttl, b.ttl) })
	time.AfterFunc(clock.Jitter(retryDelay(first)), func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		var due []renewal
		for _, lock := range locks {
			delete(r.retrying, lock)
			if class := r.classes[lock.ttl]; class != nil {
				if _, held := class.locks[lock]; held {
					due = append(due, renewal{lock: lock})
				}
			}
		}
		r.sending.Add(due...)
	})
}

// retryDelay leaves time for several attempts before the deadline.
func retryDelay(lock *Lock) time.Duration {
	return min(max(lock.ttl/20, 25*time.Millisecond), time.Second)
}
