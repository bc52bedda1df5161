package advisory

import (
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
)

// A spinning lets a leader wait for an answer for a moment without falling asleep. A server
// that is near has answered before the threads of this process have fallen asleep and woken up
// again, which also costs the processors more than to look for the answer meanwhile. A lone
// caller sleeps: no other runs in the meantime, and the server can have its processor. The wait
// only delays a read, so nothing depends on it. Only the leader uses it.
type spinning struct {
	asleep int       // how many more answers are waited for asleep
	missed int       // how many waits in a row were too short
	slept  time.Time // when a leader fell asleep last
}

const (
	// spinTime and spinTimeEach are how long such a wait takes at most: about what it costs to
	// fall asleep and wake up, and what the server needs for each request of a message.
	spinTime     = 40 * time.Microsecond
	spinTimeEach = 4 * time.Microsecond

	// mostSpinning bounds the callers and the requests. Of more callers some run all the time, so
	// that the threads stay awake; and for more requests a leader would look for long.
	mostSpinning = 128

	mostMissed = 6 // of 2^6 answers of a server that is far one is waited for so

	// mostAwake is how long leaders may be awake, one after the other. While a goroutine can run
	// on each processor, the scheduler asks only once in 10 ms what other connections received.
	mostAwake = 2 * time.Millisecond
)

// wait returns when there is something to read, or when it is time to fall asleep. readable is
// nil if nobody can tell.
func (s *spinning) wait(g *batcher.Gathering, requests int, readable func() bool) {
	begun := time.Now()
	if s.asleep > 0 || begun.Sub(s.slept) > mostAwake || readable == nil || g.Hurry > 0 || g.Active < 2 || max(g.Active, requests) > mostSpinning {
		s.asleep = max(s.asleep-1, 0)
		s.slept = begun
		return
	}
	most := spinTime + time.Duration(requests)*spinTimeEach
	for now := begun; !readable(); now = g.Yield(now, most) {
		if now.Sub(begun) > most {
			s.missed = min(s.missed+1, mostMissed)
			s.asleep = 1<<s.missed - 1
			return
		}
	}
	s.missed = 0
}
