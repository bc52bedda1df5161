package hold

import (
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A Group is the holds of one Locker. It ends those whose deadlines have passed, where no
// caller calls a method that would notice. Go's timers stop while the machine sleeps, so it
// never waits longer than half a hold's margin: then Done is closed before another caller can
// acquire the lock. One timer serves all holds, and runs until there are none: a lock that is
// acquired and released meanwhile costs it nothing.
type Group struct {
	Clock   clock.Clock
	Backend Backend // set before the first hold

	mu    sync.Mutex
	held  map[*Hold]struct{}
	timer *time.Timer
	due   time.Duration // when the timer fires, on Clock; 0: it is stopped
}

// Begin prepares a new hold for a try.
func (g *Group) Begin(h *Hold, owner Owner, key string, queue lockkey.Name) {
	h.group, h.owner, h.Key, h.Queue = g, owner, key, queue
}

// Holds returns what is held now.
func (g *Group) Holds() []*Hold {
	g.mu.Lock()
	defer g.mu.Unlock()
	held := make([]*Hold, 0, len(g.held))
	for h := range g.held {
		held = append(held, h)
	}
	return held
}

// add adds a hold, which the timer checks after d at the latest.
func (g *Group) add(h *Hold, d, now time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held == nil {
		g.held = make(map[*Hold]struct{})
	}
	g.held[h] = struct{}{}
	g.checkInLocked(d, now)
}

func (g *Group) forget(h *Hold) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.held, h)
}

// checkInLocked makes the timer check all holds after d at the latest; forever: it need not.
func (g *Group) checkInLocked(d, now time.Duration) {
	if d == forever || g.due != 0 && g.due <= now+d {
		return
	}
	g.due = now + d
	if g.timer == nil {
		g.timer = time.AfterFunc(d, g.check)
	} else {
		g.timer.Reset(d)
	}
}

// check checks every hold.
func (g *Group) check() {
	g.mu.Lock()
	g.due = 0
	g.mu.Unlock()
	next := forever
	for _, h := range g.Holds() {
		h.mu.Lock()
		now := g.Clock()
		if h.checkLocked(now) == nil {
			next = min(next, h.patienceLocked(now))
		}
		h.unlock()
	}
	if next == forever {
		return
	}
	now := g.Clock()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.checkInLocked(next, now)
}
