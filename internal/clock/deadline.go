package clock

import (
	"context"
	"sync/atomic"
	"time"
)

// A Deadline is a context that ends with its parent, or after a while. It is that of
// [context.WithTimeoutCause], but made only when Done is called or the end is noticed: most
// calls return before, and need no timer. The zero value is not usable; Start comes first, and
// once.
type Deadline struct {
	parent context.Context
	until  time.Time
	cause  error
	made   atomic.Pointer[madeContext] // nil: none was needed yet
}

// A madeContext is a context with its end.
type madeContext struct {
	context.Context
	end context.CancelFunc
}

// stopped is the context of every Deadline that was stopped before it needed one.
var stopped = func() *madeContext {
	ctx, end := context.WithCancel(context.Background())
	end()
	return &madeContext{ctx, end}
}()

// Start begins a Deadline that ends after a while, with that cause.
func (d *Deadline) Start(parent context.Context, after time.Duration, cause error) {
	d.parent, d.until, d.cause = parent, time.Now().Add(after), cause
}

// Stop ends the context, and frees what it needs.
func (d *Deadline) Stop() {
	if !d.made.CompareAndSwap(nil, stopped) {
		d.made.Load().end()
	}
}

// context makes the context, unless it is made. The parent may be a caller's, with a mutex of
// its own: no mutex is held while it is asked.
func (d *Deadline) context() *madeContext {
	if c := d.made.Load(); c != nil {
		return c
	}
	ctx, end := context.WithDeadlineCause(d.parent, d.until, d.cause)
	c := &madeContext{ctx, end}
	if !d.made.CompareAndSwap(nil, c) {
		end() // another goroutine made one meanwhile
		return d.made.Load()
	}
	return c
}

// Deadline implements [context.Context].
func (d *Deadline) Deadline() (time.Time, bool) {
	if until, ok := d.parent.Deadline(); ok && until.Before(d.until) {
		return until, true
	}
	return d.until, true
}

// Done implements [context.Context].
func (d *Deadline) Done() <-chan struct{} { return d.context().Done() }

// Err implements [context.Context]. It asks the parent, because the context of a lock reads
// the clock and then ends its children.
func (d *Deadline) Err() error {
	if d.parent.Err() != nil || !time.Now().Before(d.until) || d.made.Load() != nil {
		return d.context().Err()
	}
	return nil
}

// Value implements [context.Context]. The package context looks here for its own context, to
// add children to it and to read the cause.
func (d *Deadline) Value(key any) any {
	if c := d.made.Load(); c != nil {
		if v := c.Value(key); v != nil {
			return v
		}
	}
	return d.parent.Value(key)
}
