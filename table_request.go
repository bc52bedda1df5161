package pgxlock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// This file takes leases: what is asked at the same time goes in one statement.

// leaseRequest is one acquisition under way.
type leaseRequest struct {
	lock     *Lock
	metadata *string
	ticket   *int64 // nil: it barges

	settled atomic.Bool   // by the answer, or by the caller who left
	done    chan struct{} // closed with the answer
	err     error         // the answer
}

func (t *leaseTable) try(ctx context.Context, keys []string, o options) []attempt {
	margin := time.Duration(float64(t.cfg.Margin) * float64(o.ttl) / float64(t.cfg.TTL))
	requests := make([]*leaseRequest, len(keys))
	for i, key := range keys {
		lock := t.locker.newLock(key, t.cfg.Owner+":"+rand.Text(), o.ttl, max(margin, 100*time.Millisecond))
		requests[i] = &leaseRequest{lock: lock, metadata: o.metadata, done: make(chan struct{})}
		if o.turn != barges {
			requests[i].ticket = new(int64)
		}
	}
	if o.turn != barges {
		requests[0].ticket = &o.turn
		requests[0].lock.wanted = o.turn > 0
	}
	t.acquiring.add(requests...)
	attempts := make([]attempt, len(keys))
	for i, r := range requests {
		attempts[i] = r.await(ctx)
	}
	return attempts
}

// await returns the answer, or leaves when ctx ends.
func (r *leaseRequest) await(ctx context.Context) attempt {
	select {
	case <-r.done:
	case <-ctx.Done():
		if r.settled.CompareAndSwap(false, true) {
			return attempt{err: context.Cause(ctx)}
		}
		<-r.done
	}
	return attempt{r.lock, r.err}
}

// answer tells the caller, and reports false if it has left.
func (r *leaseRequest) answer(err error) bool {
	r.err = err // nobody reads it before done is closed
	if !r.settled.CompareAndSwap(false, true) {
		return false
	}
	close(r.done)
	return true
}

func failRequests(requests []*leaseRequest, err error) {
	for _, r := range requests {
		r.answer(err)
	}
}

// errLateGrant means that the grant took longer to arrive than it lasts.
var errLateGrant = errors.New("the grant arrived after its deadline, and was given back")

// acquire sends a batch of requests.
func (t *leaseTable) acquire(requests []*leaseRequest) error {
	var batch []*leaseRequest
	var names, holders []string
	var ttls []int64
	var metadata []*string
	var tickets []*int64
	for _, r := range requests {
		if r.settled.Load() {
			continue // the caller left while it stood in the queue
		}
		batch = append(batch, r)
		names = append(names, r.lock.key)
		holders = append(holders, r.lock.holder)
		ttls = append(ttls, r.lock.ttl.Milliseconds())
		metadata = append(metadata, r.metadata)
		tickets = append(tickets, r.ticket)
	}
	if len(batch) == 0 {
		return nil
	}

	type grant struct {
		Acquired    bool
		Token       *int64
		HeldBy      *string
		RemainingMS *int64
	}
	var grants []grant
	var asked, second bool
	var sent time.Duration
	err := t.requests.do(ioTimeout, func(ctx context.Context, q querier, again bool) (err error) {
		asked, second, sent = true, again, t.locker.now()
		statement, args := "acquire", []any{names, holders, ttls, metadata}
		if t.place.hasQueue() {
			statement, args = "take", append(args, tickets)
		}
		grants, err = pgx.CollectRows(q.query(ctx, t.place.statement(statement), args...), pgx.RowToStructByPos[grant])
		return err
	})
	if err == nil && len(grants) != len(batch) {
		err = fmt.Errorf("%d answers for %d requests", len(grants), len(batch))
	}
	if spoilt(err) && len(batch) > 1 {
		for i := range batch { // one of them spoils it: find out which
			if err := t.acquire(batch[i : i+1]); err != nil {
				failRequests(batch[i+1:], err)
				return err
			}
		}
		return nil
	}
	for i, r := range batch {
		switch {
		case err != nil:
			if asked && (second || !refused(err)) {
				t.discard(r.lock) // it may have been granted
			}
			r.answer(err)
		case !grants[i].Acquired:
			if second {
				t.discard(r.lock) // the first attempt may have been granted, and be in our own way
			}
			busy := &busyError{}
			if holder := grants[i].HeldBy; holder != nil && *holder != r.lock.holder {
				busy.holder = *holder
				busy.here = t.has(*holder)
			}
			if ms := grants[i].RemainingMS; ms != nil {
				busy.remaining = time.Duration(*ms) * time.Millisecond
			}
			r.answer(busy)
		case !r.lock.granted(*grants[i].Token, sent, t.locker.now()):
			t.discard(r.lock)
			r.answer(errLateGrant)
		case !r.answer(nil):
			t.discard(r.lock)
		}
	}
	if err != nil && !t.requests.reached() {
		return err
	}
	t.reaping.start()
	return nil
}

// refused reports whether err is the server's word that nothing was done. A
// FATAL error may come after a commit.
func refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.SeverityUnlocalized == "ERROR"
}

// spoilt reports whether err may be about one entry only: bad input, a token that
// does not fit its row, or more locks than the server has room for.
func spoilt(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && refused(err) && (strings.HasPrefix(pgErr.Code, "22") || pgErr.Code == stateTokensNeedRepair || pgErr.Code == stateOutOfMemory)
}
