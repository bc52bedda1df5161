package batcher

import (
	"sync"
	"sync/atomic"
	"testing"
)

func TestBackgroundWaitEndsAfterJobsAddedMeanwhile(t *testing.T) {
	t.Parallel()
	var b Background
	b.Wait() // there is none
	first, second := make(chan struct{}), make(chan struct{})
	var firstDone, secondDone atomic.Bool
	b.Run(func() {
		<-first
		firstDone.Store(true)
	})
	const waiters = 3
	waited := make(chan bool, waiters)
	for range waiters {
		go func() {
			b.Wait()
			waited <- firstDone.Load() && secondDone.Load()
		}()
	}
	for waiting := false; !waiting; {
		b.mu.Lock()
		waiting = b.idle != nil
		b.mu.Unlock()
	}
	b.Run(func() {
		<-second
		secondDone.Store(true)
	})
	close(first)
	for jobs := 2; jobs > 1; {
		b.mu.Lock()
		jobs = b.jobs
		b.mu.Unlock()
	}
	if len(waited) > 0 {
		t.Error("a wait ended while a job was running")
	}
	close(second)
	for range waiters {
		if !<-waited {
			t.Error("a wait ended before the jobs")
		}
	}
	again := make(chan struct{})
	b.Run(func() { close(again) })
	b.Wait()
	select {
	case <-again:
	default:
		t.Error("a wait ended before a job that was added after an earlier wait")
	}
}

func TestBackgroundAcceptsJobsWhileItIsWaitedFor(t *testing.T) {
	t.Parallel()
	var b Background
	var jobs atomic.Int32
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 500 {
				b.Run(func() {
					jobs.Add(1)
					b.Run(func() { jobs.Add(1) }) // a job may add one
				})
			}
		})
		callers.Go(func() {
			for range 500 {
				b.Wait()
			}
		})
	}
	callers.Wait()
	b.Wait()
	if n := jobs.Load(); n != 8*500*2 {
		t.Errorf("%d jobs were done, want %d", n, 8*500*2)
	}
}
