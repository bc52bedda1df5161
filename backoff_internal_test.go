package pgxlock

import (
	"testing"
	"time"
)

func TestTheDefaultBackoffGoesFromTenMillisecondsToHalfASecond(t *testing.T) {
	t.Parallel()
	backoff, _ := orDefaults(nil, nil)
	for attempt, most := range map[int]time.Duration{0: 10 * time.Millisecond, 1: 20 * time.Millisecond, 6: 500 * time.Millisecond, 1000: 500 * time.Millisecond} {
		if d := backoff(attempt); d < most/2 || d > most {
			t.Errorf("attempt %d: %s, want %s to %s", attempt, d, most/2, most)
		}
	}
}
