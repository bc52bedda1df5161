// Package lease makes leases: rows in the table distributed_locks that expire unless they are
// renewed.
//
// Acquires and releases of many callers go in batches over one connection, renewals and the
// queue over another one, so that neither the number of leases nor the requests in flight delay
// a renewal beyond its deadline. With OneConnection, or while a second connection cannot be had,
// all share one, and renewals come first. An answer that no caller received is settled in the
// background: the lease is released, and refuses no exclusive try of the same Locker meanwhile. A
// try for a shared lease or a permit that meets it is repeated a few times.
//
// A flow sends the batches, one after the other:
//
//	idle ──▶ the caller leads for one batch: of a release, or an acquire whose wait only its answer ends
//	   └───▶ a goroutine leads until nothing is queued: of other acquires, and what is queued after that batch
//
//	request ──▶ batch ──▶ granted ─────▶ hold
//	               │   ├▶ refused: Busy, or it waits for a leftover and is sent again
//	               │   └▶ late, or the caller has left: Discard
//	               └▶ no answer: sent again, or Discard: the outcome is unknown
//
// Lock order: Table.requesting, then Table.sharing, held while a request is sent, and never
// with Hold.mu. Under Hold.mu: renewer.mu, Table.mu or those of the queue. Under Table.mu: flow.mu,
// under which no other is taken.
package lease

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/sql"
)

// Config configures a Table. Its fields are those of pgxlock.LeaseConfig, with the defaults
// filled in.
type Config struct {
	Owner, Schema      string
	TTL, Renew, Margin time.Duration
	OneConnection      bool
	Async              bool
}

// A Table implements [hold.Backend] with leases.
type Table struct {
	host  hold.Host
	cfg   Config
	place dbconn.Installation

	requests *dbconn.Session
	renewals *dbconn.Session // the same with OneConnection
	flow     flow            // over requests

	acquireArgs, releaseArgs dbconn.Arguments // of the batch in flight; only the flow's leader uses them

	renewer  *renewer
	reaping  batcher.Housekeeping
	cleaning batcher.Background
	warm     sync.Once // connects renewals

	lingering context.Context // ends some time after Close has begun: releases wait for a connection until then
	endLinger context.CancelCauseFunc

	// Where renewals and requests share a connection, in this order, before the session's own: a
	// request has requesting, and shares sharing; a renewal has sharing alone.
	requesting sync.Mutex
	sharing    sync.RWMutex
	borrowing  atomic.Bool // renewals go over requests, because their own connection cannot be had

	mu   sync.Mutex
	mine map[string]struct{} // the holder ids of leases that callers here have, or release

	leftovers map[lockkey.Name][]*leftover // by the wait name of the lease
	returned  []*leftover                  // those of them that are over

	others map[string]int // by semaphore: the number of permits that others use, once logged
}

// New returns a Table whose connections are made as the configuration says. Call Use before
// the first try.
func New(connections *pgxpool.Config, cfg Config) *Table {
	t := &Table{cfg: cfg, place: dbconn.Installation{Asked: cfg.Schema, Config: "LeaseConfig"}, mine: make(map[string]struct{}), leftovers: make(map[lockkey.Name][]*leftover)}
	t.place.Moved = t.moved
	t.lingering, t.endLinger = context.WithCancelCause(context.Background())
	t.requests = t.newSession(connections)
	t.requests.Async = cfg.Async
	if t.renewals = t.requests; !cfg.OneConnection {
		t.renewals = t.newSession(connections)
	}
	t.flow.table = t
	t.renewer = newRenewer(t)
	t.renewals.Most = t.renewer.mostToConnect
	if cfg.Async { // the server may have crashed, and lost leases that were not renewed yet
		t.requests.Again, t.renewals.Again = t.renewer.all, t.renewer.all
	}
	return t
}

// Use completes the Table.
func (t *Table) Use(host hold.Host) {
	t.host = host
	t.reaping = batcher.Housekeeping{Reap: t.reap, Log: host.Log}
}

// Installation returns where the schema is.
func (t *Table) Installation() *dbconn.Installation { return &t.place }

// Dialer returns how the connections are made.
func (t *Table) Dialer() dbconn.Dialer { return t.renewals.Dialer }

func (t *Table) newSession(config *pgxpool.Config) *dbconn.Session {
	return &dbconn.Session{Dialer: dbconn.Dialer{Name: dbconn.ApplicationName(t.cfg.Owner), Config: config}, Place: &t.place}
}

// request runs an exchange on the connection of requests. If renewals share it, requests go one
// by one, each gives up in time for a renewal, and a renewal that waits goes before the next
// one. So it waits for one request at most, however many callers there are. wait bounds the wait
// for a connection.
func (t *Table) request(wait context.Context, fn dbconn.Exchange) error {
	if !t.cfg.OneConnection && !t.borrowing.Load() {
		return lockerr.Locked(t.requests.Do(wait, dbconn.Timeout, fn))
	}
	t.requesting.Lock()
	defer t.requesting.Unlock()
	t.sharing.RLock()
	defer t.sharing.RUnlock()
	return lockerr.Locked(t.requests.Do(wait, t.renewer.patience(), fn))
}

// moved ends all holds: their rows are in another cluster. Where they were copied, others get them there
// when they expire, and fences and tokens of the two clusters know nothing of each other.
func (t *Table) moved(was, is int64) {
	why := dbconn.ErrMoved(was, is)
	locks := t.renewer.locks()
	for _, lock := range locks {
		_ = lock.Lose(why)
	}
	t.host.Log.Warn("pgxlock: all leases are lost", "leases", len(locks), "error", why)
}

// wake runs an exchange that wakes waiters, on the connection of requests.
func (t *Table) wake(fn dbconn.Exchange) error { return t.request(t.lingering, fn) }

// renewal runs an exchange on the connection of renewals, or on that of requests where theirs is the same
// or cannot be had.
func (t *Table) renewal(fn dbconn.Exchange) error {
	if !t.cfg.OneConnection && !t.borrows() {
		asked := false
		err := t.renewals.DoWithin(t.renewer.patience(), func(ctx context.Context, q dbconn.Querier, again bool) error {
			asked = true
			return fn(ctx, q, again)
		})
		if err == nil || asked || !t.borrow(err) {
			return lockerr.Locked(err)
		}
	}
	t.sharing.Lock()
	defer t.sharing.Unlock()
	return lockerr.Locked(t.requests.DoWithin(t.renewer.patience(), fn))
}

// borrow makes renewals share the connection of requests if there is one, because err kept them from
// having their own: a role, a database or a pooler may allow one connection only.
func (t *Table) borrow(err error) bool {
	if errors.Is(err, lockerr.ErrClosed) || !t.requests.Reached() {
		return false
	}
	if !t.borrowing.Swap(true) {
		t.host.Log.Warn("pgxlock: leases are renewed over the connection of their requests, as with OneConnection, until there is a second one", "error", err)
	}
	return true
}

// borrows reports whether renewals share the connection of requests now. They do until they have their
// own, which is tried again meanwhile.
func (t *Table) borrows() bool {
	if t.borrowing.Load() && (t.renewals.Begin() || !t.requests.Reached()) {
		t.borrowing.Store(false)
	}
	return t.borrowing.Load()
}

// Do runs an exchange for the queue of waiters: on the connection of renewals, so that no
// request delays it, unless it could delay a renewal itself.
func (t *Table) Do(fn dbconn.Exchange) error {
	if t.cfg.OneConnection || t.borrows() {
		var wait clock.Deadline
		wait.Start(context.Background(), dbconn.Timeout, lockerr.ErrNoAnswer)
		defer wait.Stop()
		return t.request(&wait, fn)
	}
	return t.renewal(fn)
}

// Fence implements [hold.Backend].
func (t *Table) Fence(ctx context.Context, tx hold.Tx, lock *hold.Hold) error {
	_, err := tx.Run(ctx, t.place.Statement(byMode(lock.Mode, statements.LeaseFence, statements.LeaseFenceShared)), lock.Key, lock.Holder, lock.Token)
	if err = lockerr.Typed(err); errors.Is(err, lockerr.ErrLost) {
		t.renewer.soon(lock) // finds out whether the lease is lost, or only this transaction cannot see it
	}
	return usertx.Elsewhere(err, tx, &t.requests.Config.ConnConfig.Config)
}

// Reached reports whether the last exchange for the queue got an answer.
func (t *Table) Reached() bool {
	return t.renewals.Reached() || t.borrowing.Load() && t.requests.Reached()
}

// Renew implements [hold.Backend].
func (t *Table) Renew(ctx context.Context, lock *hold.Hold) error {
	return t.renewer.renew(ctx, lock, nil)
}

// Change implements [hold.Backend].
func (t *Table) Change(ctx context.Context, lock *hold.Hold, ttl time.Duration, metadata *string) error {
	return t.renewer.renew(ctx, lock, &change{ttl: ttl, metadata: metadata})
}

// margin returns by how much the local deadline of a lease with that TTL is earlier than the server's.
func (t *Table) margin(ttl time.Duration) time.Duration {
	return max(time.Duration(float64(t.cfg.Margin)*float64(ttl)/float64(t.cfg.TTL)), 100*time.Millisecond)
}

// Drop implements [hold.Backend]. A lease that is being released counts as held until the
// server has answered.
func (t *Table) Drop(lock *hold.Hold, lost bool) {
	t.renewer.remove(lock)
	if lost {
		t.over(lock, 0)
	}
}

// over records that a hold has ended, and wakes the first waiter of its lock, unless other holds
// are known to share the lock still. It returns what Freed returns.
func (t *Table) over(lock *hold.Hold, o outcome) (queued bool) {
	t.forget(lock)
	if o == outcomeLeft {
		return false
	}
	return t.host.Queue.Freed(lock.Queue)
}

// forget records that a hold has ended.
func (t *Table) forget(lock *hold.Hold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mine, lock.Holder)
}

// ID implements [hold.Backend].
func (t *Table) ID(lock *hold.Hold) string { return lock.Holder }

// has reports whether the holder is one of ours.
func (t *Table) has(holder string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ours := t.mine[holder]
	return ours
}

// Keep implements [hold.Backend].
func (t *Table) Keep(lock *hold.Hold) {
	t.mu.Lock()
	t.mine[lock.Holder] = struct{}{}
	t.mu.Unlock()
	t.renewer.add(lock)
	if t.cfg.OneConnection {
		return
	}
	t.warm.Do(func() {
		// On a slow link connecting takes longer than a short lease has time for
		// its first renewal. The attempt outlives this call, and serves that renewal.
		t.cleaning.Run(func() {
			_ = t.renewals.DoWithin(dbconn.Timeout, func(context.Context, dbconn.Querier, bool) error { return nil })
		})
	})
}

// Close implements [hold.Backend].
func (t *Table) Close(ctx context.Context) error {
	t.reaping.Stop()
	late := time.AfterFunc(releasePatience, func() { t.endLinger(lockerr.ErrClosed) })
	defer late.Stop()
	defer t.endLinger(lockerr.ErrClosed)
	err := batcher.Until(ctx, func() {
		for range 2 {
			t.flow.wait()     // first pass: a late grant is released by cleaning, which sends
			t.cleaning.Wait() // the requests behind that leftover again; second pass: these
		}
		t.flow.wait()
		t.host.Queue.Close()
	})
	t.renewer.stop()
	t.requests.Close()
	t.renewals.Close()
	return err
}

// whyGone asks why the server found these leases gone: by hold, the eviction that ended it.
// Without an answer they are gone all the same.
func (t *Table) whyGone(ctx context.Context, q dbconn.Querier, gone []*hold.Hold) map[*hold.Hold]error {
	if len(gone) == 0 {
		return nil
	}
	names, holders, tokens := identify(gone)
	found, err := hold.Evictions(ctx, &t.place, q, make([]int32, len(names)), names, holders, tokens)
	if err != nil {
		t.host.Log.Debug("pgxlock: cannot ask who evicted the holder of a lease", "error", err)
	}
	evicted := make(map[*hold.Hold]error, len(found))
	for i, eviction := range found {
		evicted[gone[i]] = eviction.Err
	}
	return evicted
}

// identify returns what the server knows the leases by.
func identify(locks []*hold.Hold) (names, holders []string, tokens []int64) {
	for _, lock := range locks {
		names, holders, tokens = append(names, lock.Key), append(holders, lock.Holder), append(tokens, lock.Token)
	}
	return names, holders, tokens
}
