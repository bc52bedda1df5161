package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// NewLease returns a Locker whose locks are leases: rows in the table
// distributed_locks that expire unless they are renewed, which the Locker does.
// They survive a crash of the server, work with SQL callers of acquire_lock, and
// need the migrations.
//
// The pool gives its configuration only: the Locker has two connections of its
// own, one for requests and one for renewals. Nothing is sent before the first
// use. [Locker.Close] ends the connections.
func NewLease(pool *pgxpool.Pool, cfg *LeaseConfig) (*Locker, error) {
	return newLease(func() (*pgxpool.Config, error) {
		if pool == nil {
			return nil, errors.New("the pool is nil; make one with pgxpool.New")
		}
		return pool.Config(), nil
	}, cfg, systemClock)
}

// newLease makes a Lease Locker whose connections are made as server says, which
// is not asked before the rest is known to be right.
func newLease(server func() (*pgxpool.Config, error), config *LeaseConfig, now clock) (*Locker, error) {
	cfg, err := config.withDefaults()
	if err != nil {
		return nil, &Error{Op: "new", Kind: Lease, Err: err}
	}
	connections, err := server()
	if err != nil {
		return nil, &Error{Op: "new", Kind: Lease, Err: err}
	}
	l := newLocker(Lease, now, cfg.Backoff, cfg.Logger)
	t := &leaseTable{locker: l, cfg: cfg, place: installation{asked: cfg.Schema, config: "LeaseConfig", needs: schemaVersion}}
	t.requests, t.renewals = t.newSession(connections), t.newSession(connections)
	t.reaping = housekeeping{reap: t.reap, log: cfg.Logger}
	t.acquiring = combiner[*leaseRequest]{limit: maxRequests, run: t.acquire, fail: failRequests}
	t.releasing = combiner[*leaseReturn]{limit: maxRequests, run: t.giveBack, fail: failReturns}
	t.renewer = newRenewer(t)
	l.backend = t
	return l, nil
}

// maxRequests bounds a batch whose entries take advisory locks until its commit.
const maxRequests = 256

// leaseTable is the backend of a Lease Locker.
type leaseTable struct {
	locker *Locker
	cfg    LeaseConfig
	place  installation

	requests  *session
	renewals  *session
	acquiring combiner[*leaseRequest]
	releasing combiner[*leaseReturn]
	renewer   *renewer
	reaping   housekeeping
	cleaning  background
	warm      sync.Once // connects renewals
}

func (t *leaseTable) newSession(config *pgxpool.Config) *session {
	return &session{dialer: dialer{applicationName(t.cfg.Owner), config}, place: &t.place}
}

func (t *leaseTable) options() options { return options{ttl: t.cfg.TTL} }

func (t *leaseTable) takes(opt Option) bool { return takenExclusively(opt) }

func (t *leaseTable) check(key string) error        { return checkKey(key) }
func (t *leaseTable) compare(key, other string) int { return strings.Compare(key, other) }

func (t *leaseTable) fence(ctx context.Context, tx transaction, lock *Lock) error {
	var token int64
	err := typed(tx.row(ctx, t.place.statement("fence"), &token, lock.key, lock.holder, lock.token))
	if errors.Is(err, ErrLost) {
		t.renewer.soon(lock) // for good, or for this transaction?
	}
	return elsewhere(err, tx, &t.requests.config.ConnConfig.Config)
}

// elsewhere adds to the error of a fence where the lock is, if the transaction may
// be somewhere else. It is not refused before: through a pooler one database can
// have two names.
func elsewhere(err error, tx transaction, config *pgconn.Config) error {
	if !errors.Is(err, ErrLost) && !errors.Is(err, ErrSchema) {
		return err
	}
	here := placeOf(config)
	switch there := tx.database(); there {
	case "":
		return fmt.Errorf("%w (the lock is in database %s)", err, here)
	case here:
		return err
	default:
		return fmt.Errorf("%w (tx is on database %s, the lock in %s)", err, there, here)
	}
}

func (t *leaseTable) renew(ctx context.Context, lock *Lock) error { return t.renewer.renew(ctx, lock) }
func (t *leaseTable) drop(lock *Lock)                             { t.renewer.remove(lock) }

func (t *leaseTable) keep(lock *Lock) {
	t.renewer.add(lock)
	t.warm.Do(func() {
		// On a slow link connecting takes longer than a short lease has time for
		// its first renewal. If it fails, that renewal tries again.
		t.cleaning.run(func() {
			_ = t.renewals.do(ioTimeout, func(context.Context, querier, bool) error { return nil })
		})
	})
}

func (t *leaseTable) close(ctx context.Context) error {
	t.reaping.stop()
	err := until(ctx, func() {
		<-t.acquiring.done() // a grant under way, whose caller has left,
		t.cleaning.wait()    // is given back
	})
	t.renewer.stop()
	t.requests.close()
	t.renewals.close()
	return err
}
