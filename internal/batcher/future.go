package batcher

import (
	"context"
	"sync/atomic"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A Future is the answer to one caller's request in a batch. The caller may leave before
// the answer comes.
type Future struct {
	settled atomic.Bool   // by the answer, or by the caller that left
	done    chan struct{} // closed with the answer
	err     error         // the answer
}

// NewFuture returns a Future without an answer.
func NewFuture() Future { return Future{done: make(chan struct{})} }

// Settled reports whether the answer was given, or the caller has left.
func (f *Future) Settled() bool { return f.settled.Load() }

// Leave settles the Future without an answer. It reports false if there is one.
func (f *Future) Leave() bool { return f.settled.CompareAndSwap(false, true) }

// Answered is closed with the answer, and never if the caller left before it.
func (f *Future) Answered() <-chan struct{} { return f.done }

// Err returns the answer, once Answered is closed.
func (f *Future) Err() error { return f.err }

// Await returns the error of the answer, or leaves when ctx ends, with its cause. Until the
// answer is there it also leaves when closing is closed, with [lockerr.ErrClosed]; nil: never.
func (f *Future) Await(ctx context.Context, closing <-chan struct{}) error {
	var left error
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		left = context.Cause(ctx)
	case <-closing:
		left = lockerr.ErrClosed
	}
	if f.Leave() {
		return left
	}
	<-f.done
	return f.err
}

// Answer gives the caller the answer. It reports false if the caller has left.
func (f *Future) Answer(err error) bool {
	f.err = err // nobody reads it before done is closed
	if !f.settled.CompareAndSwap(false, true) {
		return false
	}
	close(f.done)
	return true
}
