package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/sql"
)

// NewLeaseLocker returns a Locker whose locks are leases: rows in the table
// distributed_locks that expire unless they are renewed, which the Locker does.
// They survive a crash of the server, work with SQL callers of acquire_lock, and
// need the migrations ([ErrSchema]).
//
// The pool gives its configuration only: the Locker has two connections of its
// own, one for requests and one for renewals; with [LeaseConfig].OneConnection one for
// both. While a call waits for another process, or leads, there is one more, which listens;
// it is closed when none has done so for the pool's MaxConnIdleTime. Nothing is sent before
// the first use. [Locker.Close] ends the connections.
//
// A program on database/sql makes the pool beside its *sql.DB, with pgxpool.New and
// the connection string of the database. This is cheap: a pool connects only when it
// is used, and the Locker never takes a connection from it. The driver of the *sql.DB
// may be lib/pq; the server refuses words that only lib/pq knows, such as
// binary_parameters, when they are in the string of the pool.
func NewLeaseLocker(pool *pgxpool.Pool, cfg *LeaseConfig) (*Locker, error) {
	return newLease(pool, cfg, clock.System)
}

func newLease(pool *pgxpool.Pool, config *LeaseConfig, now clock.Clock) (*Locker, error) {
	cfg, err := config.withDefaults()
	if err == nil && pool == nil {
		err = errors.New("the pool is nil; make one with pgxpool.New")
	}
	if err != nil {
		return nil, &Error{Op: "new", Kind: KindLease, Err: err}
	}
	connections := pool.Config()
	l := newLocker(KindLease, now, cfg.Backoff, cfg.Logger)
	l.observe = cfg.Observe
	t := &leaseTable{locker: l, cfg: cfg, place: dbconn.Installation{Asked: cfg.Schema, Config: "LeaseConfig"}, mine: make(map[string]struct{}), leftovers: make(map[string][]*leftover)}
	t.requests = t.newSession(connections)
	if t.renewals = t.requests; !cfg.OneConnection {
		t.renewals = t.newSession(connections)
	}
	t.reaping = batcher.Housekeeping{Reap: t.reap, Log: cfg.Logger}
	t.acquiring = batcher.Batcher[*leaseRequest]{Limit: maxRequests, Run: t.acquire, Fail: t.failRequests}
	t.releasing = batcher.Batcher[*leaseReturn]{Limit: maxRequests, Run: t.giveBack, Fail: failReturns}
	t.renewer = newRenewer(t)
	l.backend = t
	l.queue = newQueue(l, &t.place, cfg.Owner, t.queueing, t.renewals.Reached, t.renewals.Dialer)
	return l, nil
}

// maxRequests bounds a batch whose entries take advisory locks until its commit.
const maxRequests = 256

// leaseTable is the backend of a Lease Locker.
type leaseTable struct {
	locker *Locker
	cfg    LeaseConfig
	place  dbconn.Installation

	requests  *dbconn.Session
	renewals  *dbconn.Session // the same with OneConnection
	acquiring batcher.Batcher[*leaseRequest]
	releasing batcher.Batcher[*leaseReturn]
	renewer   *renewer
	reaping   batcher.Housekeeping
	cleaning  batcher.Background
	warm      sync.Once // connects renewals

	// With OneConnection, in this order, before the session's own: a request has requesting, and
	// shares sharing; a renewal has sharing alone.
	requesting sync.Mutex
	sharing    sync.RWMutex

	mu   sync.Mutex
	mine map[string]struct{} // the holders of leases that callers here have, or give back

	leftovers map[string][]*leftover // by what callers wait for who want the lease
	returned  []*leftover            // those of them that are over

	others map[string]int // how many permits others were heard to give semaphores
}

func (t *leaseTable) newSession(config *pgxpool.Config) *dbconn.Session {
	return &dbconn.Session{Dialer: dbconn.Dialer{Name: dbconn.ApplicationName(t.cfg.Owner), Config: config}, Place: &t.place}
}

// request runs an exchange on the connection of requests. If renewals share it, requests go one
// by one, each gives up in time for a renewal, and a renewal that waits goes before the next
// one. So it waits for one request at most, however many callers there are.
func (t *leaseTable) request(fn dbconn.Exchange) error {
	if !t.cfg.OneConnection {
		return t.requests.Do(dbconn.Timeout, fn)
	}
	t.requesting.Lock()
	defer t.requesting.Unlock()
	t.sharing.RLock()
	defer t.sharing.RUnlock()
	return t.requests.Do(t.renewer.patience(), fn)
}

// renewal runs an exchange on the connection of renewals.
func (t *leaseTable) renewal(fn dbconn.Exchange) error {
	if t.cfg.OneConnection {
		t.sharing.Lock()
		defer t.sharing.Unlock()
	}
	return t.renewals.Do(t.renewer.patience(), fn)
}

// queueing runs an exchange for the queue of waiters: on the connection of renewals, so that no
// request delays it, unless it could delay a renewal itself.
func (t *leaseTable) queueing(fn dbconn.Exchange) error {
	if t.cfg.OneConnection {
		return t.request(fn)
	}
	return t.renewal(fn)
}

func (t *leaseTable) options() options { return options{ttl: t.cfg.TTL} }

func (t *leaseTable) takes(opt Option) bool { return takenByLocks(opt) }

func (t *leaseTable) check(key string) error       { return lockkey.Check(key) }
func (t *leaseTable) name(key string) lockkey.Name { return lockkey.Name{Key: key} }

func (t *leaseTable) fence(ctx context.Context, tx usertx.Tx, lock *Lock) error {
	var token int64
	err := lockerr.Typed(tx.Row(ctx, t.place.Statement(byMode(lock.mode, statements.LeaseFence, statements.LeaseFenceShared)), &token, lock.key, lock.holder, lock.token))
	if errors.Is(err, ErrLost) {
		t.renewer.soon(lock) // for good, or for this transaction?
	}
	return elsewhere(err, tx, &t.requests.Config.ConnConfig.Config)
}

// elsewhere adds to the error of a fence where the lock is, if the transaction may
// be somewhere else. It is not refused before: through a pooler one database can
// have two names.
func elsewhere(err error, tx usertx.Tx, config *pgconn.Config) error {
	if !errors.Is(err, ErrLost) && !errors.Is(err, ErrSchema) {
		return err
	}
	here := usertx.PlaceOf(config)
	switch there := tx.Database(); there {
	case "":
		return fmt.Errorf("%w (the lock is in database %s)", err, here)
	case here:
		return err
	default:
		return fmt.Errorf("%w (tx is on database %s, the lock in %s)", err, there, here)
	}
}

func (t *leaseTable) renew(ctx context.Context, lock *Lock) error { return t.renewer.renew(ctx, lock) }

// drop: with one that is given back it is not over yet.
func (t *leaseTable) drop(lock *Lock) {
	t.renewer.remove(lock)
	if errors.Is(lock.ended, ErrLost) {
		t.over(lock, "")
	}
}

// over tells those who wait here that the lock is not ours any more, unless others
// are known to share it still. It reports what lines.freed does.
func (t *leaseTable) over(lock *Lock, outcome string) (queued bool) {
	t.mu.Lock()
	delete(t.mine, lock.holder)
	t.mu.Unlock()
	if outcome == outcomeLeft {
		return false
	}
	return t.locker.lines.freed(t.name(lock.queue))
}

func (t *leaseTable) holdID(lock *Lock) string { return lock.holder }

// has reports whether the holder is one of ours.
func (t *leaseTable) has(holder string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ours := t.mine[holder]
	return ours
}

func (t *leaseTable) keep(lock *Lock) {
	t.mu.Lock()
	t.mine[lock.holder] = struct{}{}
	t.mu.Unlock()
	t.renewer.add(lock)
	if t.cfg.OneConnection {
		return
	}
	t.warm.Do(func() {
		// On a slow link connecting takes longer than a short lease has time for
		// its first renewal. If it fails, that renewal tries again.
		t.cleaning.Run(func() {
			_ = t.renewals.Do(dbconn.Timeout, func(context.Context, dbconn.Querier, bool) error { return nil })
		})
	})
}

func (t *leaseTable) close(ctx context.Context) error {
	t.reaping.Stop()
	err := until(ctx, func() {
		for range 2 {
			<-t.acquiring.Done() // a grant under way, whose caller has left,
			t.cleaning.Wait()    // is given back; then the requests behind it are dropped
		}
		<-t.releasing.Done()
		t.locker.queue.close()
	})
	t.renewer.stop()
	t.requests.Close()
	t.renewals.Close()
	return err
}
