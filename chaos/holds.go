package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// holds is the task for what Lockers do: leases, shared or not, advisory locks, permits and sets, which are held until they
// are released, and DoTx and Lead.
type holds struct {
	*process

	sqlPool     *pgxpool.Pool // of SQL callers; nil: there are none
	mu          sync.Mutex
	current     *generation
	generations int
	stop        chan struct{}
	stopped     sync.WaitGroup
}

// A generation is a Locker, until it is closed and replaced.
type generation struct {
	locks   *pgxlock.Locker
	permits *pgxlock.Semaphore
	number  int

	mu      sync.Mutex
	closing bool
	held    map[*request]bool
}

func newHolds(p *process) (*holds, error) {
	h := &holds{process: p, stop: make(chan struct{})}
	first, err := h.next()
	if err == nil && p.SQL {
		h.sqlPool, err = newSQLPool(p)
	}
	if err != nil {
		return nil, err
	}
	h.current = first
	if p.Closes > 0 {
		h.stopped.Go(h.replace)
	}
	return h, nil
}

// next makes a Locker.
func (h *holds) next() (*generation, error) {
	h.generations++
	g := &generation{number: h.generations, held: make(map[*request]bool)}
	owner := fmt.Sprintf("%s.%d", h.Name, g.number)
	var err error
	if h.Kind == "advisory" {
		g.locks, err = pgxlock.NewAdvisoryLocker(h.pool, &pgxlock.AdvisoryConfig{
			Owner: owner, TTL: h.TTL, Tokens: h.Tokens, SessionPooler: h.PoolMode == "session", Observe: observe,
		})
		return g, err
	}
	cfg := pgxlock.LeaseConfig{Owner: owner, TTL: h.TTL, OneConnection: h.OneConnection, Observe: observe}
	if h.Kind == "lease-async" {
		cfg.Durability = pgxlock.Async
	}
	if g.locks, err = pgxlock.NewLeaseLocker(h.pool, &cfg); err != nil {
		return nil, err
	}
	g.permits, err = g.locks.Semaphore(h.Permits)
	return g, err
}

// replace closes Lockers while their callers hold and wait, and puts another in the place of each.
func (h *holds) replace() {
	rng := h.rng(0)
	for {
		select {
		case <-h.stop:
			return
		case <-time.After(h.Closes/2 + time.Duration(rng.Int64N(int64(h.Closes)))):
		}
		h.mu.Lock()
		old := h.current
		g, err := h.next()
		if err != nil {
			panic(err) // as the first, it has no reason
		}
		h.current = g
		h.mu.Unlock()
		e := history.Event{What: history.FaultBegun, Fault: history.Close, Target: h.Name, Op: h.ops.Add(1)}
		h.history.Write(e)
		ctx, cancel := context.WithTimeout(context.Background(), txTimeout)
		err = old.close(ctx)
		cancel()
		e.What = history.FaultEnded
		if err != nil {
			e.Err = err.Error()
		}
		h.history.Write(e)
	}
}

func (h *holds) close(ctx context.Context) error {
	close(h.stop)
	h.stopped.Wait()
	if h.sqlPool != nil {
		h.sqlPool.Close()
	}
	return h.current.close(ctx)
}

// close closes the Locker, which releases what is held.
func (g *generation) close(ctx context.Context) error {
	g.mu.Lock()
	g.closing = true
	for r := range g.held {
		r.tell(history.ReleaseAsk, nil)
	}
	g.mu.Unlock()
	return g.locks.Close(ctx)
}

// begin writes what was granted, unless the Locker is being closed.
func (g *generation) begin(grants []grant) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing {
		return false
	}
	for _, of := range grants {
		g.held[of.request] = true
		of.write(of.granted())
	}
	return true
}

// end writes that releases are asked for, unless close has.
func (g *generation) end(grants []grant) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, of := range grants {
		if !g.closing {
			of.tell(history.ReleaseAsk, nil)
		}
		delete(g.held, of.request)
	}
}

// A grant is a request that was granted.
type grant struct {
	*request

	lock *pgxlock.Lock
}

func (of grant) granted() history.Event {
	e := history.Event{What: history.Granted, Holder: of.lock.Holder(), Token: of.lock.Token()}
	if _, number, ok := strings.Cut(of.lock.Key(), "#"); ok {
		e.Permit, _ = strconv.Atoi(number) // the key is ours
	}
	if deadline, ok := of.lock.Deadline(); ok {
		e.TTL, e.Deadline = of.TTL, history.At(deadline)
	}
	return e
}

// A waitingKey is the key of a context's function that observe calls when the call has to wait.
type waitingKey struct{}

func withWaiting(ctx context.Context, waiting func()) context.Context {
	return context.WithValue(ctx, waitingKey{}, waiting)
}

func observe(ctx context.Context, e pgxlock.Event) {
	if waiting, ok := ctx.Value(waitingKey{}).(func()); ok && e.Op == pgxlock.EventBusy {
		waiting()
	}
}

func (h *holds) do(ctx context.Context, c *caller) {
	if h.SQL && c.n%2 == 0 {
		h.callSQL(ctx, c)
		return
	}
	h.mu.Lock()
	g := h.current
	h.mu.Unlock()
	switch h.Kind {
	case "dotx":
		h.doTx(ctx, c, g)
	case "lead":
		if c.n == 1 {
			h.askToStepDown(ctx, c, g)
		} else {
			h.lead(ctx, c, g)
		}
	default:
		h.acquireAndHold(ctx, c, g)
	}
}

func (h *holds) acquireAndHold(ctx context.Context, c *caller, g *generation) {
	bound, try := c.maxWait()
	e := history.Event{Kind: history.Kind(h.Kind), Try: try, Locker: g.number}
	keys := []string{c.key()}
	switch h.Kind {
	case "shared":
		e.Kind, e.Shared = history.Lease, c.rng.IntN(3) > 0
	case "permit":
		e.Limit = h.Permits
	case "advisory":
		e.Shared = c.rng.IntN(3) == 0
	case "set":
		e.Set, keys = h.ops.Add(1), c.keys()
	}
	var requests []*request
	for _, key := range keys {
		e.Key = key
		requests = append(requests, c.ask(e))
	}
	r := requests[0]
	if h.Broken == "granting" && c.rng.IntN(20) == 0 {
		r.write(history.Event{What: history.Granted, Token: 1<<40 + r.op, TTL: h.TTL, Deadline: history.Now() + int64(h.TTL)})
		r.write(history.Event{What: history.Held, Began: history.Now()})
		r.tell(history.ReleaseAsk, nil)
		r.tell(history.Released, nil)
		return
	}
	call := ctx
	if len(requests) == 1 { // of a set it is not known where it waits
		call = withWaiting(ctx, func() { r.tell(history.Waiting, nil) })
	}
	call, cancel := c.callContext(call)
	locks, err := h.acquire(call, c, g, e, keys, bound)
	if err != nil {
		what := history.Refused // nothing is held after an error
		if withdrawn(call, err) || errors.Is(err, pgxlock.ErrNotAcquired) && len(bound) > 0 && !try {
			what = history.Withdrawn
		}
		for _, r := range requests {
			r.tell(what, err)
		}
		cancel()
		if e.Set != 0 {
			h.leftOf(ctx, g, e, requests)
		}
		return
	}
	cancel() // it bounds the wait only
	var grants []grant
	for _, r := range requests {
		if i := slices.IndexFunc(locks, func(l *pgxlock.Lock) bool { return e.Set == 0 || l.Key() == r.key }); i >= 0 {
			grants = append(grants, grant{r, locks[i]})
		} else {
			r.tell(history.Refused, errors.New("no lock of that key is in the set"))
		}
	}
	if !g.begin(grants) {
		for _, of := range grants {
			of.tell(history.Withdrawn, errors.Join(pgxlock.ErrClosed, of.lock.Release(context.Background())))
		}
		return
	}
	c.hold(ctx, ctx, g, c.held(), grants...)
	g.end(grants)
	for _, of := range grants {
		switch err := of.lock.Release(context.Background()); {
		case err == nil:
			of.tell(history.Released, nil)
		case errors.Is(err, pgxlock.ErrLost):
			of.tell(history.Lost, err)
		default:
			of.tell(history.Unknown, err)
		}
	}
}

func (h *holds) acquire(ctx context.Context, c *caller, g *generation, e history.Event, keys []string, bound []pgxlock.MaxWait) (pgxlock.Locks, error) {
	opts := options[pgxlock.AcquireOption](bound)
	switch {
	case h.Broken == "unordered" || h.Broken == "partial":
		return acquireOneByOne(ctx, g, keys, h.Broken == "partial", opts)
	case e.Set != 0:
		return g.locks.AcquireAll(ctx, keys, append(opts, h.mark(e))...)
	case h.Kind == "permit":
		lock, err := g.permits.Acquire(ctx, e.Key, options[pgxlock.PermitOption](bound)...)
		return pgxlock.Locks{lock}, err
	}
	if e.Shared {
		opts = append(opts, pgxlock.Shared)
	}
	lock, err := g.locks.Acquire(ctx, e.Key, opts...)
	return pgxlock.Locks{lock}, err
}

// acquireOneByOne is AcquireAll broken on purpose: callers deadlock and, with part, keep what they have when a key fails.
func acquireOneByOne(ctx context.Context, g *generation, keys []string, part bool, opts []pgxlock.AcquireOption) (locks pgxlock.Locks, err error) {
	for _, key := range keys {
		lock, err := g.locks.Acquire(ctx, key, opts...)
		switch {
		case err == nil:
			locks = append(locks, lock)
		case part && len(locks) > 0:
			return locks, nil
		default:
			return nil, errors.Join(err, locks.Release(context.WithoutCancel(ctx)))
		}
	}
	return locks, nil
}

// mark is the metadata of a set's holders.
func (h *holds) mark(e history.Event) pgxlock.Metadata {
	return pgxlock.Metadata(fmt.Sprint(h.Name, "/", e.Set))
}

// leftOf writes how many locks of a set are held after the call for it has failed. It asks for a while: a release may
// still be in flight.
func (h *holds) leftOf(ctx context.Context, g *generation, e history.Event, requests []*request) {
	for until := time.Now().Add(txTimeout); ; sleep(ctx, 100*time.Millisecond) {
		left := 0
		for _, r := range requests {
			holders, err := g.locks.Holders(ctx, r.key)
			if err != nil {
				return
			}
			for _, holder := range holders {
				if holder.Metadata == string(h.mark(e)) {
					left++
				}
			}
		}
		if left == 0 || time.Now().After(until) {
			requests[0].write(history.Event{What: history.Left, N: left, Err: "locks of a set that was not granted"})
			return
		}
	}
}

// hold works under locks until lasts has passed or work ends: it checks whether they are held, and writes.
func (c *caller) hold(ctx, work context.Context, g *generation, lasts time.Duration, grants ...grant) {
	const look = 50 * time.Millisecond
	var locks pgxlock.Locks
	for _, of := range grants {
		locks = append(locks, of.lock)
	}
	writes := 0
	if c.fenced() && c.rng.IntN(2) == 0 {
		writes = 1 + c.rng.IntN(2)
	}
	end := time.Now().Add(lasts)
	for {
		if !c.check(g, grants) {
			if c.Broken != "unfenced" || writes == 0 {
				return
			}
		}
		if writes > 0 && c.rng.IntN(2) == 0 {
			writes--
			of := pick(c.rng, grants...)
			of.writeUnder(ctx, of.lock.Token(), func(ctx context.Context, tx pgx.Tx) error {
				if c.Broken == "unfenced" {
					return nil
				}
				return locks.Fence(ctx, tx)
			})
			continue
		}
		rest := time.Until(end)
		if rest <= 0 || !sleep(work, min(rest, look)) {
			c.check(g, grants)
			return
		}
	}
}

// check writes which locks are held, and which are lost, and reports whether all are held.
func (c *caller) check(g *generation, grants []grant) bool {
	all := true
	for _, of := range grants {
		began := history.Now()
		err := of.lock.Err()
		if c.Broken == "deaf" {
			err = nil
		}
		g.mu.Lock()
		switch {
		case g.closing:
			all = false
		case err == nil:
			of.write(history.Event{What: history.Held, Began: began})
		case errors.Is(err, pgxlock.ErrLost):
			of.tell(history.Lost, err)
		}
		g.mu.Unlock()
		all = all && err == nil
	}
	return all
}
