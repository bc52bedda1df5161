package lease

import (
	"context"
	"crypto/rand"
	"fmt"
	"iter"
	"slices"
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
	others   []*hold.Hold // permits that are wanted together with it, all or none
	permits  int          // how many the semaphore has; 0: the request is for the lease itself
	metadata *string
	ticket   *int64   // nil: it passes callers that wait
	from     *release // the lease was left to it; nil: it was not

	unsettled int  // how often it was sent again, because others were joining or leaving, or leftovers may have refused it
	unknown   bool // an earlier attempt may have been granted

	batcher.Future
}

// size returns how many leases are requested.
func (r *request) size() int { return 1 + len(r.others) }

// holds yields the holds, the lock first.
func (r *request) holds() iter.Seq2[int, *hold.Hold] {
	return func(yield func(int, *hold.Hold) bool) {
		if !yield(0, r.lock) {
			return
		}
		for i, other := range r.others {
			if !yield(i+1, other) {
				return
			}
		}
	}
}

// Try implements [hold.Backend].
func (t *Table) Try(ctx context.Context, o hold.Request, attempts []hold.Attempt) {
	group := 1
	if o.Permits > 0 {
		group = len(attempts)
	}
	requests := make([]*request, len(attempts)/group)
	for i := range requests {
		r := &request{lock: attempts[i*group].Hold, permits: o.Permits, metadata: o.Metadata, Future: batcher.NewFuture()}
		for _, other := range attempts[i*group+1 : (i+1)*group] {
			r.others = append(r.others, other.Hold)
		}
		holder, margin := t.cfg.Owner+":"+rand.Text(), t.margin(o.TTL)
		for _, lock := range r.holds() {
			lock.Holder, lock.TTL, lock.Margin = holder, o.TTL, margin
			lock.Waited = i == 0 && !o.Turn.SkipQueue && o.Turn.Ticket > 0
		}
		if !o.Turn.SkipQueue || o.Mode == hold.Shared || o.Permits > 0 { // a try for a shared lock or a permit must not pass waiters
			r.ticket = new(int64)
		}
		requests[i] = r
	}
	switch {
	case o.Turn.Handed:
		requests[0].ticket = nil
		requests[0].from, _ = o.Turn.Release.(*release)
	case !o.Turn.SkipQueue:
		requests[0].ticket = &o.Turn.Ticket
	}
	began := time.Now()
	t.flow.ask(ctx.Done() == nil, requests...)
	if o.Turn.SkipQueue && !requests[len(requests)-1].Settled() { // a call that does not wait for a holder must not wait long for the server
		bounded, cancel := context.WithDeadlineCause(ctx, began.Add(dbconn.Timeout), lockerr.ErrNoAnswer)
		defer cancel()
		ctx = bounded
	}
	for i, r := range requests {
		err := t.requests.Explain(r.Await(ctx, t.host.Closing.Done()))
		for j := range group {
			attempts[i*group+j].Err = err
		}
	}
}

// failRequests fails requests that were not sent, or not sent again.
func (t *Table) failRequests(requests []*request, err error) {
	for _, r := range requests {
		r.returnRelease()
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
	var locks, permits, handed []*request
	for _, r := range requests {
		switch {
		case r.Settled(): // the caller left while the request was queued
			r.returnRelease()
			if r.unknown {
				t.discardRequest(r)
			}
		case r.permits > 0:
			permits = append(permits, r)
		case r.from != nil:
			handed = append(handed, r)
		default:
			locks = append(locks, r)
		}
	}
	if len(handed) > 1 { // a batch of releases and one of requests cost less than an exchange for each
		t.releaseFor(handed)
		handed, locks = nil, append(handed, locks...)
	}
	if err := t.ask(mode, handed); err != nil {
		t.failRequests(slices.Concat(locks, permits), err)
		return err
	}
	if err := t.ask(mode, locks); err != nil {
		t.failRequests(permits, err)
		return err
	}
	for len(permits) > 0 {
		n, leases := 0, 0
		for n < len(permits) && (n == 0 || leases+permits[n].size() <= batcher.MaxRequests) {
			leases += permits[n].size()
			n++
		}
		if err := t.ask(mode, permits[:n]); err != nil {
			t.failRequests(permits[n:], err)
			return err
		}
		permits = permits[n:]
	}
	return nil
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
	from := batch[0].from
	args := &t.acquireArgs
	args.Reset(single)
	dbconn.AddTexts(args, batch, func(r *request) *string { return &r.lock.Key })
	if from != nil {
		statement = statements.LeaseHandOver
		dbconn.AddTexts(args, batch, func(*request) *string { return &from.lock.Holder })
		dbconn.AddBigints(args, batch, func(*request) (int64, bool) { return dbconn.OrNull(from.token) })
	}
	dbconn.AddTexts(args, batch, func(r *request) *string { return &r.lock.Holder })
	dbconn.AddBigints(args, batch, func(r *request) (int64, bool) { return r.lock.TTL.Milliseconds(), true })
	dbconn.AddTexts(args, batch, func(r *request) *string { return r.metadata })
	if from == nil {
		dbconn.AddBigints(args, batch, func(r *request) (int64, bool) { return dbconn.OrNull(r.ticket) })
	}
	leases := len(batch)
	if mode == hold.Exclusive && batch[0].permits > 0 {
		statement = statements.LeaseAcquirePermit
		dbconn.AddIntegers(args, batch, func(r *request) int32 { return int32(r.permits) })
		dbconn.AddIntegers(args, batch, func(r *request) int32 { return int32(r.size()) })
		leases = 0
		for _, r := range batch {
			leases += r.size()
		}
	}

	var grants []grant
	var released answer
	var asked bool
	var sent time.Duration
	err := t.request(t.flow.waits(t.host.Closing), func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
		asked, sent = true, t.host.Clock()
		err = q.Answer(ctx, t.place.Statement(statement), args, func(values [][]byte) (err error) {
			if from != nil {
				if len(values) == 0 || len(values[0]) != 1 {
					return fmt.Errorf("%w: the release before a request", dbconn.ErrForeign)
				}
				released.letters, values = slices.Clone(values[0]), values[1:]
			}
			grants, err = readGrants(values, leases, single)
			return err
		})
		if err != nil && !lockerr.Refused(err) { // this holds even if a later attempt is refused
			for _, r := range batch {
				r.unknown = true
			}
		}
		if from != nil {
			t.complete(ctx, q, &released, []*release{from}, err)
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
		if from != nil && asked && !lockerr.Refused(err) {
			from.unknown = true // also where an answer came, of a commit that was not replicated
		}
		for _, r := range batch {
			r.returnRelease()
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
	if from != nil {
		batch[0].from = nil // the request may be sent again
		t.settleReleases([]*release{from}, released)
	}
	for _, acquired := range []bool{true, false} { // a refusal may be because of a grant to a caller that has left
		rest := grants
		for _, r := range batch {
			if rest[0].acquired == acquired {
				t.settle(r, rest[:r.size()], sent)
			}
			rest = rest[r.size():]
		}
	}
	t.reaping.Start()
	return nil
}
