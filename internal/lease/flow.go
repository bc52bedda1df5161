package lease

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A flow sends the requests and releases of a Table, in batches of one kind, one after the other.
// A call that finds it idle leads it. A caller that may be kept for the time of an exchange leads
// it itself: it sends its batch and reads the answer, without two switches between goroutines.
// Otherwise, and as soon as there is more to do, a goroutine leads until nothing is queued. So it
// does where there is no connection: a caller that leads does not wait for one.
type flow struct {
	table *Table

	mu       sync.Mutex
	requests []*request // not sent yet
	releases []*release
	led      bool          // else nothing is queued
	own      bool          // a caller leads
	idle     chan struct{} // closed when the flow is idle; nil unless a caller waits for that

	// Only the leader uses these.
	gathering  batcher.Gathering
	sent       time.Time      // the last batch
	wanted     []lockkey.Name // to be woken before the next batch is sent
	released   bool           // the last batch was of releases
	passedOver bool           // the other kind was queued then
}

// ask queues requests. own: their caller may lead, because nothing but the answer ends its wait.
// Then Close waits for the exchange, too, which takes dbconn.Timeout at most.
func (f *flow) ask(own bool, requests ...*request) {
	f.mu.Lock()
	f.requests = append(f.requests, requests...)
	f.beginLocked(own, false)
}

// release queues a release. If the flow is idle, its caller leads.
func (f *flow) release(r *release) {
	f.mu.Lock()
	f.releases = append(f.releases, r)
	f.beginLocked(true, true)
}

// beginLocked makes the caller or a goroutine lead if the flow is idle, and unlocks f.mu. A caller
// sends its own kind: it must not be kept for an exchange that is not its own.
func (f *flow) beginLocked(own, releases bool) {
	begins := f.takeLeadLocked(own, releases)
	f.mu.Unlock()
	switch {
	case begins && own:
		defer func() {
			if p := recover(); p != nil {
				// It comes from code of the caller's, as a tracer. The others in the batch would never
				// have an answer: the program ends, as where a goroutine leads.
				go panic(p)
				select {}
			}
			if !f.rest() {
				go f.lead()
			}
		}()
		f.send()
	case begins:
		go f.lead()
	}
}

// takeLeadLocked reports whether the caller, or a goroutine for it, leads from now on. Its kind is sent
// first.
func (f *flow) takeLeadLocked(own, releases bool) bool {
	if f.led || len(f.requests)+len(f.releases) == 0 {
		return false
	}
	f.led, f.own = true, own
	f.released, f.passedOver = !releases, true // as if the other kind had been sent, and this one passed over
	return true
}

// lead works until nothing is queued.
func (f *flow) lead() {
	for !f.rest() {
		if wanted := f.wanted; len(wanted) > 0 {
			f.wanted = nil
			f.table.host.Queue.WakeOn(f.table.wake, wanted)
			continue
		}
		f.send()
	}
}

// send sends a batch and settles it, once the callers are queued that are about to ask: of a
// small batch nearly all is the commit. If the server cannot be reached, all that is queued of
// its kind fails, because to learn it anew for each batch would take a timeout each.
func (f *flow) send() {
	f.gathering.Wait(f.queued)
	requests, releases := f.next()
	f.sent = time.Now()
	if len(releases) > 0 {
		f.table.releaseAll(releases)
	} else {
		f.table.acquire(requests)
	}
}

// waits returns what bounds the wait for a connection.
func (f *flow) waits(ends context.Context) context.Context {
	if f.ledByCaller() {
		return dbconn.Now
	}
	return ends
}

func (f *flow) ledByCaller() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.own
}

// postpones reports whether a batch that failed with err must be sent once there is a connection,
// for which a caller that leads does not wait.
func (f *flow) postpones(err error) bool {
	return errors.Is(err, dbconn.ErrConnecting) && f.ledByCaller()
}

// putBack puts a batch back to the head of its queue.
func putBack[E any](f *flow, queue *[]E, batch []E) {
	f.mu.Lock()
	defer f.mu.Unlock()
	*queue = slices.Concat(batch, *queue)
}

// answered is told how many callers an answer is for, before they are told it.
func (f *flow) answered(callers int) {
	f.gathering.Answered(callers, f.queued(), time.Since(f.sent))
}

// queued returns how many entries were not sent yet.
func (f *flow) queued() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.requests) + len(f.releases)
}

// next takes a batch of the kind of which more is queued, but passes over a kind once at most:
// callers that try again and again must not keep a release waiting.
func (f *flow) next() ([]*request, []*release) {
	f.mu.Lock()
	defer f.mu.Unlock()
	releases := len(f.releases) > len(f.requests)
	if f.passedOver {
		releases = !f.released
	}
	f.released, f.passedOver = releases, len(f.requests) > 0 && len(f.releases) > 0
	if releases {
		return nil, first(&f.releases)
	}
	return first(&f.requests), nil
}

// first removes a batch from a queue.
func first[E any](queue *[]E) []E {
	all := *queue
	n := min(len(all), batcher.MaxRequests)
	if *queue = all[n:]; n == len(all) {
		*queue = nil
	}
	return all[:n:n]
}

// takeUnreached empties a queue of the flow if the last exchange got no answer, and reports whether it
// got one. The callers of the batch have no answer yet: the next call of one that has is a new try.
func takeUnreached[E any](f *flow, queue *[]E) (all []E, reached bool) {
	if f.table.requests.Reached() {
		return nil, true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	all = *queue
	*queue = nil
	return all, false
}

// rest ends the lead if there is nothing to do; else a goroutine leads from here on.
func (f *flow) rest() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.own = false
	if len(f.requests)+len(f.releases)+len(f.wanted) > 0 {
		return false
	}
	f.led = false
	if f.idle != nil {
		close(f.idle)
		f.idle = nil
	}
	return true
}

// wait returns when there was a moment without work.
func (f *flow) wait() {
	f.mu.Lock()
	if !f.led {
		f.mu.Unlock()
		return
	}
	if f.idle == nil {
		f.idle = make(chan struct{})
	}
	idle := f.idle
	f.mu.Unlock()
	<-idle
}
