package pgxlock

import (
	"math/rand/v2"
	"time"
)

// ExponentialBackoff returns how long to wait before asking again, for
// [LeaseConfig.Backoff] and [AdvisoryConfig.Backoff], or a program's own retries: first
// before the second try, the attempt 0, then twice as long each time, but never longer
// than most. Jitter takes up to half of it off, so that those who failed together do
// not come back together.
//
// The function keeps nothing between calls, so that one serves all waits, from any
// number of goroutines; attempts below 0 count as 0. A first of less than 1 ms counts as
// 1 ms, so that a forgotten unit is no busy loop, and a most below first as first.
func ExponentialBackoff(first, most time.Duration) func(attempt int) time.Duration {
	first = max(first, time.Millisecond)
	most = max(most, first)
	return func(attempt int) time.Duration {
		d := most
		if attempt = max(attempt, 0); first <= most>>attempt { // which is 0 in the end, so that nothing overflows
			d = first << attempt
		}
		return d - rand.N(d/2+1)
	}
}

// defaultBackoff is for all that nobody is told the end of, unless the caller has
// another one.
var defaultBackoff = ExponentialBackoff(10*time.Millisecond, 500*time.Millisecond)
