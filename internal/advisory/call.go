package advisory

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A call is the requests of one caller to the lock session, and the answers.
type call struct {
	ctx     context.Context
	closing context.Context // ends when its caller must not wait any longer; nil: never
	asks    []ask
	query   string // sent instead of asks, if it is not empty
	alone   bool   // it has a message of its own
	undo    bool   // it is from mux.undo: if it fails, the session must end

	bound   bool // it makes sense only in the session for which it was made
	retried bool // it was sent once, and has no answer

	answers []answer
	one     [1]answer
	rows    [][]string // of query
	err     error
	sent    time.Duration // the time before it was sent

	asker asker // may be nil

	state atomic.Int32
	wake  chan struct{} // has room for the one signal that is sent; nil until its caller has to wait
}

// An asker processes the answer to its call. The leader calls answered, for one call after the
// other in their order. left: the caller does not wait any more. now is the time after the
// answer arrived.
type asker interface {
	answered(left bool, now time.Duration)
}

// The states of a call.
const (
	callQueued  int32 = iota
	callLeads         // its caller leads, or is woken to lead
	callLeft          // its caller does not wait for it
	callSettled       // it has its answer
)

// woken waits until the call is woken. It returns false if its caller leaves before. It does
// not wait for the end of closing, a channel that all callers would share, and contend for:
// mux.dismissAll wakes them, if it comes later.
func (c *call) woken() bool {
	if c.dismissed() {
		return false
	}
	select {
	case <-c.wake:
		return true
	case <-c.ctx.Done():
		return false
	}
}

// dismissed reports whether its caller must not wait any longer.
func (c *call) dismissed() bool { return c.closing != nil && c.closing.Err() != nil }

// leave lets its caller leave if it waits. It must be dismissed, or have nothing to wait for.
func (c *call) leave() {
	if c.state.CompareAndSwap(callQueued, callLeft) {
		c.wake <- struct{}{}
	}
}

// why returns why the caller leaves, or nil if it does not. ctx is the call's.
func (c *call) why(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if c.dismissed() {
		return lockerr.ErrClosed
	}
	return nil
}

// settle answers a call, and wakes its caller if it waits.
func (c *call) settle(err error, now time.Duration) {
	c.err = err
	state := c.state.Load()
	for state != callLeft && !c.state.CompareAndSwap(state, callSettled) {
		state = c.state.Load()
	}
	if c.asker != nil {
		c.asker.answered(state == callLeft, now)
	}
	if state == callQueued {
		c.wake <- struct{}{}
	}
}

// releases reports whether the call is a release, which undo repeats.
func (c *call) releases() bool {
	return len(c.asks) > 0 && c.asks[0] == c.asks[0].undone()
}
