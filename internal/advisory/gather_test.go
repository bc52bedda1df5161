package advisory

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/pgtest"
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
			var g gathering
			g.answered(c.answered, c.queuedThen)
			for tries := 0; ; tries++ {
				queued, looks := asked(c.queue...)
				g.wait(queued)
				if g.hurry > 0 && tries < 100 { // the machine is busy just now
					g.hurry = 0
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
		var g gathering
		g.answered(8, 0)
		g.wait(func() int { return int(asked.Load()) })
		if g.enough(int(asked.Load())) {
			gathered++
		}
		asking.Wait()
	}
	if gathered < 50 { // the scheduler may come back early
		t.Errorf("the leader met the others %d times in 100", gathered)
	}
}

// On one processor the second caller asks only while the leader waits.
func TestLeaderOfAMuxWaitsBeforeItSends(t *testing.T) {
	p := connected(t, pgtest.New(t).Pool, Config{})
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	together := 0
	for range 20 {
		resume := stall(p.mux)
		p.mux.gathering.active = 2
		sends := p.mux.sends
		outcome := trying(t.Context(), p, "k", hold.Exclusive)
		resume()
		got := <-outcome
		if got.err != nil {
			t.Fatal(got.err)
		}
		p.mux.mu.Lock()
		if p.mux.sends == sends+1 {
			together++
		}
		p.mux.mu.Unlock()
		if err := got.lock.release(); err != nil {
			t.Error(err)
		}
	}
	if together < 5 { // the scheduler may come back early
		t.Errorf("both calls were in one message %d times in 20", together)
	}
}

func TestNextMessageIsSentBeforeAnswersAreToldOnlyIfMostCallersAreQueued(t *testing.T) {
	t.Parallel()
	for next, want := range map[int]int{1: 0, 2: 0, 9: 9} { // 3 callers are answered, so 2 of 5 are not enough, and 9 of 12 are
		p := connected(t, pgtest.New(t).Pool, Config{})
		_ = stall(p.mux)
		p.mux.gathering.hurry = 0
		var outcomes []<-chan tried
		ask := func(n, before int) {
			for i := range n {
				outcomes = append(outcomes, trying(t.Context(), p, fmt.Sprint(len(outcomes)), hold.Exclusive))
				queued(t, p.mux, before+i+1)
			}
		}
		ask(2, 1)
		send(t, p.mux)
		ask(next, 0)
		receive(t, p.mux)
		p.mux.answered()
		if got := len(p.mux.batch); got != want {
			t.Errorf("%d calls are queued: %d were sent, want %d", next, got, want)
		}
		p.mux.pass()
		for _, outcome := range outcomes {
			if got := <-outcome; got.err != nil {
				t.Error(got.err)
			}
		}
	}
}

func TestMessageIsSentBeforeItsLastAnswersAreToldIfMostCallersAreQueued(t *testing.T) {
	var g gathering
	g.answered(2, 5)
	if g.enough(5) {
		t.Error("5 of 7 are enough")
	}
	if !g.enough(6) {
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
	var g gathering
	for n := 1; g.hurry == 0; n++ {
		g.answered(1<<20, 0)
		queued, _ := asked(1, 2)
		g.wait(queued)
	}
	queued, looks := asked(1, 2, 3)
	g.wait(queued)
	if *looks != 1 {
		t.Error("the next leader waits")
	}
	if !g.enough(1) {
		t.Error("the next leader tells answers before it sends")
	}
	for range hurried {
		g.answered(8, 0)
	}
	if g.enough(1) {
		t.Error("no leader ever waits again")
	}
}
