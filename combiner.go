package pgxlock

import "sync"

// A combiner hands what concurrent callers ask for to run in batches: whatever
// arrives while one batch is under way goes into the next. A single caller's
// entry is a batch at once; nothing waits for company. There is a goroutine only
// while there is work.
type combiner[E any] struct {
	limit int // entries of a batch

	// run settles each entry of a batch. An error means that the server cannot
	// be reached; what has been waiting meanwhile is then failed with it, because
	// to find that out anew for each batch would take a timeout each.
	run  func([]E) error
	fail func([]E, error)

	mu    sync.Mutex
	queue []E
	idle  chan struct{} // closed when the work under way is done; nil if there is none
}

func (c *combiner[E]) add(entries ...E) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, entries...)
	if c.idle == nil && len(c.queue) > 0 {
		c.idle = make(chan struct{})
		go c.drain()
	}
}

func (c *combiner[E]) drain() {
	for batch := c.next(); batch != nil; batch = c.next() {
		if err := c.run(batch); err != nil {
			c.fail(c.take(), err)
		}
	}
}

// take empties the queue.
func (c *combiner[E]) take() []E {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.queue
	c.queue = nil
	return all
}

// next takes a batch, and ends the work when there is none.
func (c *combiner[E]) next() []E {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(c.queue), c.limit)
	if n == 0 {
		c.queue = nil
		close(c.idle)
		c.idle = nil
		return nil
	}
	batch := c.queue[:n:n]
	c.queue = c.queue[n:]
	return batch
}

// done returns a channel that is closed when what was added until now is
// settled; it may wait for what is added later as well.
func (c *combiner[E]) done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle == nil {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	return c.idle
}
