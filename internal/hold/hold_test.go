package hold

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A recorder is the owner and the backend of a hold, and records what they hear.
type recorder struct {
	Backend  // nothing else is called
	ended    error
	until    time.Duration
	frozen   atomic.Int64 // how far the clock is ahead of the bubble's
	renewals []error
	keeps    int
	drops    int
	lost     bool

	freezes atomic.Bool // the process, for 10 s, right after the next reading of the clock
}

func (r *recorder) Ended(why error, until time.Duration) error {
	r.ended, r.until = why, until
	return why
}
func (r *recorder) Renewed(err error)           { r.renewals = append(r.renewals, err) }
func (r *recorder) Close(context.Context) error { return nil }
func (r *recorder) Keep(*Hold)                  { r.keeps++ }
func (r *recorder) Drop(_ *Hold, lost bool)     { r.drops++; r.lost = lost }

// patience bounds a wait that would never end, as pgtest.Patience does.
const patience = 15 * time.Minute

const untilLost = 59 * time.Second // the local deadline of a hold of held

// freeze lets time pass by the clock of the group of which no timer takes notice.
func (r *recorder) freeze(d time.Duration) { r.frozen.Add(int64(d)) }

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// held runs a test with a hold of a minute, in a bubble.
func held(t *testing.T, test func(t *testing.T, g *Group, h *Hold, r *recorder)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		r := &recorder{}
		g := &Group{Backend: r, Clock: func() time.Duration {
			now := time.Since(began) + time.Duration(r.frozen.Load())
			if r.freezes.Swap(false) {
				time.Sleep(10 * time.Second)
			}
			return now
		}}
		h := &Hold{TTL: time.Minute, Margin: time.Second}
		g.Begin(h, r, "k", lockkey.Name{Key: "k"})
		if !h.Granted(1, 0, 0) {
			t.Fatal("the grant is late")
		}
		if err := h.Admit(); err != nil {
			t.Fatal(err)
		}
		test(t, g, h, r)
	})
}

func TestHoldLastsForTTLLessMarginFromTheRequestOn(t *testing.T) {
	held(t, func(t *testing.T, g *Group, first *Hold, r *recorder) {
		if err := first.End(lockerr.ErrReleased); err != nil {
			t.Fatal(err)
		}
		began, sent := time.Now(), g.Clock()
		time.Sleep(2 * time.Second) // a slow answer takes from the time, and does not add to it
		h := &Hold{TTL: time.Minute, Margin: time.Second}
		g.Begin(h, r, "slow", first.Queue)
		if !h.Granted(2, sent, g.Clock()) {
			t.Fatal("the grant is late")
		}
		if err := h.Admit(); err != nil {
			t.Fatal(err)
		}
		if deadline, ok := h.Deadline(); !ok || !deadline.Equal(began.Add(untilLost)) {
			t.Errorf("the deadline is %s after the request, want %s", deadline.Sub(began), untilLost)
		}
		r.freeze(untilLost - 2*time.Second - 1)
		if err := h.Err(); err != nil {
			t.Errorf("just before the deadline: %v", err)
		}
		r.freeze(1)
		if err := h.Err(); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("at the deadline: %v", err)
		}
	})
}

func TestEveryCallFromTheDeadlineOnSeesTheLossThoughNoTimerRan(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(*Hold, context.Context) error{
		"Err":     func(h *Hold, _ context.Context) error { return h.Err() },
		"Renewed": func(h *Hold, _ context.Context) error { return h.Renewed(time.Second) },
		"Lose":    func(h *Hold, _ context.Context) error { return h.Lose(errors.New("evicted")) },
		"End":     func(h *Hold, _ context.Context) error { return h.End(lockerr.ErrReleased) },
		"context": func(_ *Hold, work context.Context) error {
			if work.Err() == nil {
				return nil
			}
			return context.Cause(work)
		},
		"Context": func(h *Hold, _ context.Context) error {
			late, cancel := h.Context(context.Background())
			defer cancel()
			if !isClosed(late.Done()) { // Cause would call Err, which ends it
				return nil
			}
			return context.Cause(late)
		},
	} {
		t.Run(name, func(t *testing.T) {
			held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
				lost := h.Lost()
				work, cancel := h.Context(t.Context())
				defer cancel()
				type key struct{}
				child, cancelChild := context.WithCancel(context.WithValue(work, key{}, 1))
				defer cancelChild()
				r.freeze(untilLost)
				if err := child.Err(); err != nil {
					t.Fatalf("something noticed before the call: %v", err)
				}
				if err := call(h, work); !errors.Is(err, lockerr.ErrLost) || !errors.Is(err, errDeadlinePassed) || !errors.Is(r.ended, errDeadlinePassed) {
					t.Errorf("the first call: %v, and the owner heard %v", err, r.ended)
				}
				if cause := context.Cause(child); !errors.Is(child.Err(), context.Canceled) || !errors.Is(cause, lockerr.ErrLost) {
					t.Errorf("right after it a child's Err is %v, its cause %v", child.Err(), cause)
				}
				if !isClosed(lost) || !isClosed(work.Done()) {
					t.Error("right after it Lost or Done is open")
				}
			})
		})
	}
}

func TestLostAndDoneCloseByTimerAtTheDeadline(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, _ *recorder) {
		began := time.Now()
		work, cancel := h.Context(t.Context())
		defer cancel()
		<-work.Done()
		<-h.Lost()
		if d := time.Since(began); d != untilLost {
			t.Errorf("lost after %s, want %s", d, untilLost)
		}
		if cause := context.Cause(work); !errors.Is(cause, lockerr.ErrLost) {
			t.Errorf("the cause is %v", cause)
		}
	})
}

func TestGroupNoticesTheLossWithinTheMarginAfterTheMachineSlept(t *testing.T) {
	t.Parallel()
	// The machine falls asleep somewhere before the deadline and wakes at it: by Go's timers
	// there is plenty of time left.
	for _, awake := range []time.Duration{0, time.Second, 20 * time.Second, untilLost - 1} {
		t.Run(awake.String(), func(t *testing.T) {
			held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
				time.Sleep(awake)
				r.freeze(untilLost - awake)
				woke := time.Now()
				<-h.Lost()
				if d := time.Since(woke); d >= h.Margin {
					t.Errorf("lost %s after the deadline, but the server lets others in %s after it", d, h.Margin)
				}
			})
		})
	}
}

func TestLateGrantIsNotHeldAndMayBeAskedForAgain(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		again := &Hold{TTL: time.Minute, Margin: time.Second}
		h.Group().Begin(again, r, "k", h.Queue)
		if again.Granted(2, 0, 59*time.Second) {
			t.Error("a grant that arrives at its deadline counts")
		}
		if !again.Granted(3, time.Minute, time.Minute+58*time.Second) {
			t.Error("the late grant spoils the next one")
		}
	})
}

func TestRenewalMovesTheDeadlineForwardsToThatOfItsRequest(t *testing.T) {
	held(t, func(t *testing.T, g *Group, h *Hold, r *recorder) {
		failed := errors.New("failed")
		h.NotRenewed(failed)
		time.Sleep(15 * time.Second)
		for _, sent := range []time.Duration{10 * time.Second, 5 * time.Second} { // the answers take their time, and overtake each other
			if err := h.Renewed(sent); err != nil {
				t.Fatal(err)
			}
		}
		if until, _ := h.Ended(); until != 10*time.Second+untilLost {
			t.Errorf("the deadline is %s", until)
		}
		if len(r.renewals) != 2 || !errors.Is(r.renewals[0], failed) || r.renewals[1] != nil {
			t.Errorf("the owner heard of %v", r.renewals)
		}
		time.Sleep(10*time.Second + untilLost - g.Clock() - 1)
		if err := h.Err(); err != nil {
			t.Errorf("before the new deadline: %v", err)
		}
		r.freeze(1)
		if err := h.Renewed(time.Hour); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("a renewal at the deadline: %v", err)
		}
		h.NotRenewed(failed)
		until, why := h.Ended()
		if !errors.Is(why, lockerr.ErrLost) || until != 10*time.Second+untilLost || r.until != until || len(r.renewals) != 2 {
			t.Errorf("it ended at %s with %v, the owner heard %s and %v", until, why, r.until, r.renewals)
		}
	})
}

func TestDeadlineIsThatOfTheShorterTTLUntilTheServerHasAnswered(t *testing.T) {
	held(t, func(t *testing.T, g *Group, h *Hold, r *recorder) {
		want := func(what string, until time.Duration) {
			t.Helper()
			if got, err := h.Ended(); got != until || err != nil {
				t.Errorf("%s: the deadline is %s, %v, want %s", what, got, err, until)
			}
		}
		is := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		const grown, shrunk = 10 * time.Minute, 10 * time.Second
		is(h.Changing(grown, time.Second, 0))
		want("before the answer to a longer TTL", untilLost)
		is(h.Changed(grown, time.Minute, time.Second))
		want("after it", time.Second+grown-time.Minute)
		if h.Lasts() != grown || r.keeps != 2 || r.drops != 1 {
			t.Errorf("its TTL is %s, it was kept %d times and dropped %d times", h.Lasts(), r.keeps, r.drops)
		}
		is(h.Changing(shrunk, time.Second, 2*time.Second))
		want("before the answer to a shorter TTL", 2*time.Second+shrunk-time.Second)
		is(h.Renewed(3 * time.Second)) // it got no answer, and the renewal behind it got one
		want("after a renewal with the old TTL", 3*time.Second+grown-time.Minute)

		lost := h.Lost()
		time.Sleep(4 * time.Second) // from now on the timer is set for half a minute
		is(h.Changing(shrunk, time.Second, 4*time.Second))
		if <-lost; g.Clock() != 4*time.Second+shrunk-time.Second {
			t.Errorf("it was lost at %s", g.Clock())
		}
		if err := h.Changed(shrunk, time.Second, 4*time.Second); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("an answer at the deadline: %v", err)
		}
		if err := h.Changing(grown, time.Second, 5*time.Second); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("a change of a lost lock: %v", err)
		}
	})
}

func TestLateRenewalRevivesNothing(t *testing.T) {
	held(t, func(t *testing.T, g *Group, h *Hold, r *recorder) {
		r.freeze(untilLost - time.Second)
		sent := g.Clock()
		r.freeze(time.Second) // the answer arrives at the deadline, and no call has noticed it
		for _, sent := range []time.Duration{sent, g.Clock()} {
			if err := h.Renewed(sent); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("a renewal at the deadline: %v", err)
			}
			if err := h.Err(); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("after it: %v", err)
			}
		}
	})
}

func TestGroupEndsWhatExpiresAndForgetsIt(t *testing.T) {
	held(t, func(t *testing.T, g *Group, h *Hold, r *recorder) {
		lost := h.Lost()
		time.Sleep(30 * time.Second)
		if err := h.Renewed(30 * time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(58 * time.Second)
		if len(g.Holds()) != 1 {
			t.Errorf("%d are held before the deadline", len(g.Holds()))
		}
		time.Sleep(2 * time.Second)
		<-lost
		synctest.Wait()
		if !errors.Is(r.ended, lockerr.ErrLost) || r.drops != 1 || !r.lost || len(g.Holds()) != 0 {
			t.Errorf("ended with %v, dropped %d times as lost %t, %d are held", r.ended, r.drops, r.lost, len(g.Holds()))
		}
		if err := h.Renewed(time.Minute + 30*time.Second); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("a renewal revives it: %v", err)
		}
	})
}

func TestDeadlineIsNeverTooLateForAFrozenProcess(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		began := time.Now()
		r.freezes.Store(true)
		if until, ok := h.Deadline(); !ok || until.Sub(began) > 59*time.Second {
			t.Errorf("the deadline is %s away, want 59 s", until.Sub(began))
		}
	})
}

func TestHoldIsKeptOnceAndOnlyIfItIsAdmittedInTime(t *testing.T) {
	held(t, func(t *testing.T, g *Group, h *Hold, r *recorder) {
		late := &Hold{TTL: time.Minute, Margin: time.Second}
		g.Begin(late, r, "late", h.Queue)
		if !late.Granted(2, 0, 0) {
			t.Fatal("the grant is late")
		}
		r.freeze(untilLost)
		if err := late.Admit(); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("admitted at its deadline: %v", err)
		}
		if r.keeps != 1 || r.drops != 1 || len(g.Holds()) != 1 {
			t.Errorf("%d were kept, %d dropped, %d are held", r.keeps, r.drops, len(g.Holds()))
		}
	})
}

func TestEndKeepsTheFirstReason(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		if err := h.End(lockerr.ErrReleased); err != nil || r.lost {
			t.Errorf("%v, dropped as lost %t", err, r.lost)
		}
		_ = h.Lose(errors.New("later"))
		time.Sleep(2 * time.Minute)
		if err := h.Err(); !errors.Is(err, lockerr.ErrReleased) || errors.Is(err, lockerr.ErrLost) {
			t.Errorf("a released hold reports %v", err)
		}
	})
}

func TestLossKeepsItsReasonForGood(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		why := errors.New("evicted")
		err := h.Lose(why)
		if !errors.Is(err, lockerr.ErrLost) || !errors.Is(err, why) || !r.lost {
			t.Errorf("%v, dropped as lost %t", err, r.lost)
		}
		if !isClosed(h.Lost()) {
			t.Error("Lost stays open")
		}
		if err := h.End(lockerr.ErrReleased); !errors.Is(err, why) {
			t.Errorf("End after the loss: %v", err)
		}
		if err := h.Err(); !errors.Is(err, why) || errors.Is(err, lockerr.ErrReleased) {
			t.Errorf("Err after End after the loss: %v", err)
		}
	})
}

func TestGroupChecksMoreThanOneHoldEachInTime(t *testing.T) {
	held(t, func(t *testing.T, g *Group, first *Hold, r *recorder) {
		var holds []*Hold
		for _, ttl := range []time.Duration{20 * time.Second, 40 * time.Second} {
			h := &Hold{TTL: ttl, Margin: 10 * time.Second}
			g.Begin(h, r, "k", first.Queue)
			if !h.Granted(2, 0, 0) {
				t.Fatal("the grant is late")
			}
			if err := h.Admit(); err != nil {
				t.Fatal(err)
			}
			holds = append(holds, h)
		}
		r.freeze(5 * time.Second) // half a margin
		for _, h := range append(holds, first) {
			until, _ := h.Ended()
			lost := h.Lost()
			time.Sleep(until - g.Clock() + h.Margin/2)
			synctest.Wait()
			if !isClosed(lost) {
				t.Errorf("a hold of %s is not lost half a margin after its deadline", h.TTL)
			}
		}
	})
}
