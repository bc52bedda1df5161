package pgxlock

import (
	"context"
	"errors"
	"sync"
	"time"
)

// housekeeping removes, now and then, leases that nobody released and nobody
// wants. Nothing depends on it.
type housekeeping struct {
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// reapInterval is about how often each Locker reaps.
const reapInterval = 10 * time.Minute

func (h *housekeeping) start(t *leaseTable) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.timer != nil || h.stopped {
		return
	}
	h.timer = time.AfterFunc(withJitter(reapInterval), func() {
		err := t.requests.do(ioTimeout, func(ctx context.Context, q querier, _ bool) error {
			return q.exec(ctx, t.place.statement("reap"))
		})
		if err != nil && !errors.Is(err, ErrClosed) {
			t.locker.log.Warn("pgxlock: reaping expired leases failed", "error", err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if !h.stopped {
			h.timer.Reset(withJitter(reapInterval))
		}
	})
}

func (h *housekeeping) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	if h.timer != nil {
		h.timer.Stop()
	}
}
