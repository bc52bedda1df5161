package batcher

import (
	"runtime"
	"time"
)

// A Gathering lets a leader wait for the other callers that are about to ask. Callers that
// were answered together tend to ask again together, but a little later than the first of
// them: if that one sent its request at once, it would pay a round trip alone, and the others
// the next one. The two would alternate from then on. Only the leader uses it.
type Gathering struct {
	Active    int           // callers that the last message answered, and those that were queued then
	Hurry     int           // how many messages are sent without a wait, because goroutines of this process compute
	Took      time.Duration // how long the last message took, until its answer was there
	failed    int           // how many more waits ended without all active callers than with them
	impatient int           // in how many more messages few calls of the scheduler may bring nobody
	since     time.Time     // when used was read; zero: not yet for this message
	used      time.Duration // the processor time of the process until then
}

const (
	// The thread that will run the other callers may have to wake up first. So a wait goes on
	// while calls of the scheduler bring nobody, for a share of the time that a message takes.
	// It is counted in calls. Each wait that ends without all active callers halves that number
	// the next time, and each other one doubles it again.
	shareOfMessage      = 4
	callsPerMicrosecond = 10 // about
	mostCalls           = 2048

	// longest is how long the first of those who come waits for the last.
	longest = time.Millisecond

	// In a crowd nobody waits: what the callers do themselves takes longer than such a wait saves,
	// unless the time that a message takes is more than workOfCaller for each of them.
	crowd        = 24
	workOfCaller = 10 * time.Microsecond

	// slowYield is when a call of the scheduler has taken long. If other goroutines have computed
	// meanwhile, for at least a shareOfYield of it, each further call might take as long as their
	// time slices: for each slowYield that they used, the next hurried messages are sent without
	// a wait. Otherwise other processes had the processors: those who are about to ask come as
	// soon as this one has them again, so that only vain calls are few for a while.
	slowYield        = 200 * time.Microsecond
	shareOfYield     = 8
	hurried          = 16
	mostHurried      = 4096 // after a minute of computing
	impatience       = 64
	callsOfImpatient = 3
)

// Answered records how many callers a message answered, how many were queued then, and how long
// the message took.
func (g *Gathering) Answered(callers, queued int, took time.Duration) {
	g.Active, g.Took = callers+queued, took
	g.Hurry = max(g.Hurry-1, 0)
	g.impatient = max(g.impatient-1, 0)
	g.since = time.Time{}
}

// Enough reports whether to send a message before the last answers are told, because most of
// the active callers are queued, or waiting does not pay.
func (g *Gathering) Enough(queued int) bool { return g.hurries() || 4*queued >= 3*g.all() }

// all is how many callers may be in the next message.
func (g *Gathering) all() int { return min(g.Active, MaxRequests) }

func (g *Gathering) hurries() bool {
	return g.Hurry > 0 || g.Active > crowd && time.Duration(g.Active)*workOfCaller > g.Took
}

// Wait lets other goroutines run until all active callers are queued, or as many as a message
// carries, or no more come.
func (g *Gathering) Wait(queued func() int) {
	n := queued()
	if n == 0 || n >= g.all() || g.hurries() {
		return
	}
	patience := min(int(g.Took/shareOfMessage/time.Microsecond)*callsPerMicrosecond, mostCalls) >> g.failed
	if g.impatient > 0 {
		patience = min(patience, callsOfImpatient)
	}
	begun := time.Now()
	for now, nobody := begun, 0; n < g.all(); nobody++ {
		if nobody > patience || now.Sub(begun) > longest {
			if patience > 0 {
				g.failed++
			}
			return
		}
		before := n
		if now = g.Yield(now, 0); g.Hurry > 0 {
			return
		}
		if n = queued(); n > before {
			nobody = -1
		}
	}
	g.failed = max(g.failed-1, 0)
}

// Yield lets other goroutines run, and returns when they have. If that took long, and longer
// than they need, because they compute, the next messages are sent in a hurry.
func (g *Gathering) Yield(now time.Time, need time.Duration) time.Time {
	if g.since.IsZero() {
		g.since, g.used = now, processorTime()
	}
	runtime.Gosched()
	later := time.Now()
	if need = max(need, slowYield); later.Sub(now) < need {
		return later
	}
	used := processorTime()
	g.slow(later.Sub(now), used-g.used-now.Sub(g.since), need) // until it yielded, the leader ran
	g.since, g.used = later, used
	return later
}

// slow is told that a call of the scheduler took long, and how much processor time others of this
// process used meanwhile.
func (g *Gathering) slow(took, others, need time.Duration) {
	if others < max(slowYield, took/shareOfYield) {
		g.impatient = impatience
		return
	}
	g.Hurry = min(max(int(others/need), 1), mostHurried/hurried) * hurried
}
