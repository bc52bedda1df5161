package systemtest_test

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/pgxlock/pgxlock"
)

// doubled is what a backoff would wait without jitter, counted in another way.
func doubled(first, most time.Duration, attempt int) time.Duration {
	first = max(first, time.Millisecond)
	most = max(most, first)
	for ; attempt > 0 && first <= most/2; attempt-- {
		first *= 2
	}
	if attempt > 0 {
		return most
	}
	return first
}

func TestBackoffDoublesUpToItsMost(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		first, most := time.Duration(rapid.Int64().Draw(t, "first")), time.Duration(rapid.Int64().Draw(t, "most"))
		attempt := rapid.OneOf(rapid.IntRange(-3, 70), rapid.Int()).Draw(t, "attempt")
		want := doubled(first, most, attempt)
		if got := pgxlock.ExponentialBackoff(first, most)(attempt); got < want-want/2 || got > want {
			t.Errorf("%s, want %s to %s", got, want-want/2, want)
		}
	})
	backoff := pgxlock.ExponentialBackoff(10*time.Millisecond, 500*time.Millisecond)
	for attempt, want := range map[int]time.Duration{
		math.MinInt: 10 * time.Millisecond, -1: 10 * time.Millisecond, 0: 10 * time.Millisecond, 1: 20 * time.Millisecond, 5: 320 * time.Millisecond,
		6: 500 * time.Millisecond, 62: 500 * time.Millisecond, 63: 500 * time.Millisecond, 64: 500 * time.Millisecond, 1e9: 500 * time.Millisecond, math.MaxInt: 500 * time.Millisecond,
	} {
		least, most := time.Duration(math.MaxInt64), time.Duration(0)
		for range 2000 {
			d := backoff(attempt)
			least, most = min(least, d), max(most, d)
		}
		if least < want/2 || most > want {
			t.Errorf("attempt %d: %s to %s, want %s to %s", attempt, least, most, want/2, want)
		}
		if least > want*6/10 || most < want*9/10 { // of 2000, one in five is beyond each
			t.Errorf("attempt %d: only %s to %s", attempt, least, most)
		}
	}
}
