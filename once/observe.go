package once

import (
	"context"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/observe"
)

// An observedRun is the events of one run that a call asks for. A nil one tells nobody.
type observedRun struct {
	runner *Runner
	ctx    context.Context
	event  pgxlock.Event // what they have in common
	began  time.Time     // when the call was made, and then when fn was called
	held   time.Duration // how long fn ran; 0: it has not returned
}

// observeRun begins a call; slot is zero if it is not known yet.
func (r *Runner) observeRun(ctx context.Context, key string, slot time.Time) *observedRun {
	if r.cfg.Observe == nil {
		return nil
	}
	return &observedRun{runner: r, ctx: ctx, began: time.Now(), event: pgxlock.Event{Key: key, Slot: slot, Call: observe.Call()}}
}

// of says which run it is.
func (o *observedRun) of(slot time.Time) {
	if o != nil {
		o.event.Slot = slot
	}
}

// notStarted tells that fn is not called, and which error the call returns.
func (o *observedRun) notStarted(err error) {
	if o == nil {
		return
	}
	e := o.event
	e.Op, e.Err = pgxlock.EventRun, err
	o.tell(e)
}

// started tells that fn is called next.
func (o *observedRun) started(run Run, holder string) {
	if o == nil {
		return
	}
	o.event.Slot, o.event.Attempt, o.event.Holder, o.event.Token = run.Slot, run.Attempt, holder, run.Lock.Token()
	e := o.event
	e.Op, e.Granted = pgxlock.EventRun, true
	o.tell(e)
	o.began = time.Now()
}

// returned notes how long fn ran: to record its end takes longer.
func (o *observedRun) returned() {
	if o != nil {
		o.held = time.Since(o.began)
	}
}

// ended tells that the end of the run is recorded, or could not be.
func (o *observedRun) ended(err error) {
	if o == nil {
		return
	}
	e := o.event
	e.Op, e.Held, e.Err = pgxlock.EventRunEnded, o.held, err
	o.tell(e)
}

func (o *observedRun) tell(e pgxlock.Event) {
	e.Time = time.Now()
	if e.Op == pgxlock.EventRun {
		e.Wait = e.Time.Sub(o.began)
	}
	observe.Tell(o.ctx, o.runner.cfg.Logger, o.runner.cfg.Observe, e)
}
