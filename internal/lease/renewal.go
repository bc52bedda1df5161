package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
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
	changing time.Duration                   // the TTL that a lease may have since a request is in flight; 0: none is
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
	change *change      // nil: it only renews
}

// change is what a renewal changes besides.
type change struct {
	ttl      time.Duration // 0: it stays
	metadata *string       // JSON; nil: it stays
	left     atomic.Bool   // the caller has left: nothing is sent any more
}

// The outcomes of renew.sql, renew_shared.sql and change.sql, which can also be that it was skipped.
const (
	renewalGone = "gone"
	renewalDone = "renewed"
)

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

// renew renews a lock for a caller, who waits for the answer, and changes it unless c is nil.
func (r *renewer) renew(ctx context.Context, lock *hold.Hold, c *change) error {
	if c != nil {
		defer c.left.Store(true)
	}
	for {
		answer := make(chan error, 1)
		r.sending.Add(renewal{lock, answer, c})
		select {
		case err := <-answer:
			if !errors.Is(err, lockerr.ErrRowLocked) {
				return err
			}
		case <-ctx.Done():
			return lockerr.ContextError(ctx)
		}
		if !clock.Sleep(ctx, retryDelay(lock.Lasts())) {
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
	if r.changing > 0 {
		patience = min(patience, r.changing/2)
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

// send renews a batch, with one statement per mode, and makes the first of its changes. The others
// are left to the next batch, so that renewals wait for one change at most.
func (r *renewer) send(batch []renewal) error {
	i := slices.IndexFunc(batch, isChange)
	if i < 0 {
		return inModes(batch, func(entry renewal) hold.Mode { return entry.lock.Mode }, r.sendAs, r.fail)
	}
	first, rest := batch[i], slices.Clone(batch[i+1:])
	batch = append(slices.Clone(batch[:i]), slices.DeleteFunc(slices.Clone(rest), isChange)...)
	r.sending.Add(slices.DeleteFunc(rest, func(entry renewal) bool { return !isChange(entry) })...)
	if len(batch) > 0 {
		if err := r.send(batch); err != nil {
			r.fail([]renewal{first}, err)
			return err
		}
	}
	return r.sendChange(first)
}

func isChange(entry renewal) bool { return entry.change != nil }

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
		ttls[i] = lock.Lasts().Milliseconds()
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
		tell(waiting[lock], r.settle(lock, outcomes[i], evicted[lock], func() error { return lock.Renewed(sent) }))
	}
	return nil
}

// settle records the outcome for a lock, by renewed if it was renewed.
func (r *renewer) settle(lock *hold.Hold, outcome string, evicted error, renewed func() error) error {
	switch outcome {
	case renewalDone:
		return renewed()
	case renewalGone:
		return lock.Lose(cmp.Or(evicted, hold.ErrTakenAway))
	}
	lock.NotRenewed(lockerr.ErrRowLocked)
	r.again(lock) // alone, so that it delays no other renewal
	return lockerr.ErrRowLocked
}

// sendChange changes a lease. It first asks for the version of the row, which every renewal changes:
// a change that arrives late, because it was sent before the connection broke, would make the lease
// shorter than a later renewal has made it, and so finds another version. A change without an
// answer is not sent again. A renewal is, because the deadline may be that of a shorter TTL until then.
func (r *renewer) sendChange(entry renewal) error {
	lock, c := entry.lock, entry.change
	if err := lock.Err(); err != nil || c.left.Load() {
		tell([]chan<- error{entry.answer}, err)
		return nil
	}
	t := r.table
	ttl := cmp.Or(c.ttl, lock.Lasts())
	var row struct {
		Outcome string
		Version *string
	}
	r.setChanging(ttl)
	defer r.setChanging(0)
	var ended, evicted error
	var sent time.Duration
	err := t.renewal(func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		row.Version = nil
		for range 2 {
			sent = t.host.Clock()
			if row.Version != nil {
				if c.left.Load() {
					return nil
				}
				if ended = lock.Changing(ttl, t.margin(ttl), sent); ended != nil {
					return nil
				}
			}
			row, err = pgx.CollectExactlyOneRow(q.Query(ctx, t.place.Statement(statements.LeaseChange), lock.Key, lock.Holder, lock.Token,
				lock.Mode == hold.Shared, row.Version, ttl.Milliseconds(), c.metadata), pgx.RowToStructByPos[struct {
				Outcome string
				Version *string
			}])
			if err != nil {
				return err
			}
			if row.Outcome == renewalGone {
				evicted = t.whyGone(ctx, q, []*hold.Hold{lock})[lock]
				return nil
			}
		}
		return nil
	})
	if err != nil {
		r.fail([]renewal{entry}, err)
		if t.Reached() {
			return nil
		}
		return err
	}
	if ended == nil {
		ended = r.settle(lock, row.Outcome, evicted, func() error {
			if c.left.Load() { // it was told that the TTL is as before
				r.again(lock)
				return nil
			}
			return lock.Changed(ttl, t.margin(ttl), sent)
		})
	}
	tell([]chan<- error{entry.answer}, ended)
	return nil
}

// setChanging says that a change to that TTL is in flight, or with 0 that none is.
func (r *renewer) setChanging(ttl time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.changing = ttl
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
	delay := time.Second
	for _, lock := range locks {
		delay = min(delay, retryDelay(lock.Lasts()))
		if at, ok := lock.Deadline(); ok { // that of a shorter TTL, while it is changed
			delay = min(delay, max(time.Until(at)/4, 25*time.Millisecond))
		}
	}
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
	time.AfterFunc(clock.Jitter(delay), func() {
		var due []renewal
		for _, lock := range locks {
			if _, ended := lock.Ended(); ended == nil {
				due = append(due, renewal{lock: lock})
			}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, lock := range locks {
			delete(r.retrying, lock)
		}
		if !r.stopped {
			r.sending.Add(due...)
		}
	})
}

// retryDelay leaves time for several attempts before the deadline.
func retryDelay(ttl time.Duration) time.Duration {
	return min(max(ttl/20, 25*time.Millisecond), time.Second)
}
