package advisory

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// busy returns what leaders know who have just answered so many callers.
func busy(callers int) *batcher.Gathering {
	g := &batcher.Gathering{}
	g.Answered(callers, 0, time.Millisecond)
	return g
}

// awake is what a leader knows that has just slept.
func awake() *spinning { return &spinning{slept: time.Now()} }

// looking waits for an answer that comes so long after the message, and returns how often the
// leader looked for it. A look takes a microsecond.
func looking(s *spinning, g *batcher.Gathering, requests int, after time.Duration) (looks int) {
	begun := time.Now()
	s.wait(g, requests, func() bool {
		looks++
		time.Sleep(time.Microsecond)
		return time.Since(begun) >= after
	})
	return looks
}

func TestLeaderLooksForAnAnswerThatIsAboutToCome(t *testing.T) {
	hurried := busy(8)
	hurried.Hurry = 1
	for name, c := range map[string]struct {
		knows    *batcher.Gathering
		requests int
		after    time.Duration
		looks    int
	}{
		"until it is there":         {busy(8), 8, 30 * time.Microsecond, 30},
		"for a while":               {busy(8), 8, time.Second, 74},
		"longer for more requests":  {busy(32), 32, time.Second, 170},
		"not for a lone caller":     {busy(1), 1, 30 * time.Microsecond, 0},
		"not in a crowd":            {busy(129), 1, 30 * time.Microsecond, 0},
		"not for many requests":     {busy(2), 129, 30 * time.Microsecond, 0},
		"not on busy processors":    {hurried, 8, 30 * time.Microsecond, 0},
		"not before the first call": {&batcher.Gathering{}, 1, 30 * time.Microsecond, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(*testing.T) {
				if looks := looking(awake(), c.knows, c.requests, c.after); looks != c.looks {
					t.Errorf("it looked %d times, want %d", looks, c.looks)
				}
			})
		})
	}
}

func TestLeaderSeldomLooksForAnswersOfAServerThatIsFar(t *testing.T) {
	synctest.Test(t, func(*testing.T) {
		var s spinning
		looked := func(messages int, after time.Duration) (waits int) {
			for range messages {
				if looking(&s, busy(8), 8, after) > 0 {
					waits++
				}
			}
			return waits
		}
		looked(200, time.Second)
		if waits := looked(640, time.Second); waits != 10 {
			t.Errorf("it looked for %d answers of 640", waits)
		}
		looked(64, time.Microsecond) // it is near now
		if waits := looked(64, time.Microsecond); waits != 64 {
			t.Errorf("of a server that is near it looked for %d answers of 64", waits)
		}
		if waits := looked(3, time.Second); waits != 2 {
			t.Errorf("one late answer ends the looks for a long time: %d of the next 3", waits)
		}
	})
}

// While some goroutine can always run, the scheduler asks for what other connections have
// received once in 10 ms only. So leaders that find each answer fall asleep now and then.
func TestLeaderFallsAsleepNowAndThenWhileAnswersComeSoon(t *testing.T) {
	synctest.Test(t, func(*testing.T) {
		var s spinning
		together, longest := time.Duration(0), time.Duration(0)
		for range 1000 {
			const after = 30 * time.Microsecond
			if looking(&s, busy(8), 8, after) > 0 {
				together += after
				longest = max(longest, together)
			} else {
				time.Sleep(after)
				together = 0
			}
		}
		if longest > 3*time.Millisecond {
			t.Errorf("the leaders were awake for %s", longest)
		}
	})
}

func TestLeaderFallsAsleepWhereNobodyCanTell(t *testing.T) {
	s := spinning{slept: time.Now().Add(time.Hour)} // so that it would look, no matter how long the test takes
	s.wait(busy(8), 8, nil)
	if s.slept.After(time.Now()) || s.missed > 0 {
		t.Errorf("it looked for an answer, and missed %d", s.missed)
	}
}

func TestLeaderOfAMuxLooksForItsAnswer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	resume := stall(p.mux)
	looks := 0
	p.mux.conn.readable = func() bool {
		looks++
		return true
	}
	p.mux.gathering.Answered(2, 0, time.Millisecond)
	p.mux.spinning.slept = time.Now().Add(time.Minute) // no matter how long the test takes
	outcome := trying(t.Context(), p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	resume()
	if got := <-outcome; got.err != nil {
		t.Fatal(got.err)
	}
	if looks == 0 {
		t.Error("it does not")
	}
}

// The processor is the server's, or the callers'.
func TestLeaderFallsAsleepWithOneProcessor(t *testing.T) {
	pgtest.Long(t)
	pool := pgtest.New(t).Pool
	if runtime.GOOS == "linux" && runtime.GOMAXPROCS(0) > 1 && connected(t, pool, Config{}).mux.conn.readable == nil {
		t.Error("with more it cannot tell whether there is an answer")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	if connected(t, pool, Config{}).mux.conn.readable != nil {
		t.Error("it looks for its answers")
	}
}
