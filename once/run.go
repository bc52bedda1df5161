package once

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Run runs fn once in each period, over all processes that call Run for the key, until
// ctx ends. It sleeps until the server's clock says that the next period begins, and
// asks then whether the run is still to be started, so that fn is never early by that
// clock, whatever the clock here says.
//
// The calls of fn here come one after the other. What fn returns is recorded and
// logged, and Run goes on; a panic ends it. With [Config].Retry what failed, or
// crashed elsewhere, is looked at again about every TTL until its period is over. A
// period that is over before anybody has started it was missed: it is run late as far
// as [Config].CatchUp says, else not at all. So it is if fn here takes longer than
// a period and no other process is there.
//
// A server that is away is waited for. Run returns an [*pgxlock.Error]: with ctx's error, with
// [pgxlock.ErrClosed], or with what does not pass by itself: [pgxlock.ErrSchema], missing rights, or a
// key or a configuration that the server refuses.
func (o *Runner) Run(ctx context.Context, key string, fn func(ctx context.Context, run Run) error) error {
	if err := o.begin(ctx, key, fn); err != nil {
		return fail("once", key, err)
	}
	defer o.calls.End()
	ctx, cancel := o.untilClosed(ctx)
	defer cancel()
	failures := 0
	for {
		next, err := o.round(ctx, key, fn)
		var pause time.Duration
		switch {
		case ctx.Err() != nil:
			return fail("once", key, runEnded(ctx))
		case err == nil:
			failures = 0
			pause = time.Until(next)
		case !lockerr.Transient(err):
			return fail("once", key, err)
		default:
			if failures == 0 {
				o.cfg.Logger.Warn("pgxlock: runs cannot be started; trying again", "key", key, "error", err)
			}
			pause = o.cfg.Backoff(failures)
			failures++
		}
		if !clock.Sleep(ctx, pause) {
			return fail("once", key, runEnded(ctx))
		}
	}
}

func runEnded(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), lockerr.ErrClosed) {
		return lockerr.ErrClosed
	}
	return lockerr.ContextError(ctx)
}

// lookAgain is how long Run sleeps at most: clocks may be set, and machines sleep.
const lookAgain = time.Minute

// round runs what is due, and returns when to look again.
func (o *Runner) round(ctx context.Context, key string, fn func(context.Context, Run) error) (next time.Time, err error) {
	due, lasts, err := o.due(ctx, key, o.cfg.CatchUp)
	if err != nil {
		return next, err
	}
	// Who comes at the same moment as all others should not; nor so late that it
	// matters.
	jitter := rand.N(max(min(o.slots.period/20, 100*time.Millisecond), 1))
	next = time.Now().Add(lasts + jitter)
	for _, d := range due {
		if !d.due {
			continue
		}
		ran, err := o.perform(ctx, key, d.slot, fn)
		if err != nil && !ran {
			return next, err
		}
		if err != nil {
			o.cfg.Logger.Warn("pgxlock: a run failed", "key", key, "slot", d.slot, "error", err)
		}
		if again := time.Now().Add(clock.Jitter(o.cfg.TTL)); o.cfg.Retry && (err != nil || !ran) && again.Before(next) {
			next = again
		}
	}
	if latest := time.Now().Add(lookAgain + jitter); latest.Before(next) { // the jitter, too: else next would lose its own, a little in each period
		next = latest
	}
	return next, nil
}
