package pgxlock

import (
	"testing"
	"time"
)

// AcquireAll waits for b so long that a, which nobody renews here, is lost.
func TestAcquireAllStartsOverWhenItLosesWhatItHolds(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answers = []answer{{}}
		for range 7 { // 1 + 2 + ... + 7 s: past the local deadline of a
			server.answers = append(server.answers, busyFor(time.Hour))
		}
		locks, err := l.AcquireAll(t.Context(), []string{"b", "a"})
		if err != nil {
			t.Fatal(err)
		}
		if len(locks) != 2 || locks[0].Key() != "a" || locks[1].Key() != "b" {
			t.Fatalf("%d locks", len(locks))
		}
		for _, lock := range locks {
			if err := lock.Err(); err != nil {
				t.Errorf("%s: %v", lock.Key(), err)
			}
			if until, _ := lock.Deadline(); time.Until(until) < testTTL/2 {
				t.Errorf("%s is believed for %s only", lock.Key(), time.Until(until))
			}
		}
		if n := len(server.tries); n != 2+6+2 {
			t.Errorf("asked %d times, want a and b, 6 times b, and both again", n)
		}
	})
}

// What was granted before the wait is short of its deadline when the wait ends.
func TestAcquireAllRenewsWhatItHeldForLong(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answers = []answer{{}}
		for range 6 { // 21 s
			server.answers = append(server.answers, busyFor(time.Hour))
		}
		locks, err := l.AcquireAll(t.Context(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		if until, _ := locks[0].Deadline(); time.Until(until) < testTTL/2 {
			t.Errorf("believed for %s only", time.Until(until))
		}
		if server.renewals != 1 {
			t.Errorf("%d renewals, want one", server.renewals)
		}
	})
}
