package lease

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// Concurrent requests for leases go in one statement.

// request is one acquisition in flight.
type request struct {
	lock     *hold.Hold
	permits  int // how many the semaphore has; 0: the request is for the lease itself
	metadata *string
	ticket   *int64 // nil: it passes callers that wait

	unsettled int  // how often it was sent again, because others were joining or leaving, or leftovers may have refused it
	unknown   bool // an earlier attempt may have been granted

	batcher.Future
}

// Try implements [hold.Backend].
func (t *Table) Try(ctx context.Context, o hold.Request, attempts []hold.Attempt) {
	requests := make([]*request, len(attempts))
	for i := range attempts {
		lock := attempts[i].Hold
		lock.Holder, lock.TTL, lock.Margin = t.cfg.Owner+":"+rand.Text(), o.TTL, t.margin(o.TTL)
		requests[i] = &request{lock: lock, permits: o.Permits, metadata: o.Metadata, Future: batcher.NewFuture()}
		if !o.Turn.SkipQueue || o.Mode == hold.Shared { // a try for a shared lock must not pass waiters
			requests[i].ticket = new(int64)
		}
	}
	if !o.Turn.SkipQueue {
		requests[0].ticket = &o.Turn.Ticket
		requests[0].lock.Waited = o.Turn.Ticket > 0
	}
	began := time.Now()
	t.flow.ask(ctx.Done() == nil, requests...)
	if o.Turn.SkipQueue && !requests[len(requests)-1].Settled() { // a call that does not wait for a holder must not wait long for the server
		bounded, cancel := context.WithDeadlineCause(ctx, began.Add(dbconn.Timeout), lockerr.ErrNoAnswer)
		defer cancel()
		ctx = bounded
	}
	for i, r := range requests {
		attempts[i].Err = t.requests.Explain(r.Await(ctx, t.host.Closing.Done()))
	}
}

// failRequests fails requests that were not sent, or not sent again.
func (t *Table) failRequests(requests []*request, err error) {
	for _, r := range requests {
		if r.unknown {
			t.discardRequest(r)
		}
		r.Answer(err)
	}
}

// acquire sends a batch of requests, and answers them.
func (t *Table) acquire(requests []*request) {
	t.forgetReturned()
	_ = inModes(requests, func(r *request) hold.Mode { return r.lock.Mode }, t.acquireAs, t.failRequests)
}

func (t *Table) acquireAs(mode hold.Mode, requests []*request) error {
	var locks, permits []*request
	for _, r := range requests {
		switch {
		case r.Settled(): // the caller left while the request was queued
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

// ask sends requests that are all for leases of one mode, or all for permits.
func (t *Table) ask(mode hold.Mode, batch []*request) error {
	if len(batch) == 0 {
		return nil
	}
	statement := byMode(mode, statements.LeaseAcquire, statements.LeaseAcquireShared)
	single := len(batch) == 1 && mode == hold.Exclusive && batch[0].permits == 0
	if single {
		statement = statements.LeaseAcquireOne
	}
	args := &t.acquireArgs
	args.Reset(single)
	dbconn.AddTexts(args, batch, func(r *request) *string { return &r.lock.Key })
	dbconn.AddTexts(args, batch, func(r *request) *string { return &r.lock.Holder })
	dbconn.AddBigints(args, batch, func(r *request) (int64, bool) { return r.lock.TTL.Milliseconds(), true })
	dbconn.AddTexts(args, batch, func(r *request) *string { return r.metadata })
	dbconn.AddBigints(args, batch, func(r *request) (int64, bool) { return dbconn.OrNull(r.ticket) })
	if mode == hold.Exclusive && batch[0].permits > 0 {
		statement = statements.LeaseAcquirePermit
		dbconn.AddIntegers(args, batch, func(r *request) int32 { return int32(r.permits) })
	}

	var grants []grant
	var asked bool
	var sent time.Duration
	err := t.request(t.flow.waits(t.host.Closing), func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		asked, sent = true, t.host.Clock()
		err = q.Answer(ctx, t.place.Statement(statement), args, func(values [][]byte) (err error) {
			grants, err = readGrants(values, len(batch), single)
			return err
		})
		if err != nil && !lockerr.Refused(err) { // this holds even if a later attempt is refused
			for _, r := range batch {
				r.unknown = true
			}
		}
		return err
	})
	if t.flow.postpones(err) {
		putBack(&t.flow, &t.flow.requests, batch)
		return nil
	}
	if lockerr.Spoilt(err) && len(batch) > 1 {
		for i := range batch { // one request makes the statement fail: send each alone to find it
			if err := t.ask(mode, batch[i:i+1]); err != nil {
				t.failRequests(batch[i+1:], err)
				return err
			}
		}
		return nil
	}
	if err != nil {
		rest, reached := takeUnreached(&t.flow, &t.flow.requests)
		for _, r := range batch {
			if r.unknown || asked && !lockerr.Refused(err) {
				t.discardRequest(r) // it may have been granted
			}
			r.Answer(err)
		}
		t.failRequests(rest, err)
		if reached {
			return nil
		}
		return err
	}
	t.flow.answered(len(batch))
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
