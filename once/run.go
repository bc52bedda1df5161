package once

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Run runs fn once in each period, over all processes that call Run for the key, until ctx
// ends. A key of which no run is recorded begins with the next period, so that fn does not run
// at the moment of its first deployment; see [Config].First for the other way. Run asks the
// server how long the period lasts, sleeps that long, and asks again. So fn is never early by
// the server's clock, whatever the clock of this process says.
//
// Run calls fn for one period after the other. It records and logs what fn returns, and goes
// on; a panic ends it. With [Config].Retry it asks about every TTL, until the period is over,
// whether a run that failed, or whose process died, can be started again. A period that is
// over before any process has started it was missed: Run runs it late if [Config].CatchUp
// says so. Periods are also missed if fn takes longer than a period and no other process
// calls Run.
//
// Run waits for a server that cannot be reached. It returns an [*pgxlock.Error]: with ctx's
// error, with [pgxlock.ErrClosed], or with an error that does not pass: [pgxlock.ErrSchema],
// missing rights, or a key or configuration that the server refuses.
func (r *Runner) Run(ctx context.Context, key string, fn func(ctx context.Context, run Run) error) error {
	if err := r.begin(ctx, key, fn); err != nil {
		return fail("once", key, err)
	}
	defer r.calls.End()
	ctx, cancel := r.untilClosed(ctx)
	defer cancel()
	failures := 0
	for {
		next, err := r.round(ctx, key, fn)
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
				r.cfg.Logger.Warn("pgxlock: runs cannot be started; trying again", "key", key, "error", err)
			}
			pause = r.cfg.Backoff(failures)
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

// lookAgain is the longest sleep of Run, because clocks may be set and machines sleep.
const lookAgain = time.Minute

// round runs what is due, and returns when to ask again.
func (r *Runner) round(ctx context.Context, key string, fn func(context.Context, Run) error) (next time.Time, err error) {
	first := cmp.Or(r.cfg.First, FirstNext)
	due, lasts, err := r.due(ctx, key, r.cfg.CatchUp, first)
	if err != nil {
		return next, err
	}
	// Processes should not all ask at the same moment, and none so late that it matters.
	jitter := rand.N(max(min(r.slots.period/20, 100*time.Millisecond), 1))
	next = time.Now().Add(lasts + jitter)
	for _, d := range due {
		if !d.due {
			continue
		}
		ran, err := r.perform(ctx, key, which{slot: d.slot, first: first}, fn, r.observeRun(ctx, key, d.slot))
		if err != nil && !ran {
			return next, err
		}
		if err != nil {
			r.cfg.Logger.Warn("pgxlock: a run failed", "key", key, "slot", d.slot, "error", err)
		}
		if again := time.Now().Add(clock.Jitter(r.cfg.TTL)); r.cfg.Retry && (err != nil || !ran) && again.Before(next) {
			next = again
		}
	}
	if latest := time.Now().Add(lookAgain + jitter); latest.Before(next) { // with the jitter: without it next would lose its own, a little in each period
		next = latest
	}
	return next, nil
}
