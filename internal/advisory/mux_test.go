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
	if looks > 70 {
		t.Errorf("they are looked at %d times in a second", looks)
	}
	if sleep := nextLinger(mostLinger, false); sleep != linger {
		t.Errorf("with the same message in flight, or none, the next look is after %v", sleep)
	}
}

// The sleep in which the last messages were sent is not followed by another one.
func TestSessionIsReadAgainAfterTheSleepThatSawTheLastMessage(t *testing.T) {
	if !quietFor(true, mostLinger) || !quietFor(true, linger) {
		t.Error("it sleeps once more after the last message")
	}
	if quietFor(true, linger/2) {
		t.Error("it reads between two messages")
	}
	if !quietFor(false, 0) {
		t.Error("it does not read where no message was sent")
	}
}
