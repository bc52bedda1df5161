package batcher

import (
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// near is what a message to a server takes that is near.
const near = 200 * time.Microsecond

// asked returns a queue that grows as said with each look at it, and then stays; looks counts.
func asked(queue ...int) (queued func() int, looks *int) {
	looks = new(int)
	return func() int {
		n := queue[min(*looks, len(queue)-1)]
		*looks++
		return n
	}, looks
}

// wait lets a leader wait while the clock stands still, and returns how often it looked.
func wait(t *testing.T, g *Gathering, queue ...int) (looks int) {
	t.Helper()
	synctest.Test(t, func(*testing.T) {
		queued, n := asked(queue...)
		g.Wait(queued)
		looks = *n
	})
	return looks
}

func TestLeaderWaitsForCallersThatAreAboutToAsk(t *testing.T) {
	for name, c := range map[string]struct {
		answered, queuedThen int // with the last message
		took                 time.Duration
		queue                []int
		looks                int
	}{
		"a lone caller waits for nobody":             {1, 0, near, []int{1}, 1},
		"the first caller of all waits for nobody":   {0, 0, near, []int{1}, 1},
		"until all are queued":                       {8, 0, near, []int{1, 3, 5, 7, 8, 8}, 5},
		"for those that were queued before, as well": {4, 4, near, []int{4, 5, 6, 7, 8, 8}, 5},
		"while a thread wakes up":                    {8, 0, near, []int{1, 1, 1, 1, 2, 2, 2, 8, 8}, 8},
		"not when nobody comes":                      {8, 0, near, []int{1}, 500 + 2},
		"not when nobody comes anymore":              {8, 0, near, []int{1, 1, 1, 4}, 500 + 5},
		"longer if a message takes longer":           {8, 0, 4 * near, []int{1}, 2000 + 2},
		"not very long":                              {8, 0, time.Second, []int{1}, 2048 + 2},
		"not for a queue that is sent by now":        {8, 0, near, []int{0}, 1},
		"as 24":                                      {24, 0, 0, []int{23, 24}, 2},
		"not in a crowd":                             {16, 9, near, []int{24}, 1},
		"in a crowd if a message takes long":         {16, 9, 2 * near, []int{24, 25}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			var g Gathering
			g.Answered(c.answered, c.queuedThen, c.took)
			if looks := wait(t, &g, c.queue...); looks != c.looks {
				t.Errorf("it looked %d times, want %d", looks, c.looks)
			}
		})
	}
}

func TestLeaderThatNobodyJoinsWaitsLessNextTime(t *testing.T) {
	var g Gathering
	g.Answered(2, 0, near)
	var looks []int
	for range 11 {
		looks = append(looks, wait(t, &g, 1))
	}
	if want := []int{502, 252, 127, 64, 33, 17, 9, 5, 3, 2, 2}; !slices.Equal(looks, want) {
		t.Errorf("it looked %d times, want %d", looks, want)
	}
	for _, want := range []int{2, 5, 9} { // and regains its patience with each wait that pays
		if looks := wait(t, &g, 1); looks != want {
			t.Errorf("it looked %d times, want %d", looks, want)
		}
		wait(t, &g, 1, 2)
		wait(t, &g, 1, 2)
	}
	for range 10 {
		wait(t, &g, 1, 2)
	}
	if looks := wait(t, &g, 1); looks != 502 {
		t.Errorf("after waits that paid it looked %d times, want 502", looks)
	}
}

// Callers that come one by one do not keep the first one for long.
func TestLeaderDoesNotWaitForEver(t *testing.T) {
	var g Gathering
	g.Answered(MaxRequests, 0, math.MaxInt64)
	looks := 0
	g.Wait(func() int { looks++; return 1 + looks/2000 })
	if g.failed != 1 && g.Hurry == 0 { // a processor that was taken away ends it, too
		t.Error("the wait counts as one that paid")
	}
}

// On one processor no caller asks while the leader looks.
func TestLeaderLetsCallersRunThatAreAboutToAsk(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	synctest.Test(t, func(t *testing.T) { // where no time passes until the leader has looked 500 times
		var asked atomic.Int64
		var asking sync.WaitGroup
		asked.Store(1)
		for range 7 {
			asking.Go(func() { asked.Add(1) })
		}
		var g Gathering
		g.Answered(8, 0, near)
		g.Wait(func() int { return int(asked.Load()) })
		if n := asked.Load(); n != 8 {
			t.Errorf("the leader met %d callers, itself included, of 8", n)
		}
		asking.Wait()
	})
}

func TestMessageIsSentBeforeItsLastAnswersAreToldIfMostCallersAreQueued(t *testing.T) {
	var g Gathering
	g.Answered(2, 5, near)
	if g.Enough(5) {
		t.Error("5 of 7 are enough")
	}
	if !g.Enough(6) {
		t.Error("6 of 7 are not enough")
	}
	g.Answered(20, 6, near)
	if !g.Enough(1) {
		t.Error("in a crowd, answers are told before the next message is sent")
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
	for g.Hurry == 0 {
		g.Answered(1<<20, 0, math.MaxInt64)
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
	for g.Hurry > 0 {
		g.Answered(8, 0, near)
	}
	if g.Enough(1) {
		t.Error("no leader ever waits again")
	}
}

// Nobody waits for callers that would not be in the message.
func TestLeaderDoesNotWaitWhenAMessageIsFull(t *testing.T) {
	var g Gathering
	g.Answered(MaxRequests, MaxRequests, time.Second)
	if looks := wait(t, &g, MaxRequests); looks != 1 {
		t.Errorf("it looked %d times, want 1", looks)
	}
}

// One answer that comes at once does not make leaders forget that nobody joins them.
func TestLeaderThatNobodyJoinsStaysImpatientAfterAQuickAnswer(t *testing.T) {
	var g Gathering
	var looks []int
	for range 6 {
		g.Answered(2, 0, near)
		looks = append(looks, wait(t, &g, 1))
		g.Answered(2, 0, time.Microsecond)
		wait(t, &g, 1)
	}
	if last := looks[len(looks)-1]; last > looks[0]/8 {
		t.Errorf("it looked %d times", looks)
	}
}

// What others of this process have computed makes leaders hurry, and nothing else: where other
// processes had the processors, nobody of this one would be kept waiting by a call of the scheduler.
func TestLeadersHurryOnlyBesideGoroutinesThatCompute(t *testing.T) {
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		took, others, need time.Duration
		hurry              int
	}{
		"goroutines computed":                         {20 * ms, 20 * ms, slowYield, 100 * 16},
		"as long as an answer may take":               {ms, ms, ms, 16},
		"less long than that":                         {ms, ms / 2, ms, 16},
		"on two processors":                           {10 * ms, 20 * ms, slowYield, 100 * 16},
		"beside other processes":                      {20 * ms, 10 * ms, slowYield, 50 * 16},
		"other processes had the processors":          {20 * ms, 0, slowYield, 0},
		"and callers did what they do":                {20 * ms, ms, slowYield, 0},
		"or less than a call may take":                {ms, 150 * time.Microsecond, slowYield, 0},
		"the leader computed, too":                    {20 * ms, -ms, slowYield, 0},
		"the process stood still for a minute":        {time.Minute, ms, slowYield, 0},
		"goroutines computed for a minute, at a time": {time.Minute, time.Minute, slowYield, 4096},
	} {
		t.Run(name, func(t *testing.T) {
			var g Gathering
			g.Answered(8, 0, near)
			g.slow(c.took, c.others, c.need)
			if g.Hurry != c.hurry {
				t.Errorf("%d messages are sent in a hurry, want %d", g.Hurry, c.hurry)
			}
			if hurries := g.Enough(1); hurries != (c.hurry > 0) {
				t.Errorf("answers are told after the next message is sent: %t", hurries)
			}
		})
	}
}

func TestLeaderIsImpatientWhileOtherProcessesHaveTheProcessors(t *testing.T) {
	var g Gathering
	g.Answered(8, 0, near)
	g.slow(20*time.Millisecond, 0, slowYield)
	if looks := wait(t, &g, 1); looks != callsOfImpatient+2 {
		t.Errorf("it looked %d times for callers that do not come, want %d", looks, callsOfImpatient+2)
	}
	if looks := wait(t, &g, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8); looks != 10 {
		t.Errorf("it looked %d times for callers that come one by one, want 10", looks)
	}
	for range impatience {
		g.Answered(8, 0, near)
	}
	if looks := wait(t, &g, 1); looks < 100 {
		t.Errorf("it looked only %d times after %d messages", looks, impatience)
	}
}

// What the leader used before it yielded is its own.
func TestTimeOfTheLeaderIsNoTimeOfOthers(t *testing.T) {
	var g Gathering
	g.Answered(8, 0, near)
	now := time.Now().Add(-2 * slowYield)
	g.since, g.used = now.Add(-time.Minute), processorTime()-50*time.Second
	if g.Yield(now, 0); g.Hurry != 0 {
		t.Errorf("%d messages are sent in a hurry because the leader computed", g.Hurry)
	}
	if g.since.Before(now) {
		t.Error("the next call counts what was used before this one")
	}
}
