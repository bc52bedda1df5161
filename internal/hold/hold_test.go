package hold

import (
	"context"
	"errors"
	"slices"
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

func TestContextThatEndsIsForgotten(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, _ *recorder) {
		parent, end := context.WithCancel(t.Context())
		_, cancel := h.Context(parent)
		defer cancel()
		end()
		_, cancel = h.Context(t.Context())
		cancel()
		synctest.Wait()
		h.mu.Lock()
		left := len(h.contexts)
		h.mu.Unlock()
		if err := h.Err(); err != nil || left != 0 {
			t.Errorf("the hold still has %d contexts that have ended: %v", left, err)
		}
	})
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

func TestDeadlineIsNeverTooLateForAFrozenProcess(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		began := time.Now()
		r.freezes.Store(true)
		if until, ok := h.Deadline(); !ok || until.Sub(began) > 59*time.Second {
			t.Errorf("the deadline is %s away, want 59 s", until.Sub(began))
		}
	})
}

const untilLost = 59 * time.Second // the local deadline of a hold of held

// freeze lets time pass by the clock of the group of which no timer takes notice.
func (r *recorder) freeze(d time.Duration) { r.frozen.Add(int64(d)) }

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

func TestRenewalMovesTheDeadlineForwardsAndTellsTheOwner(t *testing.T) {
	held(t, func(t *testing.T, g *Group, h *Hold, r *recorder) {
		failed := errors.New("failed")
		h.NotRenewed(failed)
		for _, sent := range []time.Duration{10 * time.Second, 5 * time.Second} {
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
		r.freeze(10*time.Second + untilLost)
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

func TestEndAndLossAfterTheDeadlineSayThatItPassed(t *testing.T) {
	for name, end := range map[string]func(*Hold) error{
		"End":  func(h *Hold) error { return h.End(lockerr.ErrReleased) },
		"Lose": func(h *Hold) error { return h.Lose(errors.New("evicted")) },
	} {
		t.Run(name, func(t *testing.T) {
			held(t, func(t *testing.T, g *Group, h *Hold, r *recorder) {
				r.freeze(untilLost)
				if err := end(h); !errors.Is(err, errDeadlinePassed) || !errors.Is(r.ended, errDeadlinePassed) {
					t.Errorf("%v, and the owner heard %v", err, r.ended)
				}
			})
		})
	}
}

func TestLossBeforeTheDeadlineIsALossWithItsReason(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		why := errors.New("evicted")
		err := h.Lose(why)
		if !errors.Is(err, lockerr.ErrLost) || !errors.Is(err, why) || !r.lost {
			t.Errorf("%v, dropped as lost %t", err, r.lost)
		}
		select {
		case <-h.Lost():
		default:
			t.Error("Lost stays open")
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
			select {
			case <-lost:
			default:
				t.Errorf("a hold of %s is not lost half a margin after its deadline", h.TTL)
			}
		}
	})
}

func TestContextEndsWithItsHoldAtTheLatestWhenItIsAsked(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		ctx, cancel := h.Context(t.Context())
		defer cancel()
		r.freeze(untilLost)
		if ctx.Err() == nil || !errors.Is(context.Cause(ctx), lockerr.ErrLost) {
			t.Errorf("Err %v, cause %v", ctx.Err(), context.Cause(ctx))
		}
		later, cancel := h.Context(t.Context())
		defer cancel()
		select {
		case <-later.Done():
		default:
			t.Error("a context that is made after the loss goes on")
		}
	})
}

func TestContextsEndWhenTheirLockerIsClosedThoughTheLockIsHeld(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, _ *recorder) {
		before, cancel := h.Context(t.Context())
		defer cancel()
		h.EndContexts(lockerr.ErrClosed)
		after, cancel := h.Context(t.Context())
		defer cancel()
		for name, ctx := range map[string]context.Context{"before": before, "after": after} {
			if cause := context.Cause(ctx); !errors.Is(cause, lockerr.ErrClosed) {
				t.Errorf("%s: %v", name, cause)
			}
		}
		if err := h.Err(); err != nil {
			t.Error(err)
		}
	})
}

func TestHeldByYieldsAllHoldsTheLastFirst(t *testing.T) {
	held(t, func(t *testing.T, g *Group, outer *Hold, r *recorder) {
		inner := &Hold{}
		g.Begin(inner, r, "inner", outer.Queue)
		ctx, cancel := outer.Context(t.Context())
		defer cancel()
		inner.Granted(2, 0, 0)
		ctx, cancel = inner.Context(context.WithValue(ctx, asking{}.hold, 1))
		defer cancel()
		if got := slices.Collect(HeldBy(ctx)); !slices.Equal(got, []*Hold{inner, outer}) {
			t.Errorf("%d holds: %v", len(got), got)
		}
	})
}

// asking is a context whose methods ask a hold, as those of another lock's context do.
type asking struct {
	context.Context
	hold *Hold
}

func (a asking) Value(key any) any {
	_ = a.hold.Err()
	return a.Context.Value(key)
}

func TestContextsEndWithoutTheMutexOfTheHold(t *testing.T) {
	t.Parallel()
	r := &recorder{}
	h := &Hold{}
	(&Group{Clock: func() time.Duration { return 0 }, Backend: r}).Begin(h, r, "k", lockkey.Name{Key: "k"})
	h.Granted(1, 0, 0)
	parent, end := context.WithCancel(t.Context())
	defer end()
	ctx, cancel := h.Context(asking{parent, h})
	defer cancel()
	go func() { _ = h.End(lockerr.ErrReleased) }()
	select {
	case <-ctx.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the context does not end")
	}
	ended := make(chan error)
	go func() { ended <- h.Err() }()
	select {
	case err := <-ended:
		if !errors.Is(err, lockerr.ErrReleased) {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the context ends with the mutex of the hold locked")
	}
}
