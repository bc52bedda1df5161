// Package batcher commits the requests of concurrent callers in groups.
//
//	Batcher     collects the requests that arrive while a batch is in flight into the next one
//	Gathering   how a leader waits for the callers that are about to ask
//	Future      the answer to a caller's request, or the mark that the caller has left
//	Calls       the calls that Close of a Locker waits for, and the end of new ones
//	Background  jobs of no caller that Close waits for
//
// No two mutexes of the package are ever held together.
package batcher

import "sync"

// How many entries the batches of the core have at most.
const (
	// MaxRequests is for requests, which take advisory locks until their commit.
	MaxRequests = 256

	// MaxRows is for what only reads and writes rows: renewals, tickets, and notifications
	// about them.
	MaxRows = 1000
)

// A Batcher passes what concurrent callers ask for to Run in batches: entries that arrive
// while a batch is in flight form the next one. The entry of a single caller is a batch at
// once; no entry waits for others. There is a goroutine only while there is work.
type Batcher[E any] struct {
	Limit int // entries of a batch, at most

	// Run settles each entry of a batch. An error means that the server cannot be reached.
	// Fail then settles the entries that have arrived meanwhile, because to learn it anew
	// for each batch would take a timeout each.
	Run  func([]E) error
	Fail func([]E, error)

	mu    sync.Mutex
	queue []E
	idle  chan struct{} // closed when no work is left; nil if there is none
}

// Add settles the entries with the batches of other callers. It does not wait for that.
func (b *Batcher[E]) Add(entries ...E) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queue = append(b.queue, entries...)
	if b.idle == nil && len(b.queue) > 0 {
		b.idle = make(chan struct{})
		go b.drain()
	}
}

func (b *Batcher[E]) drain() {
	for batch := b.next(); batch != nil; batch = b.next() {
		if err := b.Run(batch); err != nil {
			b.Fail(b.take(), err)
		}
	}
}

// Queued returns how many entries wait for the next batch.
func (b *Batcher[E]) Queued() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.queue)
}

// take empties the queue.
func (b *Batcher[E]) take() []E {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.queue
	b.queue = nil
	return all
}

// next takes a batch, and ends the work when there is none.
func (b *Batcher[E]) next() []E {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := min(len(b.queue), b.Limit)
	if n == 0 {
		b.queue = nil
		close(b.idle)
		b.idle = nil
		return nil
	}
	batch := b.queue[:n:n]
	b.queue = b.queue[n:]
	return batch
}

// Done returns a channel that is closed when all entries added until now are settled. It
// may wait for later ones as well.
func (b *Batcher[E]) Done() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.idle == nil {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	return b.idle
}
