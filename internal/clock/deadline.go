package clock

import (
	"context"
	"sync"
	"time"
)

// A Deadline is a context that ends with its parent, or after a while. Where the caller of Err
// finds that the time is over, no timer is needed: one is made on first use of Done. The zero
// value is not usable; Start comes first.
type Deadline struct {
	parent context.Context
	until  time.Time
	cause  context.Context

	mu    sync.Mutex
	err   error         // why it has ended; nil: it has not, as far as is known
	over  bool          // it has ended because its time was over
	done  chan struct{} // closed when it has ended; nil before the first use of Done
	timer *time.Timer   // nil: none is needed
	leave func() bool   // ends the watch of the parent
}

// Start begins a Deadline that ends after a while. cause is a context that has ended: when the
// time is over, its cause is that of the Deadline.
func (d *Deadline) Start(parent, cause context.Context, after time.Duration) {
	d.parent, d.until, d.cause = parent, time.Now().Add(after), cause
}

// Stop ends the context, and frees what it needs.
func (d *Deadline) Stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endLocked(context.Canceled)
}

// Deadline implements [context.Context].
func (d *Deadline) Deadline() (time.Time, bool) {
	if until, ok := d.parent.Deadline(); ok && until.Before(d.until) {
		return until, true
	}
	return d.until, true
}

// Done implements [context.Context].
func (d *Deadline) Done() <-chan struct{} {
	_ = d.Err()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.done == nil {
		d.done = make(chan struct{})
		if d.err != nil {
			close(d.done)
			return d.done
		}
		d.timer = time.AfterFunc(time.Until(d.until), d.check)
		d.leave = context.AfterFunc(d.parent, d.check)
	}
	return d.done
}

// check notices that the context has ended.
func (d *Deadline) check() { _ = d.Err() }

// Err implements [context.Context]. It reads the clock.
func (d *Deadline) Err() error {
	parent := d.parent.Err() // without the mutex: it may be a context of ours, with a mutex of its own
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.err != nil:
	case parent != nil:
		d.endLocked(parent)
	case !time.Now().Before(d.until):
		d.over = true
		d.endLocked(context.DeadlineExceeded)
	}
	return d.err
}

func (d *Deadline) endLocked(why error) {
	if d.err != nil {
		return
	}
	d.err = why
	if d.done != nil {
		close(d.done)
		d.timer.Stop()
		d.leave()
	}
}

// Value implements [context.Context]. [context.Cause] asks here as well.
func (d *Deadline) Value(key any) any {
	d.mu.Lock()
	over := d.over
	d.mu.Unlock()
	if over {
		if v := d.cause.Value(key); v != nil {
			return v
		}
	}
	return d.parent.Value(key)
}
