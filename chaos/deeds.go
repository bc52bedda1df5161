package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/chaos/internal/history"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

//go:embed sql/alive.sql
var aliveSQL string

// limits is the task for events of a rate.
type limits struct{ *ratelimit.Limiter }

func newLimits(p *process) (limits, error) {
	l, err := ratelimit.New(p.pool, ratelimit.Limit(p.Rate), p.Burst, &ratelimit.Config{Owner: p.Name + ".1"})
	return limits{l}, err
}

func (l limits) close(ctx context.Context) error { return l.Close(ctx) }

func (l limits) do(ctx context.Context, c *caller) {
	key, wait := c.key(), c.rng.IntN(3) == 0
	r := c.ask(history.Event{Kind: history.Limit, Key: key, Limit: c.Burst, Rate: float64(c.Rate), N: 1, Try: !wait})
	call, cancel := c.callContext(ctx)
	defer cancel()
	var err error
	granted := true
	if wait {
		err = l.Wait(call, key, pgxlock.MaxWait(c.MaxWait))
	} else {
		granted, err = l.Allow(call, key)
	}
	switch {
	case err == nil && granted:
		r.tell(history.Granted, nil)
	case err == nil, errors.Is(err, ratelimit.ErrLimited):
		r.tell(history.Refused, err)
	default:
		r.tell(history.Unknown, err)
	}
}

// claims is the task for claims, of keys that are new every now and then.
type claims struct{}

func (claims) close(context.Context) error { return nil }

func (claims) do(ctx context.Context, c *caller) {
	const lasts = 300 * time.Millisecond
	key := fmt.Sprint("claim-", history.Now()/int64(lasts)-int64(c.rng.IntN(3)), "-", c.rng.IntN(c.Keys))
	bound, try := c.maxWait()
	r := c.ask(history.Event{Kind: history.Claim, Key: key, Try: try})
	r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) {
		first, err := pgxlock.ClaimTx(ctx, tx, key, options[pgxlock.ClaimTxOption](bound)...)
		switch {
		case err != nil:
			r.tell(history.Withdrawn, err) // its transaction is rolled back
		case !first:
			r.tell(history.Refused, nil)
		default:
			r.tell(history.Granted, nil)
			r.finish(ctx, tx, history.CommitAsk, history.Committed, history.RolledBack)
		}
	})
}

// txLocks is the task for locks that end with a transaction.
type txLocks struct{}

func (txLocks) close(context.Context) error { return nil }

func (txLocks) do(ctx context.Context, c *caller) {
	key := c.key()
	bound, try := c.maxWait()
	e := history.Event{Kind: history.Tx, Key: key, Try: try, Shared: c.rng.IntN(3) == 0}
	opts := options[pgxlock.LockTxOption](bound)
	if e.Shared {
		opts = append(opts, pgxlock.Shared)
	}
	r := c.ask(e)
	r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) {
		if err := pgxlock.LockTx(ctx, tx, key, opts...); err != nil {
			what := history.Refused
			if withdrawn(ctx, err) || errors.Is(err, pgxlock.ErrNotAcquired) {
				what = history.Withdrawn
			}
			r.tell(what, err)
			return
		}
		r.tell(history.Granted, nil)
		for range 2 {
			began := history.Now()
			if _, err := tx.Exec(ctx, aliveSQL); err != nil { // the session has ended, and with it the lock
				r.tell(history.Lost, err)
				return
			}
			r.write(history.Event{What: history.Held, Began: began})
			sleep(ctx, c.held())
		}
		r.finish(ctx, tx, history.ReleaseAsk, history.Released, history.Released)
	})
}

// inTx calls f in a transaction that is rolled back unless f ends it.
func (r *request) inTx(ctx context.Context, f func(context.Context, pgx.Tx)) {
	ctx, cancel := r.callContext(ctx)
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, txTimeout)
	defer cancel()
	tx, err := r.pool.Begin(ctx)
	if err != nil {
		r.tell(history.Withdrawn, err) // Refused would say that there is another holder
		return
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	f(ctx, tx)
}

// finish commits, or now and then rolls back.
func (r *request) finish(ctx context.Context, tx pgx.Tx, asks, committed, not history.What) {
	if r.rng.IntN(4) == 0 {
		if asks == history.ReleaseAsk {
			r.tell(asks, nil)
		}
		err := tx.Rollback(ctx)
		r.tell(outcome(err, not, not, history.Unknown), err)
		return
	}
	r.tell(asks, nil)
	err := tx.Commit(ctx)
	r.tell(outcome(err, committed, not, history.Unknown), err)
}

// runs is the task for jobs that run once in each period.
type runs struct{ *once.Runner }

func newRuns(p *process) (runs, error) {
	r, err := once.New(p.pool, 500*time.Millisecond, &once.Config{Owner: p.Name + ".1"})
	return runs{r}, err
}

func (o runs) close(ctx context.Context) error { return o.Close(ctx) }

func (o runs) do(ctx context.Context, c *caller) {
	key := c.key()
	r := c.ask(history.Event{Kind: history.Once, Key: key})
	call, cancel := c.callContext(ctx)
	defer cancel()
	ran, err := o.Do(call, key, func(ctx context.Context, run once.Run) error {
		r.write(history.Event{What: history.Granted, Period: run.Slot.UTC().Format(time.RFC3339Nano)})
		sleep(ctx, c.held())
		if c.rng.IntN(4) == 0 {
			return errors.New("it failed on purpose") // it is over all the same
		}
		return nil
	})
	switch {
	case ran:
		r.tell(history.Released, err)
	case err != nil:
		r.tell(history.Unknown, err)
	default:
		r.tell(history.Refused, nil)
	}
}
