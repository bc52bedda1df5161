package batcher

import "sync"

// Background runs jobs that Close waits for. Unlike a WaitGroup it accepts more while,
// and after, a caller waits for it.
type Background struct {
	mu   sync.Mutex
	jobs int
	idle chan struct{} // closed when jobs is 0; nil if no caller waits
}

// Run starts a job.
func (b *Background) Run(job func()) {
	b.mu.Lock()
	b.jobs++
	b.mu.Unlock()
	go func() {
		defer b.end()
		job()
	}()
}

func (b *Background) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.jobs--
	if b.jobs == 0 && b.idle != nil {
		close(b.idle)
		b.idle = nil
	}
}

// Busy reports whether a job runs.
func (b *Background) Busy() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.jobs > 0
}

// Wait returns when there was a moment without a job.
func (b *Background) Wait() {
	b.mu.Lock()
	if b.jobs == 0 {
		b.mu.Unlock()
		return
	}
	if b.idle == nil {
		b.idle = make(chan struct{})
	}
	idle := b.idle
	b.mu.Unlock()
	<-idle
}
