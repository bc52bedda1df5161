package main

import (
	"context"
	"expvar"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock"
)

// metrics are made of what Lockers tell: observe is their Observe. Each family of keys
// has its own, since a metric of each key of order:1 to order:1000000 is too many.
type metrics struct {
	expvar.Map // of families

	mu sync.Mutex // held while a family is made
}

// A family is the keys that have the same beginning.
type family struct {
	expvar.Map
	wait, held histogram
}

// What a family counts.
const (
	held     = "held"      // gauge: locks that callers have
	waiting  = "waiting"   // gauge: calls that somebody else keeps waiting
	acquired = "acquired"  // locks
	released = "released"  // locks
	lost     = "lost"      // locks: have an alert on it
	granted  = "granted"   // calls that got what they asked for
	busy     = "busy"      // calls that did not, since somebody else had it
	failed   = "failed"    // calls that did not for another reason
	renewed  = "renewed"   // renewals
	notYet   = "unrenewed" // renewals that failed, and were tried again: comes before lost
	waits    = "wait_seconds"
	holds    = "held_seconds"
)

// observe is quick: it adds to numbers in memory.
func (m *metrics) observe(_ context.Context, e pgxlock.Event) {
	f := m.family(e.Key)
	switch e.Op {
	case pgxlock.EventBusy:
		f.Add(waiting, 1)
	case pgxlock.EventWait:
		if e.Busy { // it has told so before
			f.Add(waiting, -1)
		}
		f.Add(result(e), 1)
		f.wait.add(e.Wait)
	case pgxlock.EventAcquired:
		f.Add(acquired, 1)
		f.Add(held, 1)
	case pgxlock.EventRenewed:
		if e.Err != nil {
			f.Add(notYet, 1)
		} else {
			f.Add(renewed, 1)
		}
	case pgxlock.EventLost, pgxlock.EventReleased: // every acquired one ends with one of them
		f.Add(held, -1)
		f.held.add(e.Held)
		if e.Op == pgxlock.EventLost {
			f.Add(lost, 1)
		} else {
			f.Add(released, 1)
		}
	}
}

func result(e pgxlock.Event) string {
	switch {
	case e.Err == nil:
		return granted
	case e.Busy:
		return busy
	}
	return failed
}

// family returns that of a key: what stands before its first colon.
func (m *metrics) family(key string) *family {
	name, _, _ := strings.Cut(key, ":")
	if f, ok := m.Get(name).(*family); ok {
		return f
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if f, ok := m.Get(name).(*family); ok {
		return f // somebody else has just made it
	}
	f := &family{}
	for _, counter := range []string{held, waiting, acquired, released, lost, granted, busy, failed, renewed, notYet} {
		f.Add(counter, 0) // so that all of them are shown
	}
	f.Set(waits, &f.wait)
	f.Set(holds, &f.held)
	m.Set(name, f)
	return f
}

// count returns a counter of a family.
func (m *metrics) count(name, counter string) int64 {
	f, _ := m.Get(name).(*family)
	if f == nil {
		return 0
	}
	n, _ := f.Get(counter).(*expvar.Int)
	return n.Value()
}

// bounds are those of the histograms' buckets; what is longer is in one more.
var bounds = [...]time.Duration{
	time.Millisecond, 3 * time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond, 100 * time.Millisecond, 300 * time.Millisecond,
	time.Second, 3 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute,
}

// A histogram counts durations, and adds them up.
type histogram struct {
	mu      sync.Mutex
	buckets [len(bounds) + 1]int64
	sum     time.Duration
}

func (h *histogram) add(d time.Duration) {
	i := 0
	for i < len(bounds) && d > bounds[i] {
		i++
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.buckets[i]++
	h.sum += d
}

// String is JSON. As in Prometheus, each bucket counts those before it as well.
func (h *histogram) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var b strings.Builder
	var total int64
	b.WriteString("{")
	for i, n := range h.buckets {
		total += n
		if i < len(bounds) {
			fmt.Fprintf(&b, "%q: %d, ", fmt.Sprint(bounds[i].Seconds()), total)
		}
	}
	fmt.Fprintf(&b, `"count": %d, "sum": %g}`, total, h.sum.Seconds())
	return b.String()
}
