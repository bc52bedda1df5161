package batcher

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
)

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestBatcherSettlesEachEntryOnce(t *testing.T) {
	t.Parallel()
	const callers, each, limit = 16, 300, 7
	var settled [callers * each]atomic.Int32
	var failures, running atomic.Int32
	outage := errors.New("outage")
	batches := 0
	b := Batcher[int]{Limit: limit}
	b.Run = func(batch []int) error {
		if running.Add(1) != 1 {
			t.Error("two batches at once")
		}
		defer running.Add(-1)
		if len(batch) == 0 || len(batch) > limit {
			t.Errorf("a batch of %d, want 1 to %d", len(batch), limit)
		}
		for _, entry := range batch {
			settled[entry].Add(1)
		}
		if batches++; batches%5 == 0 {
			return outage
		}
		return nil
	}
	b.Fail = func(queued []int, err error) {
		if !errors.Is(err, outage) {
			t.Errorf("failed with %v", err)
		}
		for _, entry := range queued {
			settled[entry].Add(1)
			failures.Add(1)
		}
	}
	var adding sync.WaitGroup
	for caller := range callers {
		adding.Go(func() {
			for i := 0; i < each; i += 3 {
				n := caller*each + i
				b.Add(n, n+1, n+2)
				if i%30 == 0 {
					<-b.Done()
					if settled[n].Load() != 1 {
						t.Errorf("entry %d was not settled when done", n)
					}
				}
			}
		})
	}
	adding.Wait()
	<-b.Done()
	for entry := range settled {
		if n := settled[entry].Load(); n != 1 {
			t.Errorf("entry %d was settled %d times", entry, n)
		}
	}
	if failures.Load() == 0 {
		t.Log("no entry stood in the queue when a run failed")
	}
}

func TestRunThatFailsFailsTheQueue(t *testing.T) {
	t.Parallel()
	outage := errors.New("outage")
	begun, end := make(chan struct{}), make(chan struct{})
	var ran, failed []int
	b := Batcher[int]{Limit: 2}
	b.Run = func(batch []int) error {
		ran = append(ran, batch...)
		if batch[0] > 0 {
			return nil
		}
		close(begun)
		<-end
		return outage
	}
	b.Fail = func(queued []int, err error) {
		if !errors.Is(err, outage) {
			t.Errorf("failed with %v", err)
		}
		failed = append(failed, queued...)
	}
	if !closed(b.Done()) {
		t.Error("there is no work, and it is not done")
	}
	b.Add() // nothing
	if !closed(b.Done()) {
		t.Error("nothing was added, and it is not done")
	}
	b.Add(0)
	<-begun
	b.Add(1, 2, 3)
	b.Add(4)
	done := b.Done()
	if closed(done) {
		t.Error("done during the run")
	}
	close(end)
	<-done
	if len(ran) != 1 || len(failed) != 4 {
		t.Errorf("ran %v, failed %v; want [0] and [1 2 3 4]", ran, failed)
	}
	b.Add(5)
	<-b.Done()
	if len(ran) != 2 || len(failed) != 4 {
		t.Errorf("afterwards: ran %v, failed %v", ran, failed)
	}
}
