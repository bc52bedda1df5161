//go:build !linux

package pgxlock

import (
	"sync/atomic"
	"time"
)

var (
	clockStart = time.Now()
	clockLast  atomic.Int64
)

func systemClock() time.Duration {
	now := time.Now()
	// Round(0) strips the monotonic reading: what remains is the wall clock.
	d := max(now.Sub(clockStart), now.Round(0).Sub(clockStart.Round(0)))
	for {
		last := clockLast.Load()
		if int64(d) <= last {
			return time.Duration(last) // the wall clock was set back
		}
		if clockLast.CompareAndSwap(last, int64(d)) {
			return d
		}
	}
}
