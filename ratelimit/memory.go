package ratelimit

import (
	"sync"
	"time"
)

// A memory is the backend of a Limiter without a server.
type memory struct {
	rule  rule
	began time.Time // the clock counts from then

	mu    sync.Mutex
	tats  map[string]int64
	sweep int // so many keys are worth a look for those that are not used any more
}

func newMemory(r rule) *memory {
	return &memory{rule: r, began: time.Now(), tats: make(map[string]int64), sweep: 1024}
}

func (m *memory) close() {}

func (m *memory) ask(requests ...*request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range requests {
		clock := time.Now() // one, or what fits exactly would not if time passes in between
		now := clock.Sub(m.began).Nanoseconds()
		tat := m.tats[r.key]
		if r.unused != nil {
			tat = m.rule.refund(tat, now, r.n, *r.unused)
		} else {
			var after int64
			if r.got.Delay, after = m.rule.take(tat, now, r.n); r.got.Delay <= r.maxDelay(clock) {
				tat, r.got.Granted = after, true
			}
		}
		r.got.TAT = tat
		if tat > now {
			m.tats[r.key] = tat
		} else {
			delete(m.tats, r.key)
		}
		r.Answer(nil)
	}
	if len(m.tats) >= m.sweep {
		m.removeIdle()
		m.sweep = max(1024, 2*len(m.tats))
	}
}

// removeIdle removes the keys whose buckets are full; mu is held.
func (m *memory) removeIdle() {
	now := time.Since(m.began).Nanoseconds()
	for key, tat := range m.tats {
		if tat <= now {
			delete(m.tats, key)
		}
	}
}
