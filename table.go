package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"sync"

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
	return newLease(pool, cfg, systemClock)
}

func newLease(pool *pgxpool.Pool, config *LeaseConfig, now clock) (*Locker, error) {
	if pool == nil {
		return nil, &Error{Op: "new", Kind: Lease, Err: errors.New("the pool is nil; make one with pgxpool.New")}
	}
	cfg, err := config.withDefaults()
	if err != nil {
		return nil, &Error{Op: "new", Kind: Lease, Err: err}
	}
	l := newLocker(Lease, now, cfg.Backoff, cfg.Logger)
	t := &leaseTable{locker: l, cfg: cfg, place: installation{asked: cfg.Schema}}
	t.requests, t.renewals = t.newSession(pool.Config()), t.newSession(pool.Config())
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
	return &session{name: fmt.Sprintf("pgxlock %.50s", t.cfg.Owner), config: config, place: &t.place}
}

func (t *leaseTable) options() options { return options{ttl: t.cfg.TTL} }

func (t *leaseTable) fence(lock *Lock) (string, []any, error) {
	return t.place.statement("fence"), []any{lock.key, lock.holder, lock.token}, nil
}

func (t *leaseTable) renew(ctx context.Context, lock *Lock) error { return t.renewer.renew(ctx, lock) }
func (t *leaseTable) check(lock *Lock)                            { t.renewer.soon(lock) }
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
