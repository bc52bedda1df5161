package batcher

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Housekeeping removes, now and then, what no process released and none wants. No promise
// depends on it.
type Housekeeping struct {
	Reap func() error
	Log  *slog.Logger

	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// reapInterval is about how often each process reaps.
const reapInterval = 10 * time.Minute

// Start begins it, once; the first reap comes an interval later.
func (h *Housekeeping) Start() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.timer != nil || h.stopped {
		return
	}
	h.timer = time.AfterFunc(clock.Jitter(reapInterval), func() {
		if err := h.Reap(); err != nil && !errors.Is(err, lockerr.ErrClosed) {
			h.Log.Warn("pgxlock: housekeeping failed", "error", err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if !h.stopped {
			h.timer.Reset(clock.Jitter(reapInterval))
		}
	})
}

// Stop ends it for good.
func (h *Housekeeping) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	if h.timer != nil {
		h.timer.Stop()
	}
}

// Running reports whether Start was called, and whether Stop was.
func (h *Housekeeping) Running() (started, stopped bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.timer != nil, h.stopped
}
