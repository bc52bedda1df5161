package pgxlock

import (
	"sync"
	"time"
)

// A watch makes locks notice that their deadlines have passed when nobody asks
// them. Go's timers stand still while the machine sleeps, so that it never waits
// longer than half a lock's margin: then Done is closed before somebody else can be
// granted the lock. It is one timer for all locks of a Locker, and goes on until it
// finds none: a lock that comes and goes meanwhile costs it nothing.
type watch struct {
	locker *Locker

	mu    sync.Mutex
	timer *time.Timer
	due   time.Duration // when it looks, on the Locker's clock; 0: not at all
}

// add watches a lock; l.mu is held.
func (w *watch) add(l *Lock, now time.Duration) {
	if l.deadline != forever {
		w.lookIn(l.patience(now), now)
	}
}

// patience is how long the lock need not be looked at; l.mu is held.
func (l *Lock) patience(now time.Duration) time.Duration {
	return max(min(l.margin/2, l.deadline-now), 0)
}

// lookIn makes the watch look no later than after d.
func (w *watch) lookIn(d, now time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.due != 0 && w.due <= now+d {
		return
	}
	w.due = now + d
	if w.timer == nil {
		w.timer = time.AfterFunc(d, w.look)
	} else {
		w.timer.Reset(d)
	}
}

// look looks at every lock.
func (w *watch) look() {
	w.mu.Lock()
	w.due = 0
	w.mu.Unlock()
	next := forever
	for _, l := range w.locker.locks() {
		l.mu.Lock()
		now := w.locker.now()
		if l.lookAt(now) == nil && l.deadline != forever {
			next = min(next, l.patience(now))
		}
		l.unlock()
	}
	if next != forever {
		w.lookIn(next, w.locker.now())
	}
}
