package advisory

import (
	"testing"
	"time"
)

func TestLeadersAreLookedAtLessOftenWhileMessagesFlow(t *testing.T) {
	slept, looks := time.Duration(0), 0
	for sleep := linger; slept < time.Second; sleep = nextLinger(sleep, true) {
		if sleep > mostLinger {
			t.Fatalf("the end of the session is noticed after %v", sleep)
		}
		slept += sleep
		looks++
	}
	if looks > 60 {
		t.Errorf("they are looked at %d times in a second", looks)
	}
	if sleep := nextLinger(mostLinger, false); sleep != linger {
		t.Errorf("with the same message in flight, or none, the next look is after %v", sleep)
	}
}
