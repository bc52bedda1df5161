//go:build !linux

package clock

import (
	"sync"
	"time"
)

var system struct {
	sync.Mutex
	last   time.Time
	passed time.Duration
}

// System adds up, from reading to reading, whichever of the monotonic and the wall clock
// has advanced more: the first stops while some systems sleep, the second may be set back.
func System() time.Duration {
	now := time.Now()
	system.Lock()
	defer system.Unlock()
	if !system.last.IsZero() {
		// Round(0) strips the monotonic reading.
		system.passed += max(now.Sub(system.last), now.Round(0).Sub(system.last.Round(0)), 0)
	}
	system.last = now
	return system.passed
}
