package advisory

import (
	"runtime"
	"time"
)

// A gathering lets a leader wait for the other callers that are about to ask. Callers that
// were answered together tend to ask again together, but a little later than the first of
// them: if that one sent its request at once, it would pay a round trip alone, and the others
// the next one. Only the leader uses it.
type gathering struct {
	active int // callers that the last message answered, and those that were queued then
	hurry  int // how many messages are sent without a wait, because the processors are busy
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

// answered records how many callers a message answered, and how many were queued then.
func (g *gathering) answered(callers, queued int) {
	g.active = callers + queued
	g.hurry = max(g.hurry-1, 0)
}

// enough reports whether to send a message now, because most of the active callers are queued.
func (g *gathering) enough(queued int) bool { return g.hurry > 0 || 4*queued >= 3*g.active }

// wait lets other goroutines run until enough callers are queued, or no more come.
func (g *gathering) wait(queued func() int) {
	before := 0
	for range maxYields {
		n := queued()
		if n == before || g.enough(n) {
			return
		}
		before = n
		start := time.Now()
		runtime.Gosched()
		if time.Since(start) > slowYield {
			g.hurry = hurried
		}
	}
}
