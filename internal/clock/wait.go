package clock

import (
	"context"
	"math/rand/v2"
	"time"
)

// Sleep waits for d. It returns false if ctx ended before.
func Sleep(ctx context.Context, d time.Duration) bool {
	_, ended := Rest(ctx, d, nil)
	return !ended
}

// Rest waits for d, or until it is woken, or ctx ends.
func Rest(ctx context.Context, d time.Duration, wake <-chan struct{}) (woken, ended bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return false, false
	case <-wake:
		return true, false
	case <-ctx.Done():
		return false, true
	}
}

// Jitter changes d by up to a quarter, so that processes do not act in step.
func Jitter(d time.Duration) time.Duration {
	return d - d/4 + rand.N(d/2)
}

// Backoff returns a function that says how long to pause before the next try. After attempt 0
// the pause is first; each further attempt doubles it, up to most. Random jitter shortens it
// by up to half.
func Backoff(first, most time.Duration) func(attempt int) time.Duration {
	first = max(first, time.Millisecond)
	most = max(most, first)
	return func(attempt int) time.Duration {
		d := most
		if attempt = max(attempt, 0); first <= most>>attempt { // the shift ends at 0, so nothing overflows
			d = first << attempt
		}
		return d - rand.N(d/2+1)
	}
}

// DefaultBackoff paces tries whose success no notification announces, unless the caller
// configured another backoff.
var DefaultBackoff = Backoff(10*time.Millisecond, 500*time.Millisecond)
