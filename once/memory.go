package once

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock"
)

// NewMemory returns a Runner that remembers runs in the memory of this process, by its own
// clock: for a program's own unit tests, also in [testing/synctest] bubbles. It excludes only
// calls of the same Runner, and its leases are never lost. Otherwise it is as [New].
func NewMemory(period time.Duration, cfg *Config) (*Runner, error) {
	r, err := newRunner(period, cfg)
	if err != nil {
		return nil, fail("new", "", err)
	}
	if r.cfg.Retry {
		r.locks = pgxlock.NewMemoryLocker()
	}
	r.runs = &memoryRuns{cfg: r.cfg, slots: r.slots, known: make(map[string]map[int64]*memoryRun)}
	return r, nil
}

// memoryRuns is the backend of a Runner without a server. It does what the SQL functions do.
type memoryRuns struct {
	cfg   Config
	slots slots

	mu    sync.Mutex
	known map[string]map[int64]*memoryRun // by key, and by slot in microseconds
}

type memoryRun struct {
	state, holder, lease string
	attempt              int
	keepUntil            time.Time
}

// again reports whether a run that was recorded before may be started.
func (r *memoryRun) again(retry bool, first First) bool {
	return r.state == runWithdrawn || r.state == runSkipped && first == FirstNow || retry && (r.state == runFailed || r.state == runRunning && r.lease != "")
}

func (m *memoryRuns) find(context.Context) error { return nil }
func (m *memoryRuns) close()                     {}

func (m *memoryRuns) due(_ context.Context, key string, missed int, first First) (found []dueSlot, lasts time.Duration, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for i := -missed; i <= 0; i++ {
		slot := m.slots.at(now, i)
		r, known := m.known[key][slot.UnixMicro()]
		due := !known || r.again(m.cfg.Retry, first)
		if i == 0 || due && m.begunLocked(key, slot) {
			found = append(found, dueSlot{slot: slot, due: due})
		}
	}
	return found, m.slots.at(now, 1).Sub(now), nil
}

// begunLocked reports whether a run of the slot or an earlier one is recorded.
func (m *memoryRuns) begunLocked(key string, slot time.Time) bool {
	for other := range m.known[key] {
		if other <= slot.UnixMicro() {
			return true
		}
	}
	return false
}

func (m *memoryRuns) start(_ context.Context, key string, w which, holder, lease string) (startedRun, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now, keep, slot := time.Now(), m.cfg.Keep, w.slot
	if slot.IsZero() {
		slot = m.slots.at(now, 0)
	}
	of := m.known[key]
	if of == nil {
		of = make(map[int64]*memoryRun)
		m.known[key] = of
	}
	for at, r := range of {
		if r.keepUntil.Before(now) {
			delete(of, at)
		}
	}
	r, known := of[slot.UnixMicro()]
	switch {
	case known && !r.again(lease != "", w.first):
		return startedRun{slot: slot}, false, nil
	case slot.Before(now.Add(-keep)):
		return startedRun{}, false, &TickError{Tick: slot, Err: fmt.Errorf("it is older than what is kept, %s: whether it was run is not known any more", keep)}
	case slot.After(now.Add(keep)):
		return startedRun{}, false, &TickError{Tick: slot, Err: fmt.Errorf("it is further ahead than runs are kept, %s", keep)}
	case len(of) == 0 && !w.tick && w.first == FirstNext:
		of[slot.UnixMicro()] = &memoryRun{state: runSkipped, holder: holder, keepUntil: now.Add(keep)}
		return startedRun{slot: slot}, false, nil
	case !known:
		r = &memoryRun{attempt: 1}
		of[slot.UnixMicro()] = r
	case r.state != runWithdrawn:
		r.attempt++
	}
	r.state, r.holder, r.lease, r.keepUntil = runRunning, holder, lease, now.Add(keep)
	if slot.After(now) {
		r.keepUntil = slot.Add(keep)
	}
	return startedRun{slot: slot, attempt: r.attempt}, false, nil
}

func (m *memoryRuns) finish(key string, slot time.Time, holder, state, _ string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, known := m.known[key][slot.UnixMicro()]
	if !known || r.holder != holder || r.state != runRunning {
		return false, nil
	}
	r.state = state
	return true, nil
}
