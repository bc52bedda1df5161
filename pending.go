package pgxlock

import (
	"context"
	"sync/atomic"
)

// pending is what one caller has asked for in a batch, until the caller has the
// answer or has left.
type pending struct {
	settled atomic.Bool   // by the answer, or by the caller who left
	done    chan struct{} // closed with the answer
	err     error         // the answer
}

// await returns the error of the answer, or leaves when ctx ends, with its cause.
func (p *pending) await(ctx context.Context) error {
	select {
	case <-p.done:
	case <-ctx.Done():
		if p.settled.CompareAndSwap(false, true) {
			return context.Cause(ctx)
		}
		<-p.done
	}
	return p.err
}

// answer tells the caller, and reports false if it has left.
func (p *pending) answer(err error) bool {
	p.err = err // nobody reads it before done is closed
	if !p.settled.CompareAndSwap(false, true) {
		return false
	}
	close(p.done)
	return true
}
