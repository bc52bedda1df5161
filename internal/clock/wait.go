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
