package pgxlock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// Requests for leases that are made at the same time go in one statement.

// leaseRequest is one acquisition under way.
type leaseRequest struct {
	lock     *Lock
	permits  permits // of the semaphore that the lock shall be one of; 0: it is the lock itself
	metadata *string
	ticket   *int64 // nil: it barges

	unsettled int  // how often others were just changing who shares it, or leftovers may have been in the way
	unknown   bool // an earlier attempt may have been granted

	batcher.Future
}

func (t *leaseTable) try(ctx context.Context, keys []string, o options) []attempt {
	margin := time.Duration(float64(t.cfg.Margin) * float64(o.ttl) / float64(t.cfg.TTL))
	requests := make([]*leaseRequest, len(keys))
	for i, key := range keys {
		lock := t.locker.newLock(key, t.cfg.Owner+":"+rand.Text(), o.ttl, max(margin, 100*time.Millisecond))
		lock.mode = o.mode
		requests[i] = &leaseRequest{lock: lock, permits: o.permits, metadata: o.metadata, Future: batcher.NewFuture()}
		if o.turn != barges || o.mode == Shared { // a share passes nobody by
			requests[i].ticket = new(int64)
		}
	}
	if o.turn != barges {
		requests[0].ticket = &o.turn
		requests[0].lock.wanted = o.turn > 0
	}
	t.acquiring.Add(requests...)
	attempts := make([]attempt, len(keys))
	for i, r := range requests {
		attempts[i] = attempt{r.lock, r.Await(ctx)}
	}
	return attempts
}

// failRequests answers requests that were not sent, or not again.
func (t *leaseTable) failRequests(requests []*leaseRequest, err error) {
	for _, r := range requests {
		if r.unknown {
			t.discardRequest(r)
		}
		r.Answer(err)
	}
}

// errLateGrant means that the grant took longer to arrive than it lasts.
var errLateGrant = errors.New("the grant arrived after its deadline, and was given back")

// acquire sends a batch of requests.
func (t *leaseTable) acquire(requests []*leaseRequest) error {
	t.forgetReturned()
	return inModes(requests, func(r *leaseRequest) Mode { return r.lock.mode }, t.acquireAs, t.failRequests)
}

func (t *leaseTable) acquireAs(mode Mode, requests []*leaseRequest) error {
	var locks, permits []*leaseRequest
	for _, r := range requests {
		switch {
		case r.Settled(): // the caller left while it stood in the queue
			if r.unknown {
				t.discardRequest(r)
			}
		case r.permits > 0:
			permits = append(permits, r)
		default:
			locks = append(locks, r)
		}
	}
	if err := t.ask(mode, locks); err != nil {
		t.failRequests(permits, err)
		return err
	}
	return t.ask(mode, permits)
}

// ask sends requests that are all for locks of one mode, or all for permits.
func (t *leaseTable) ask(mode Mode, batch []*leaseRequest) error {
	if len(batch) == 0 {
		return nil
	}
	var names, holders []string
	var permits []int32
	var ttls []int64
	var metadata []*string
	var tickets []*int64
	for _, r := range batch {
		names = append(names, r.lock.key)
		permits = append(permits, int32(r.permits))
		holders = append(holders, r.lock.holder)
		ttls = append(ttls, r.lock.ttl.Milliseconds())
		metadata = append(metadata, r.metadata)
		tickets = append(tickets, r.ticket)
	}

	var grants []grant
	var asked bool
	var sent time.Duration
	statement, args := statements.LeaseAcquire, []any{names, holders, ttls, metadata, tickets}
	switch {
	case mode == Shared:
		statement = statements.LeaseAcquireShared
	case batch[0].permits > 0:
		statement, args = statements.LeaseAcquirePermit, append(args, permits)
	}
	err := t.request(func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		asked, sent = true, t.locker.now()
		grants, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(statement), args...), toGrant)
		if err != nil && !lockerr.Refused(err) { // whatever becomes of the next attempt, or of each alone
			for _, r := range batch {
				r.unknown = true
			}
		}
		return err
	})
	if err == nil && len(grants) != len(batch) {
		err = fmt.Errorf("%d answers for %d requests", len(grants), len(batch))
	}
	if lockerr.Spoilt(err) && len(batch) > 1 {
		for i := range batch { // one of them spoils it: find out which
			if err := t.ask(mode, batch[i:i+1]); err != nil {
				t.failRequests(batch[i+1:], err)
				return err
			}
		}
		return nil
	}
	if err != nil {
		for _, r := range batch {
			if r.unknown || asked && !lockerr.Refused(err) {
				t.discardRequest(r) // it may have been granted
			}
			r.Answer(err)
		}
		if !t.requests.Reached() {
			return err
		}
		return nil
	}
	for _, acquired := range []bool{true, false} { // a refusal may be because of a grant to a caller that has left
		for i, g := range grants {
			if g.acquired == acquired {
				t.settle(batch[i], g, sent)
			}
		}
	}
	t.reaping.Start()
	return nil
}
