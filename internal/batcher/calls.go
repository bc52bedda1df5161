package batcher

import (
	"context"
	"sync"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Calls counts the calls in flight, and lets no new one begin once it is closed.
type Calls struct {
	mu       sync.Mutex     // held while a call begins, and while Close ends closing
	inFlight sync.WaitGroup // no call is added once closing has ended
	closing  context.Context
	close    context.CancelCauseFunc
}

// NewCalls returns Calls that are open.
func NewCalls() Calls {
	closing, end := context.WithCancelCause(context.Background())
	return Calls{closing: closing, close: end}
}

// Begin counts a call, which End ends. After Close it returns [lockerr.ErrClosed].
func (c *Calls) Begin() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing.Err() != nil {
		return lockerr.ErrClosed
	}
	c.inFlight.Add(1)
	return nil
}

// End ends a call.
func (c *Calls) End() { c.inFlight.Done() }

// Go runs f in a goroutine that counts as a call. A call must be in flight.
func (c *Calls) Go(f func()) { c.inFlight.Go(f) }

// Close lets no call begin anymore. Wait, called later, misses none that has begun.
func (c *Calls) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.close(lockerr.ErrClosed)
}

// Closing ends with Close.
func (c *Calls) Closing() context.Context { return c.closing }

// Wait waits until no call is in flight.
func (c *Calls) Wait() { c.inFlight.Wait() }

// Await runs ask in a goroutine and returns its answer, or ctx's error once ctx ends; the
// answer that arrives after that goes to late. Both count as calls. A call must be in flight.
func Await[A any](ctx context.Context, c *Calls, ask func() A, late func(A)) (A, error) {
	answered := make(chan A, 1)
	c.Go(func() { answered <- ask() })
	select {
	case a := <-answered:
		return a, nil
	case <-ctx.Done():
		c.Go(func() { late(<-answered) })
		var none A
		return none, lockerr.ContextError(ctx)
	}
}

// Until waits for wait to return, or for ctx to end.
func Until(ctx context.Context, wait func()) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return lockerr.ContextError(ctx)
	}
}
