package locktest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock"
)

// A Ledger keeps account of what a Locker's Observe is told, and of what must not be: an
// event too many, out of its order, or of another lock than it says. One is for one
// Locker.
type Ledger struct {
	mu       sync.Mutex
	calls    map[uint64]*observedCall
	locks    map[observedKey]*observedLock
	told     map[pgxlock.EventOp]int // by Op
	problems []string
}

type observedCall struct {
	busy, over bool
	key        string
	err        error
}

// observedKey is what tells the locks of a process apart.
type observedKey struct {
	call   uint64
	key    string
	permit int
}

type observedLock struct {
	acquired pgxlock.Event
	telling  bool // Observe is at an event of it
	over     bool // it was lost or released
	released bool
	leads    bool // a term has begun, and has not ended
}

// Observe is for LeaseConfig and AdvisoryConfig.
func (l *Ledger) Observe(_ context.Context, e pgxlock.Event) {
	lock := l.enter(e)
	runtime.Gosched() // who does not wait for this call comes in between
	l.mu.Lock()
	defer l.mu.Unlock()
	if lock != nil {
		lock.telling = false
	}
}

func (l *Ledger) enter(e pgxlock.Event) *observedLock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calls == nil {
		l.calls, l.locks, l.told = make(map[uint64]*observedCall), make(map[observedKey]*observedLock), make(map[pgxlock.EventOp]int)
	}
	l.told[e.Op]++
	l.must(e, e.Call > 0 && e.Kind != 0 && !e.Time.IsZero() && e.Wait >= 0 && e.Held >= 0, "has a number, a kind, a time, and no negative duration")
	switch e.Op {
	case pgxlock.EventBusy, pgxlock.EventWait:
		l.enterCall(e)
		return nil
	case pgxlock.EventAcquired, pgxlock.EventRenewed, pgxlock.EventLost, pgxlock.EventReleased:
		return l.enterLock(e)
	case pgxlock.EventTerm, pgxlock.EventTermEnded:
		return l.enterTerm(e)
	}
	l.must(e, false, "is one of a Locker's")
	return nil
}

func (l *Ledger) enterCall(e pgxlock.Event) {
	c := l.calls[e.Call]
	known := c != nil
	if !known {
		c = &observedCall{}
		l.calls[e.Call] = c
	}
	if e.Op == pgxlock.EventBusy {
		l.must(e, !known, "comes first, and once")
		l.must(e, e.Key != "" && e.Err == nil, "has a key, and no error")
		c.busy, c.key = true, e.Key
		return
	}
	l.must(e, !c.over, "comes once")
	l.must(e, e.Busy == c.busy, "says whether there was an EventBusy")
	l.must(e, !c.busy || e.Key == c.key, "has the key of the EventBusy")
	c.over, c.err = true, e.Err
}

func (l *Ledger) enterLock(e pgxlock.Event) *observedLock {
	key := observedKey{e.Call, e.Key, e.Permit}
	lock := l.locks[key]
	if e.Op == pgxlock.EventAcquired {
		c := l.calls[e.Call]
		l.must(e, c != nil && c.over && c.err == nil && e.Busy == c.busy, "comes after an EventWait without error")
		l.must(e, lock == nil, "comes once")
		l.must(e, e.Key != "" && e.Holder != "" && e.Held == 0 && e.Err == nil, "has a key and a holder, and has not been held")
		lock = &observedLock{acquired: e, telling: true}
		l.locks[key] = lock
		return lock
	}
	if l.must(e, lock != nil, "is of a lock that was acquired"); lock == nil {
		return nil
	}
	a := lock.acquired
	l.must(e, !lock.over, "is not behind the end")
	l.must(e, !lock.telling, "does not come while Observe is at an event of the same lock")
	l.must(e, e.Kind == a.Kind && e.Mode == a.Mode && e.Token == a.Token && e.Holder == a.Holder && e.Permit == a.Permit && e.Permits == a.Permits, "is of the lock that was acquired")
	l.must(e, errors.Is(e.Err, pgxlock.ErrLost) == (e.Op == pgxlock.EventLost), "says that it is lost if it is")
	l.must(e, !lock.leads || e.Op != pgxlock.EventReleased, "does not come within a term")
	lock.telling, lock.over, lock.released = true, e.Op != pgxlock.EventRenewed, e.Op == pgxlock.EventReleased
	return lock
}

// enterTerm accepts a loss before or within a term, but no release.
func (l *Ledger) enterTerm(e pgxlock.Event) *observedLock {
	lock := l.locks[observedKey{e.Call, e.Key, e.Permit}]
	if l.must(e, lock != nil, "is of a lock that was acquired"); lock == nil {
		return nil
	}
	l.must(e, !lock.telling, "does not come while Observe is at an event of the same lock")
	l.must(e, !lock.released, "is not behind the release")
	l.must(e, lock.leads == (e.Op == pgxlock.EventTermEnded), "begins a term that then ends")
	lock.telling, lock.leads = true, e.Op == pgxlock.EventTerm
	return lock
}

func (l *Ledger) must(e pgxlock.Event, ok bool, what string) {
	if !ok {
		l.problems = append(l.problems, fmt.Sprintf("%+v: it %s", e, what))
	}
}

// Count returns how many events of that kind there were.
func (l *Ledger) Count(op pgxlock.EventOp) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.told[op]
}

// Check looks at the account of a Locker that is closed: what began has ended.
func (l *Ledger) Check(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for number, c := range l.calls {
		if !c.over {
			t.Errorf("call %d for %s was busy, and has not ended", number, c.key)
		}
	}
	for _, lock := range l.locks {
		if !lock.over {
			t.Errorf("%+v: it was neither lost nor released", lock.acquired)
		}
		if lock.leads {
			t.Errorf("%+v: its term has not ended", lock.acquired)
		}
	}
	if acquired, ended := l.told[pgxlock.EventAcquired], l.told[pgxlock.EventLost]+l.told[pgxlock.EventReleased]; acquired != ended {
		t.Errorf("%d were acquired, %d lost or released", acquired, ended)
	}
	for i, problem := range l.problems {
		if i == 10 {
			t.Errorf("and %d more", len(l.problems)-i)
			break
		}
		t.Error(problem)
	}
}
