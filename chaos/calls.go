package main

import (
	"context"
	_ "embed"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/chaos/internal/history"
)

//go:embed sql/conflict.sql
var conflictSQL string

// doTx has DoTx write a row. Some transactions fail as if they conflicted with another, and are begun again, or fail for
// good: of each call there is one row, or none.
func (h *holds) doTx(ctx context.Context, c *caller, g *generation) {
	const retries = 1
	bound, try := c.maxWait()
	r, write := c.ask(history.Event{Kind: history.DoTx, Key: c.key(), Try: try, Locker: g.number}), c.writes.Add(1)
	r.tellOf(write, history.WriteAsk, nil) // before the fence
	ctx, cancel := c.callContext(withWaiting(ctx, func() { r.tell(history.Waiting, nil) }))
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, 2*txTimeout)
	defer cancel()
	called, commits, conflicts := false, false, max(0, c.rng.IntN(6)-3)
	err := g.locks.DoTx(ctx, h.pool, r.key, func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
		of := grant{r, lock}
		if commits = false; !called {
			called = true
			r.write(of.granted())
		}
		defer r.tell(history.ReleaseAsk, nil)
		_, err := tx.Exec(ctx, writeSQL, h.Name, r.op, write, r.key, lock.Token())
		if err == nil && h.Broken == "outside" {
			_, err = h.pool.Exec(ctx, writeSQL, h.Name, r.op, write, r.key, lock.Token())
		}
		if err != nil {
			return err
		}
		c.check(g, []grant{of})
		sleep(ctx, c.held())
		if conflicts > 0 {
			conflicts--
			_, err := tx.Exec(ctx, conflictSQL)
			return err
		}
		commits = c.check(g, []grant{of})
		if !commits {
			return context.Canceled
		}
		r.tellOf(write, history.CommitAsk, nil)
		return nil
	}, append(options[pgxlock.DoTxOption](bound), pgxlock.Retries(retries))...)
	wrote := history.WriteRefused
	if err == nil || commits {
		wrote = outcome(err, history.Wrote, history.WriteRefused, history.WriteUnknown)
	}
	r.tellOf(write, wrote, err)
	ended := history.Unknown // of the release
	switch {
	case !called && withdrawn(ctx, err):
		ended = history.Withdrawn
	case !called:
		ended = history.Refused
	case err == nil:
		ended = history.Released
	case errors.Is(err, pgxlock.ErrLost):
		ended = history.Lost
	}
	r.tell(ended, err)
}

// lead leads until it resigns, or until it is asked to step down or loses its lock, and then campaigns again.
func (h *holds) lead(ctx context.Context, c *caller, g *generation) {
	bound, _ := c.maxWait()
	ask := history.Event{Kind: history.Lead, Key: c.key(), Locker: g.number}
	r := c.ask(ask) // of the term to come
	call, cancel := c.callContext(withWaiting(ctx, func() { r.tell(history.Waiting, nil) }))
	defer cancel()
	err := g.locks.Lead(call, ask.Key, func(work context.Context, lock *pgxlock.Lock) error {
		of, lasts := grant{r, lock}, c.held()
		if c.rng.IntN(3) == 0 {
			lasts = time.Hour
		}
		r.write(of.granted())
		term := work
		if h.Broken == "deaf" {
			term = ctx
		}
		c.hold(ctx, term, g, lasts, of)
		if errors.Is(context.Cause(work), pgxlock.ErrStepDown) && h.Broken != "deaf" {
			r.tell(history.StepsDown, context.Cause(work))
		}
		r.tell(history.ReleaseAsk, nil)
		r.tell(history.Unknown, nil) // Lead does not return what became of the release
		r = c.ask(ask)
		return nil
	}, options[pgxlock.PermitOption](bound)...)
	r.tell(history.Withdrawn, err)
}

// askToStepDown asks the leader for a key to step down.
func (h *holds) askToStepDown(ctx context.Context, c *caller, g *generation) {
	if !sleep(ctx, c.upTo(time.Second)) {
		return
	}
	r := c.ask(history.Event{Kind: history.StepDown, Key: c.key()})
	call, cancel := c.callContext(ctx)
	defer cancel()
	what := history.Granted
	err := g.locks.AskToStepDown(call, r.key)
	if err != nil {
		what = history.Unknown
	}
	r.tell(what, err)
}
