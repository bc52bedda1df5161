package pgxlock

import "sync"

// A combiner hands what concurrent callers ask for to run in batches: whatever
// arrives while one batch is under way goes into the next. A single caller's
// entry is a batch at once; nothing waits for company. There is a goroutine only
// while there is work.
type combiner[E any] struct {
	run   func([]E)
	limit int // entries of a batch

	mu      sync.Mutex
	queue   []E
	running bool
}

func (c *combiner[E]) add(e E) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queue = append(c.queue, e)
	if !c.running {
		c.running = true
		go c.drain()
	}
}

func (c *combiner[E]) drain() {
	for {
		c.mu.Lock()
		n := min(len(c.queue), c.limit)
		if n == 0 {
			c.running = false
			c.queue = nil
			c.mu.Unlock()
			return
		}
		batch := c.queue[:n:n]
		c.queue = c.queue[n:]
		c.mu.Unlock()
		c.run(batch)
	}
}
