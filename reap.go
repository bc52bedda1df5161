package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/sql"
)

// housekeeping removes, now and then, what nobody gave back and nobody wants.
// Nothing depends on it.
type housekeeping struct {
	reap func() error
	log  *slog.Logger

	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// reapInterval is about how often each Locker reaps.
const reapInterval = 10 * time.Minute

func (h *housekeeping) start() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.timer != nil || h.stopped {
		return
	}
	h.timer = time.AfterFunc(withJitter(reapInterval), func() {
		if err := h.reap(); err != nil && !errors.Is(err, ErrClosed) {
			h.log.Warn("pgxlock: housekeeping failed", "error", err)
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

// reap removes leases that expired long ago.
func (t *leaseTable) reap() error {
	return cmp.Or(t.requests.Do(dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) error {
		for _, statement := range []statements.Name{statements.LeaseReap, statements.LeaseReapShared} {
			rows := q.Query(ctx, t.place.Statement(statement))
			rows.Close()
			if rows.Err() != nil {
				return rows.Err()
			}
		}
		return nil
	}), t.locker.queue.reap())
}
