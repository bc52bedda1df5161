package pgxlock

import "sync"

// background is work that Close waits for. Unlike a WaitGroup it may be given
// more while, and after, it is waited for.
type background struct {
	mu   sync.Mutex
	jobs int
	idle chan struct{} // closed when jobs is 0; nil if nobody waits
}

func (b *background) run(job func()) {
	b.mu.Lock()
	b.jobs++
	b.mu.Unlock()
	go func() {
		defer b.end()
		job()
	}()
}

func (b *background) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.jobs--
	if b.jobs == 0 && b.idle != nil {
		close(b.idle)
		b.idle = nil
	}
}

// wait returns when there was a moment without work.
func (b *background) wait() {
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
