package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

// holds is the task for locks that are held until they are released: leases, shared or not, advisory locks and permits.
type holds struct {
	*process

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

// begin writes that a request was granted, unless the Locker is being closed.
func (g *generation) begin(r *request, granted history.Event) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing {
		return false
	}
	g.held[r] = true
	r.write(granted)
	return true
}

// end writes that a release is asked for, unless close has.
func (g *generation) end(r *request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closing {
		r.tell(history.ReleaseAsk, nil)
	}
	delete(g.held, r)
}

// requestKey is what a call's context has its request under, for observe.
type requestKey struct{}

// observe writes which calls have to wait.
func observe(ctx context.Context, e pgxlock.Event) {
	if r, ok := ctx.Value(requestKey{}).(*request); ok && e.Op == pgxlock.EventBusy {
		r.tell(history.Waiting, nil)
	}
}

func (h *holds) do(ctx context.Context, c *caller) {
	h.mu.Lock()
	g := h.current
	h.mu.Unlock()
	bound, try := c.maxWait()
	e := history.Event{Kind: history.Kind(h.Kind), Key: c.key(), Try: try, Locker: g.number}
	switch h.Kind {
	case "shared":
		e.Kind, e.Shared = history.Lease, c.rng.IntN(3) > 0
	case "permit":
		e.Limit = h.Permits
	case "advisory":
		e.Shared = c.rng.IntN(3) == 0
	}
	r := c.ask(e)
	if h.Broken == "granting" && c.rng.IntN(20) == 0 {
		r.write(history.Event{What: history.Granted, Token: 1<<40 + r.op, TTL: h.TTL, Deadline: history.Now() + int64(h.TTL)})
		r.write(history.Event{What: history.Held, Began: history.Now()})
		r.tell(history.ReleaseAsk, nil)
		r.tell(history.Released, nil)
		return
	}
	call, cancel := c.callContext(context.WithValue(ctx, requestKey{}, r))
	lock, err := h.acquire(call, g, e, bound)
	if err != nil {
		what := history.Refused // nothing is held after an error
		if withdrawn(call, err) || errors.Is(err, pgxlock.ErrNotAcquired) && len(bound) > 0 && !try {
			what = history.Withdrawn
		}
		r.tell(what, err)
		cancel()
		return
	}
	cancel() // it bounds the wait only
	granted := history.Event{What: history.Granted, Token: lock.Token()}
	if h.Kind == "permit" {
		_, number, _ := strings.Cut(lock.Key(), "#")
		granted.Permit, _ = strconv.Atoi(number) // the key is ours
	}
	if deadline, ok := lock.Deadline(); ok {
		granted.TTL, granted.Deadline = h.TTL, history.At(deadline)
	}
	if !g.begin(r, granted) {
		r.tell(history.Withdrawn, errors.Join(pgxlock.ErrClosed, lock.Release(context.Background())))
		return
	}
	r.hold(ctx, g, lock, e.Key)
	g.end(r)
	switch err := lock.Release(context.Background()); {
	case err == nil:
		r.tell(history.Released, nil)
	case errors.Is(err, pgxlock.ErrLost):
		r.tell(history.Lost, err)
	default:
		r.tell(history.Unknown, err)
	}
}

func (h *holds) acquire(ctx context.Context, g *generation, e history.Event, bound []pgxlock.MaxWait) (*pgxlock.Lock, error) {
	if h.Kind == "permit" {
		return g.permits.Acquire(ctx, e.Key, options[pgxlock.PermitOption](bound)...)
	}
	opts := options[pgxlock.AcquireOption](bound)
	if e.Shared {
		opts = append(opts, pgxlock.Shared)
	}
	return g.locks.Acquire(ctx, e.Key, opts...)
}

// hold works under a lock: it looks whether it still has it, and writes.
func (r *request) hold(ctx context.Context, g *generation, lock *pgxlock.Lock, key string) {
	const look = 50 * time.Millisecond
	writes := 0
	if r.fenced() && r.rng.IntN(2) == 0 {
		writes = 1 + r.rng.IntN(2)
	}
	end := time.Now().Add(r.held())
	for {
		if !r.check(g, lock) {
			if r.Broken != "unfenced" || writes == 0 {
				return
			}
		}
		if writes > 0 && r.rng.IntN(2) == 0 {
			writes--
			r.writeUnder(ctx, key, lock.Token(), func(ctx context.Context, tx pgx.Tx) error {
				if r.Broken == "unfenced" {
					return nil
				}
				return lock.Fence(ctx, tx)
			})
			continue
		}
		rest := time.Until(end)
		if rest <= 0 || !sleep(ctx, min(rest, look)) {
			r.check(g, lock)
			return
		}
	}
}

// check writes that the lock is held, or that it is lost.
func (r *request) check(g *generation, lock *pgxlock.Lock) bool {
	began := history.Now()
	err := lock.Err()
	if r.Broken == "deaf" {
		err = nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closing:
		return false
	case err == nil:
		r.write(history.Event{What: history.Held, Began: began})
	case errors.Is(err, pgxlock.ErrLost):
		r.tell(history.Lost, err)
	}
	return err == nil
}
