package batcher

import (
	"math/bits"
	"runtime"
	"time"
)

// A Gathering lets a leader wait for the other callers that are about to ask. Callers that
// were answered together tend to ask again together, but a little later than the first of
// them: if that one sent its request at once, it would pay a round trip alone, and the others
// the next one. The two would alternate from then on. Only the leader uses it.
type Gathering struct {
	// Patience is how many calls of the scheduler in a row may bring nobody; 1,000 take about
	// 100 microseconds. The thread that will run the others may have to wake up first, but a
	// wait should take no longer than what a message costs beside its entries. Each wait that
	// ends without all active callers halves the patience, and each other one doubles it again.
	Patience int

	Most   int // with more active callers none waits: their own work takes longer than such a wait saves
	Active int // callers that the last message answered, and those that were queued then
	Hurry  int // how many messages are sent without a wait, because the processors are busy
	failed int // how many more waits ended without all active callers than with them
}

const (
	// longest is how long the first of those who come waits for the last.
	longest = time.Millisecond

	// slowYield is when other goroutines keep the processors busy: each further call of the
	// scheduler might take as long as their time slices. For each such time that a call took,
	// the next hurried messages are sent without a wait.
	slowYield = 200 * time.Microsecond
	hurried   = 16
)

// Answered records how many callers a message answered, and how many were queued then.
func (g *Gathering) Answered(callers, queued int) {
	g.Active = callers + queued
	g.Hurry = max(g.Hurry-1, 0)
}

// Enough reports whether to send a message before the last answers are told, because most of
// the active callers are queued, or waiting does not pay.
func (g *Gathering) Enough(queued int) bool { return g.hurries() || 4*queued >= 3*g.Active }

func (g *Gathering) hurries() bool { return g.Hurry > 0 || g.Active > g.Most }

// Wait lets other goroutines run until all active callers are queued, or no more come.
func (g *Gathering) Wait(queued func() int) {
	n := queued()
	if n == 0 || n >= g.Active || g.hurries() {
		return
	}
	begun := time.Now()
	for now, nobody := begun, 0; n < g.Active; nobody++ {
		if nobody > g.Patience>>g.failed || now.Sub(begun) > longest {
			g.failed = min(g.failed+1, bits.Len(uint(g.Patience)))
			return
		}
		yielded, before := now, n
		runtime.Gosched()
		now, n = time.Now(), queued()
		if slow := int(now.Sub(yielded) / slowYield); slow > 0 {
			g.Hurry = slow * hurried
			return
		}
		if n > before {
			nobody = -1
		}
	}
	g.failed = max(g.failed-1, 0)
}
