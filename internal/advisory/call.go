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
	closing <-chan struct{} // closed when its caller must not wait any longer; nil: never
	asks    []ask
	query   *query // sent instead of asks; nil: none
	alone   bool   // it has a message of its own
	undo    bool   // it is from mux.undo: if it fails, the session must end
	bound   bool   // it makes sense only in the session for which it was made
	retried bool   // it was sent once, and has no answer
	brief   bool   // its caller does not wait long for a connection
	joins   bool   // it is sent with the next call: that of the caller the lock is left to
	state   atomic.Int32

	answers []answer
	one     [1]answer
	err     error
	sent    time.Duration // the time before it was sent

	queued time.Duration // when it began to wait for a connection, of a brief call
	late   atomic.Bool   // it has waited too long

	asker asker         // may be nil
	wake  chan struct{} // has room for the one signal that is sent; nil until its caller has to wait
}

// A query is a statement of another kind, and its rows.
type query struct {
	text string
	rows [][]string
}

// An asker processes the answer to its call. The leader calls answered, for one call after the
// other in their order. left: the caller does not wait any more. now is the time after the
// answer arrived.
type asker interface {
	answered(left bool, now instant)
}

// An instant is the same moment on the two clocks: that of deadlines, and the time of day.
type instant struct {
	clock time.Duration
	day   time.Time
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
	done := c.ctx.Done()
	if done == nil { // most cannot leave: a receive is cheaper than a select
		<-c.wake
		return true
	}
	select {
	case <-c.wake:
		return true
	case <-done:
		return false
	}
}

// dismissed reports whether its caller must not wait any longer.
func (c *call) dismissed() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

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
	if c.late.Load() {
		return lockerr.ErrNoAnswer
	}
	return nil
}

// settle answers a call, and wakes its caller if it waits.
func (c *call) settle(err error, now instant) {
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
