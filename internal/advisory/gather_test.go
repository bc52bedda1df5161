package advisory

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A wait that brings nobody leaves its trace in what leaders know. On one processor the second
// caller asks only while the leader waits.
func TestLeaderOfAMuxWaitsBeforeItSends(t *testing.T) {
	pgtest.Long(t)
	p := connected(t, pgtest.New(t).Pool, Config{})
	lead := takeLead(p.mux)
	p.mux.gathering = batcher.Gathering{}
	p.mux.gathering.Answered(2, 0, time.Millisecond)
	lead()
	lead = takeLead(p.mux)
	knows := p.mux.gathering
	lead()
	if knows.Took <= 0 {
		t.Errorf("the message took %s", knows.Took)
	}
	if knows.Active, knows.Took = 0, 0; knows == (batcher.Gathering{}) {
		t.Fatal("the leader did not wait")
	}

	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	pgtest.Until(t, "both calls are in one message", func() bool { // the scheduler may come back early
		resume := stall(p.mux)
		p.mux.gathering = batcher.Gathering{}
		p.mux.gathering.Answered(2, 0, time.Millisecond)
		sends := p.mux.sends
		outcome := trying(t.Context(), p, "k", hold.Exclusive)
		resume()
		got := <-outcome
		if got.err != nil {
			t.Fatal(got.err)
		}
		p.mux.mu.Lock()
		together := p.mux.sends == sends+1
		p.mux.mu.Unlock()
		if err := got.lock.release(); err != nil {
			t.Error(err)
		}
		return together
	})
}

func TestNextMessageIsSentBeforeAnswersAreToldOnlyIfMostCallersAreQueued(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for next, want := range map[int]int{1: 0, 2: 0, 9: 9} { // 3 callers are answered, so 2 of 5 are not enough, and 9 of 12 are
		p := connected(t, pgtest.New(t).Pool, Config{})
		_ = stall(p.mux)
		p.mux.gathering.Hurry = 0
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
