package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

//go:embed sql/write.sql
var writeSQL string

// workerEnv makes this program a worker, and has its order.
const workerEnv = "CHAOS_WORKER"

// txTimeout bounds each transaction, because a network that swallows answers never ends one.
const txTimeout = 5 * time.Second

// A process is a worker: callers that each make one call after the other until the end of stdin.
type process struct {
	order

	history *history.Writer
	pool    *pgxpool.Pool // for transactions
	ops     atomic.Int64
	writes  atomic.Int64
}

// A caller is a goroutine of a process.
type caller struct {
	*process

	n   int
	rng *rand.Rand
}

// A task is what the callers of a process do all the time.
type task interface {
	do(ctx context.Context, c *caller) // makes a call, and ends what it began
	close(ctx context.Context) error
}

func workerMain() int {
	var p process
	err := json.Unmarshal([]byte(os.Getenv(workerEnv)), &p.order)
	if err == nil {
		err = p.run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (p *process) run() (err error) {
	if p.history, err = history.Create(p.Dir, p.Name); err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(p.URL)
	if err != nil {
		return err
	}
	config.MaxConns = 5
	if p.pool, err = pgxpool.NewWithConfig(context.Background(), config); err != nil {
		return err
	}
	defer p.pool.Close()
	work, err := p.task()
	if err != nil {
		return err
	}
	ctx, end := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until who started us is through with us, or has died
		end()
	}()
	var callers sync.WaitGroup
	for n := 1; n <= p.Callers; n++ {
		callers.Go(func() {
			c := &caller{process: p, n: n, rng: p.rng(n)}
			for sleep(ctx, c.upTo(p.Pause)) {
				work.do(ctx, c)
			}
		})
	}
	callers.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return work.close(ctx)
}

func (p *process) task() (task, error) {
	switch p.Kind {
	case "limit":
		return newLimits(p)
	case "claim":
		return claims{}, nil
	case "once":
		return newRuns(p)
	case "tx":
		return txLocks{}, nil
	}
	return newHolds(p)
}

// rng returns the dice of a caller, 0 for the process itself.
func (p *process) rng(n int) *rand.Rand {
	h := fnv.New64a()
	_, _ = fmt.Fprint(h, p.Name, n) // never fails
	return rand.New(rand.NewPCG(p.Seed, h.Sum64()))
}

func (c *caller) upTo(d time.Duration) time.Duration {
	return time.Duration(c.rng.Int64N(int64(d) + 1))
}

// held returns for how long to hold: often not at all.
func (c *caller) held() time.Duration {
	if c.rng.IntN(4) == 0 {
		return 0
	}
	return c.upTo(c.Hold)
}

func (c *caller) key() string { return keyOf(c.rng.IntN(c.Keys)) }

func keyOf(n int) string { return fmt.Sprint("key-", n) }

// keys returns two or three keys in any order.
func (c *caller) keys() (keys []string) {
	for _, n := range c.rng.Perm(c.Keys)[:2+c.rng.IntN(2)] {
		keys = append(keys, keyOf(n))
	}
	return keys
}

// callContext returns a context for a call, which may end during it.
func (c *caller) callContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if c.Ends == 0 || c.rng.IntN(2) == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, c.upTo(c.Ends))
}

// maxWait returns the options of a call that bound its wait, and whether it does not wait.
func (c *caller) maxWait() (bound []pgxlock.MaxWait, try bool) {
	switch {
	case c.rng.IntN(6) == 0:
		return []pgxlock.MaxWait{pgxlock.NoWait}, true
	case c.MaxWait > 0 && c.rng.IntN(3) == 0:
		return []pgxlock.MaxWait{pgxlock.MaxWait(c.MaxWait)}, c.MaxWait == 0
	}
	return nil, false
}

// options returns options of one type as those of another.
func options[O any](bound []pgxlock.MaxWait) (opts []O) {
	for _, o := range bound {
		opts = append(opts, any(o).(O))
	}
	return opts
}

// A request is a call whose events have its number.
type request struct {
	*caller

	op  int64
	key string
}

// ask begins a request.
func (c *caller) ask(e history.Event) *request {
	r := &request{c, c.ops.Add(1), e.Key}
	e.What = history.Ask
	r.write(e)
	return r
}

func (r *request) write(e history.Event) {
	e.Caller, e.Op = r.n, r.op
	r.history.Write(e)
}

// tell writes an event that has no more than an error, perhaps nil.
func (r *request) tell(what history.What, err error) { r.tellOf(0, what, err) }

// tellOf is tell for an event of a write.
func (r *request) tellOf(write int64, what history.What, err error) {
	e := history.Event{What: what, Write: write}
	if err != nil {
		e.Err = err.Error()
	}
	r.write(e)
}

// withdrawn reports whether a call ended because its caller no longer wants it.
func withdrawn(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, pgxlock.ErrClosed)
}

// writeUnder writes a row under a lock in a transaction of its own, which fence begins. The transaction may last.
func (r *request) writeUnder(ctx context.Context, token int64, fence func(context.Context, pgx.Tx) error) {
	write := r.writes.Add(1)
	tell := func(what history.What, err error) { r.tellOf(write, what, err) }
	ctx, cancel := context.WithTimeout(ctx, txTimeout)
	defer cancel()
	tell(history.WriteAsk, nil)
	tx, err := r.pool.Begin(ctx)
	if err != nil {
		tell(history.WriteRefused, err)
		return
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // nothing after a commit
	if err = fence(ctx, tx); err == nil {
		_, err = tx.Exec(ctx, writeSQL, r.Name, r.op, write, r.key, token)
	}
	if err != nil {
		tell(history.WriteRefused, err)
		return
	}
	if r.rng.IntN(3) == 0 {
		sleep(ctx, r.upTo(r.Hold))
	}
	tell(history.CommitAsk, nil)
	err = tx.Commit(ctx)
	tell(outcome(err, history.Wrote, history.WriteRefused, history.WriteUnknown), err)
}

// outcome says what became of a commit: only an ERROR of the server means that it has refused it.
func outcome(err error, done, refused, unknown history.What) history.What {
	if err == nil {
		return done
	}
	if failed, ok := errors.AsType[*pgconn.PgError](err); errors.Is(err, pgx.ErrTxCommitRollback) || ok && failed.SeverityUnlocalized == "ERROR" {
		return refused
	}
	return unknown
}
