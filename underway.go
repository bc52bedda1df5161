package pgxlock

import (
	"context"
	"sync"
)

// underWay is the calls that Close waits for, and the end of them.
type underWay struct {
	door       sync.Mutex     // held while a call begins, and while closing does
	calls      sync.WaitGroup // none begins when closing has ended
	closing    context.Context
	beginClose context.CancelCauseFunc
}

func newUnderWay() underWay {
	closing, begin := context.WithCancelCause(context.Background())
	return underWay{closing: closing, beginClose: begin}
}

// begin counts a call, which calls.Done ends.
func (u *underWay) begin() error {
	u.door.Lock()
	defer u.door.Unlock()
	if u.closing.Err() != nil {
		return ErrClosed
	}
	u.calls.Add(1)
	return nil
}

// refuse lets no call begin any more. None that has begun is missed by calls.Wait then.
func (u *underWay) refuse() {
	u.door.Lock()
	defer u.door.Unlock()
	u.beginClose(ErrClosed)
}
