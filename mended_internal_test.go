package pgxlock

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestTheServerTakesTheLongestTTL(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]*LeaseConfig{"of the lock": nil, "of the Locker": {TTL: maxTTL}} {
		locks, err := NewLease(db.Pool, cfg)
		if err != nil {
			t.Fatal(err)
		}
		lock, err := locks.Acquire(t.Context(), name, TTL(maxTTL))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestAWaitForBackgroundWorkEndsAfterJobsThatWereAddedMeanwhile(t *testing.T) {
	t.Parallel()
	var b background
	b.wait() // there is none
	first, second := make(chan struct{}), make(chan struct{})
	var firstDone, secondDone atomic.Bool
	b.run(func() {
		<-first
		firstDone.Store(true)
	})
	const waiters = 3
	waited := make(chan bool, waiters)
	for range waiters {
		go func() {
			b.wait()
			waited <- firstDone.Load() && secondDone.Load()
		}()
	}
	for waiting := false; !waiting; {
		b.mu.Lock()
		waiting = b.idle != nil
		b.mu.Unlock()
	}
	b.run(func() {
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
	b.run(func() { close(again) })
	b.wait()
	select {
	case <-again:
	default:
		t.Error("a wait ended before a job that was added after an earlier wait")
	}
}

func TestBackgroundWorkMayBeAddedWhileItIsWaitedFor(t *testing.T) {
	t.Parallel()
	var b background
	var jobs atomic.Int32
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 500 {
				b.run(func() {
					jobs.Add(1)
					b.run(func() { jobs.Add(1) }) // a job may add one
				})
			}
		})
		callers.Go(func() {
			for range 500 {
				b.wait()
			}
		})
	}
	callers.Wait()
	b.wait()
	if n := jobs.Load(); n != 8*500*2 {
		t.Errorf("%d jobs were done, want %d", n, 8*500*2)
	}
}

func TestACombinerSettlesEachEntryOnce(t *testing.T) {
	t.Parallel()
	const callers, each, limit = 16, 300, 7
	var settled [callers * each]atomic.Int32
	var failures, running atomic.Int32
	outage := errors.New("outage")
	batches := 0
	c := combiner[int]{limit: limit}
	c.run = func(batch []int) error {
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
	c.fail = func(queued []int, err error) {
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
				c.add(n, n+1, n+2)
				if i%30 == 0 {
					<-c.done()
					if settled[n].Load() != 1 {
						t.Errorf("entry %d was not settled when done", n)
					}
				}
			}
		})
	}
	adding.Wait()
	<-c.done()
	for entry := range settled {
		if n := settled[entry].Load(); n != 1 {
			t.Errorf("entry %d was settled %d times", entry, n)
		}
	}
	if failures.Load() == 0 {
		t.Log("no entry stood in the queue when a run failed")
	}
}

func TestARunThatFailsFailsWhatStandsInTheQueue(t *testing.T) {
	t.Parallel()
	outage := errors.New("outage")
	begun, end := make(chan struct{}), make(chan struct{})
	var ran, failed []int
	c := combiner[int]{limit: 2}
	c.run = func(batch []int) error {
		ran = append(ran, batch...)
		if batch[0] > 0 {
			return nil
		}
		close(begun)
		<-end
		return outage
	}
	c.fail = func(queued []int, err error) {
		if !errors.Is(err, outage) {
			t.Errorf("failed with %v", err)
		}
		failed = append(failed, queued...)
	}
	if !isClosed(c.done()) {
		t.Error("there is no work, and it is not done")
	}
	c.add() // nothing
	if !isClosed(c.done()) {
		t.Error("nothing was added, and it is not done")
	}
	c.add(0)
	<-begun
	c.add(1, 2, 3)
	c.add(4)
	done := c.done()
	if isClosed(done) {
		t.Error("done during the run")
	}
	close(end)
	<-done
	if len(ran) != 1 || len(failed) != 4 {
		t.Errorf("ran %v, failed %v; want [0] and [1 2 3 4]", ran, failed)
	}
	c.add(5)
	<-c.done()
	if len(ran) != 2 || len(failed) != 4 {
		t.Errorf("afterwards: ran %v, failed %v", ran, failed)
	}
}
