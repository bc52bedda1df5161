package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// minRenewInterval keeps a forgotten unit from becoming a storm of renewals.
const minRenewInterval = 100 * time.Millisecond

// RenewInterval returns how often leases with that TTL are renewed: as asked, or each third of
// the TTL if asked is 0.
func RenewInterval(asked, ttl time.Duration) (time.Duration, error) {
	if asked == 0 {
		asked = ttl / 3
	}
	if asked < minRenewInterval || asked > ttl/3 {
		return asked, fmt.Errorf("is %s, it must be between %s and a third of the TTL, %s", asked, minRenewInterval, (ttl / 3).Truncate(time.Millisecond))
	}
	return asked, nil
}

// A renewer keeps the leases of a Locker alive: all leases of one TTL together, on a connection
// of its own, so that neither the number of leases nor requests in flight delay a renewal
// beyond its deadline.
type renewer struct {
	table   *Table
	sending batcher.Batcher[renewal]

	mu       sync.Mutex
	classes  map[time.Duration]*renewalClass // by TTL
	retrying map[*hold.Hold]struct{}         // leases whose failed renewal is soon tried again
	stopped  bool
}

// renewalClass is the leases of one TTL. Its timer runs while there are any.
type renewalClass struct {
	ttl   time.Duration
	every time.Duration
	locks map[*hold.Hold]struct{}
	timer *time.Timer
}

// renewal is one renewal in flight.
type renewal struct {
	lock   *hold.Hold
	answer chan<- error // has room for the answer; nil: no caller waits for it
}

// The outcomes of an entry of renew.sql or renew_shared.sql, which can also be skipped.
const (
	renewalGone = "gone"
	renewalDone = "renewed"
)

// errRowLocked means that another transaction keeps the row of a lease locked.
var errRowLocked = errors.New("the row of the lease is locked by another transaction")

func newRenewer(t *Table) *renewer {
	r := &renewer{table: t, classes: make(map[time.Duration]*renewalClass), retrying: make(map[*hold.Hold]struct{})}
	r.sending = batcher.Batcher[renewal]{Limit: batcher.MaxRows, Run: r.send, Fail: r.fail}
	return r
}

func (r *renewer) add(lock *hold.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return
	}
	class := r.classes[lock.TTL]
	if class == nil {
		class = &renewalClass{ttl: lock.TTL, every: lock.TTL / 3, locks: make(map[*hold.Hold]struct{})}
		if lock.TTL == r.table.cfg.TTL {
			class.every = r.table.cfg.Renew
		}
		class.timer = time.AfterFunc(class.every, func() { r.tick(class) })
		r.classes[lock.TTL] = class
	} else if len(class.locks) == 0 {
		class.timer.Reset(class.every)
	}
	class.locks[lock] = struct{}{}
}

func (r *renewer) remove(lock *hold.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	class := r.classes[lock.TTL]
	if class == nil {
		return
	}
	delete(class.locks, lock)
	if len(class.locks) > 0 {
		return
	}
	class.timer.Stop()
	if class.ttl != r.table.cfg.TTL { // which the next lease is likely to have
		delete(r.classes, lock.TTL)
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
	if r.classes[class.ttl] != class || len(class.locks) == 0 {
		return
	}
	due := make([]renewal, 0, len(class.locks))
	for lock := range class.locks {
		due = append(due, renewal{lock: lock})
	}
	r.sending.Add(due...)
	class.timer.Reset(class.every)
}

// locks returns every lease that is held.
func (r *renewer) locks() (locks []*hold.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, class := range r.classes {
		locks = slices.AppendSeq(locks, maps.Keys(class.locks))
	}
	return locks
}

// all renews every lease now, in the background.
func (r *renewer) all() {
	var due []renewal
	for _, lock := range r.locks() {
		due = append(due, renewal{lock: lock})
	}
	r.sending.Add(due...)
}

// soon renews a lock in the background.
func (r *renewer) soon(lock *hold.Hold) { r.sending.Add(renewal{lock: lock}) }

// renew renews a lock for a caller, who waits for the answer.
func (r *renewer) renew(ctx context.Context, lock *hold.Hold) error {
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

// patience returns how long an exchange may take: at most half the shortest TTL, so that there is time
// for another one before any deadline.
func (r *renewer) patience() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	patience := dbconn.Timeout
	for ttl, class := range r.classes {
		if len(class.locks) > 0 {
			patience = min(patience, ttl/2)
		}
	}
	return patience
}

// mostToConnect returns how long an attempt to connect for renewals may last: what is left of
// the lease that lasts longest, but as long as an exchange at least, for the leases to come. 0
// means that there are no leases.
func (r *renewer) mostToConnect() time.Duration {
	var most time.Duration
	for _, lock := range r.locks() {
		if until, ok := lock.Deadline(); ok {
			most = max(most, time.Until(until), dbconn.Timeout)
		}
	}
	return most
}

// send renews a batch, with one statement per mode.
func (r *renewer) send(batch []renewal) error {
	return inModes(batch, func(entry renewal) hold.Mode { return entry.lock.Mode }, r.sendAs, r.fail)
}

func (r *renewer) sendAs(mode hold.Mode, batch []renewal) error {
	var locks []*hold.Hold
	var asked []renewal
	waiting := make(map[*hold.Hold][]chan<- error, len(batch))
	for _, entry := range batch {
		if err := entry.lock.Err(); err != nil { // the hold ended while the renewal was queued
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
	names, holders, tokens := identify(locks)
	ttls := make([]int64, len(locks))
	for i, lock := range locks {
		ttls[i] = lock.TTL.Milliseconds()
	}
	var outcomes []string
	var evicted map[*hold.Hold]error
	var sent time.Duration
	t := r.table
	err := t.renewal(func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		sent = t.host.Clock()
		outcomes, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(byMode(mode, statements.LeaseRenew, statements.LeaseRenewShared)), names, holders, tokens, ttls), pgx.RowTo[string])
		var gone []*hold.Hold
		for i, outcome := range outcomes[:min(len(outcomes), len(locks))] {
			if outcome == renewalGone {
				gone = append(gone, locks[i])
			}
		}
		evicted = t.whyGone(ctx, q, gone)
		return err
	})
	if err == nil && len(outcomes) != len(locks) {
		err = errors.New("the server answered for other leases than those in the request")
	}
	if err != nil {
		r.fail(asked, err) // not the rest of batch: its callers have their answers
		if t.Reached() {
			return nil
		}
		return err
	}
	for i, lock := range locks {
		var err error
		switch outcomes[i] {
		case renewalDone:
			err = lock.Renewed(sent)
		case renewalGone:
			err = lock.Lose(cmp.Or(evicted[lock], hold.ErrTakenAway))
		default:
			err = errRowLocked
			lock.NotRenewed(err)
			r.again(lock) // alone, so that it delays no other renewal
		}
		tell(waiting[lock], err)
	}
	return nil
}

// fail answers the callers of a batch that failed, and retries the batch.
func (r *renewer) fail(batch []renewal, err error) {
	if len(batch) == 0 {
		return
	}
	if !errors.Is(err, lockerr.ErrClosed) {
		r.table.host.Log.Warn("pgxlock: renewal failed", "leases", len(batch), "error", err)
	}
	locks := make([]*hold.Hold, 0, len(batch))
	for _, entry := range batch {
		tell([]chan<- error{entry.answer}, err)
		if !errors.Is(err, lockerr.ErrClosed) {
			entry.lock.NotRenewed(err)
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

// again renews, a little later, those of the locks that are still held then.
func (r *renewer) again(locks ...*hold.Hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return
	}
	locks = slices.DeleteFunc(locks, func(lock *hold.Hold) bool {
		_, already := r.retrying[lock]
		r.retrying[lock] = struct{}{}
		return already
	})
	if len(locks) == 0 {
		return
	}
	first := slices.MinFunc(locks, func(a, b *hold.Hold) int { return cmp.Compare(a.TTL, b.TTL) })
	time.AfterFunc(clock.Jitter(retryDelay(first)), func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		var due []renewal
		for _, lock := range locks {
			delete(r.retrying, lock)
			if class := r.classes[lock.TTL]; class != nil {
				if _, held := class.locks[lock]; held {
					due = append(due, renewal{lock: lock})
				}
			}
		}
		r.sending.Add(due...)
	})
}

// retryDelay leaves time for several attempts before the deadline.
func retryDelay(lock *hold.Hold) time.Duration {
	return min(max(lock.TTL/20, 25*time.Millisecond), time.Second)
}
