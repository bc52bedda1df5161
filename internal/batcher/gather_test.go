package batcher

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// asked returns a queue that grows as said with each look at it, and then stays; looks counts.
func asked(queue ...int) (queued func() int, looks *int) {
	looks = new(int)
	return func() int {
		n := queue[min(*looks, len(queue)-1)]
		*looks++
		return n
	}, looks
}

func TestLeaderWaitsForCallersThatAreAboutToAsk(t *testing.T) {
	for name, c := range map[string]struct {
		answered, queuedThen int // with the last message
		queue                []int
		looks                int
	}{
		"a lone caller waits for nobody":             {1, 0, []int{1}, 1},
		"the first caller of all waits for nobody":   {0, 0, []int{1}, 1},
		"until most are queued":                      {8, 0, []int{1, 3, 5, 6, 7}, 4},
		"for those that were queued before, as well": {4, 4, []int{4, 5, 6, 7}, 3},
		"not when nobody comes":                      {8, 0, []int{1, 1, 6}, 2},
		"not for ever":                               {100, 0, []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, maxYields},
		"not for a queue that is sent by now":        {8, 0, []int{0}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var g Gathering
			g.Answered(c.answered, c.queuedThen)
			for tries := 0; ; tries++ {
				queued, looks := asked(c.queue...)
				g.Wait(queued)
				if g.Hurry > 0 && tries < 100 { // the machine is busy just now
					g.Hurry = 0
					continue
				}
				if *looks != c.looks {
					t.Errorf("it looked %d times, want %d", *looks, c.looks)
				}
				return
			}
		})
	}
}

// On one processor no caller asks while the leader looks.
func TestLeaderLetsCallersRunThatAreAboutToAsk(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	gathered := 0
	for range 100 {
		var asked atomic.Int64
		var asking sync.WaitGroup
		asked.Store(1)
		for range 7 {
			asking.Go(func() { asked.Add(1) })
		}
		var g Gathering
		g.Answered(8, 0)
		g.Wait(func() int { return int(asked.Load()) })
		if g.Enough(int(asked.Load())) {
			gathered++
		}
		asking.Wait()
	}
	if gathered < 50 { // the scheduler may come back early
		t.Errorf("the leader met the others %d times in 100", gathered)
	}
}

func TestMessageIsSentBeforeItsLastAnswersAreToldIfMostCallersAreQueued(t *testing.T) {
	var g Gathering
	g.Answered(2, 5)
	if g.Enough(5) {
		t.Error("5 of 7 are enough")
	}
	if !g.Enough(6) {
		t.Error("6 of 7 are not enough")
	}
}

// Beside goroutines that compute, each call of the scheduler may take as long as their time
// slices. Then leaders must not wait for a while, and begin again later.
func TestLeaderDoesNotWaitWhileTheProcessorsAreBusy(t *testing.T) {
	var stop atomic.Bool
	for range 2 * runtime.GOMAXPROCS(0) {
		go func() {
			for !stop.Load() {
			}
		}()
	}
	defer stop.Store(true)
	var g Gathering
	for n := 1; g.Hurry == 0; n++ {
		g.Answered(1<<20, 0)
		queued, _ := asked(1, 2)
		g.Wait(queued)
	}
	queued, looks := asked(1, 2, 3)
	g.Wait(queued)
	if *looks != 1 {
		t.Error("the next leader waits")
	}
	if !g.Enough(1) {
		t.Error("the next leader tells answers before it sends")
	}
	for range hurried {
		g.Answered(8, 0)
	}
	if g.Enough(1) {
		t.Error("no leader ever waits again")
	}
}
