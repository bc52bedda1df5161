package batcher

import (
	"runtime"
	"time"
)

// A Gathering lets a leader wait for the other callers that are about to ask. Callers that
// were answered together tend to ask again together, but a little later than the first of
// them: if that one sent its request at once, it would pay a round trip alone, and the others
// the next one. Only the leader uses it.
type Gathering struct {
	Active int // callers that the last message answered, and those that were queued then
	Hurry  int // how many messages are sent without a wait, because the processors are busy
}

const (
	// A wait is a few calls of the scheduler, and ends when one of them brings nobody.
	maxYields = 8

	// slowYield is when other goroutines keep the processors busy: each further call of the
	// scheduler might take as long as their time slices.
	slowYield = 200 * time.Microsecond

	// hurried is for how many messages no leader waits after a slow one.
	hurried = 1024
)

// Answered records how many callers a message answered, and how many were queued then.
func (g *Gathering) Answered(callers, queued int) {
	g.Active = callers + queued
	g.Hurry = max(g.Hurry-1, 0)
}

// Enough reports whether to send a message now, because most of the active callers are queued.
func (g *Gathering) Enough(queued int) bool { return g.Hurry > 0 || 4*queued >= 3*g.Active }

// Wait lets other goroutines run until enough callers are queued, or no more come.
func (g *Gathering) Wait(queued func() int) {
	before := 0
	for range maxYields {
		n := queued()
		if n == before || g.Enough(n) {
			return
		}
		before = n
		start := time.Now()
		runtime.Gosched()
		if time.Since(start) > slowYield {
			g.Hurry = hurried
		}
	}
}
