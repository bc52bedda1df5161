package hold

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

func TestContextEndsWithItsParentOrItsCancelAndIsForgotten(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, _ *recorder) {
		mine := errors.New("mine")
		parent, end := context.WithCancelCause(t.Context())
		work, cancel := h.Context(parent)
		defer cancel()
		end(mine)
		if cause := context.Cause(work); !errors.Is(cause, mine) {
			t.Errorf("the parent ended, and the cause is %v", cause)
		}
		other, cancel := h.Context(t.Context())
		cancel()
		cause := context.Cause(other)
		if !errors.Is(other.Err(), context.Canceled) || errors.Is(cause, lockerr.ErrLost) || errors.Is(cause, lockerr.ErrReleased) {
			t.Errorf("it was cancelled, its Err is %v, the cause %v", other.Err(), cause)
		}
		synctest.Wait()
		h.mu.Lock()
		left := len(h.contexts)
		h.mu.Unlock()
		if err := h.Err(); err != nil || left != 0 {
			t.Errorf("the hold still has %d contexts that have ended: %v", left, err)
		}
	})
}

// The hold ends its contexts one after the other. A caller of Err may come between them.
func TestContextWhoseErrReportsTheLossHasEnded(t *testing.T) {
	held(t, func(t *testing.T, _ *Group, h *Hold, r *recorder) {
		type pair struct{ work, child context.Context }
		var pairs []pair
		open := -1 // how many were open when the first had ended; -1: none has ended
		check := func() {
			if open >= 0 {
				return
			}
			open = 0
			for _, p := range pairs {
				if !isClosed(p.work.Done()) {
					open++
				}
				if p.work.Err() == nil || !isClosed(p.work.Done()) || p.child.Err() == nil {
					t.Errorf("Err is %v, Done is closed %t, and Err of the child is %v", p.work.Err(), isClosed(p.work.Done()), p.child.Err())
				}
				if cause := context.Cause(p.child); !errors.Is(cause, lockerr.ErrLost) {
					t.Errorf("the child's cause is %v", cause)
				}
			}
		}
		checks := func() {}
		parent, stop := context.WithCancel(t.Context())
		defer stop()
		for range 2 {
			work, cancel := h.Context(checking{parent, &checks})
			defer cancel()
			child, cancel := context.WithCancel(work)
			defer cancel()
			pairs = append(pairs, pair{work, child})
		}
		checks = check
		r.freeze(untilLost)
		if err := h.Err(); !errors.Is(err, lockerr.ErrLost) || open != 1 {
			t.Errorf("%v, %d contexts were open when one had ended, want 1", err, open)
		}
	})
}

// checking is a parent that calls check while a child ends.
type checking struct {
	context.Context
	check *func()
}

func (c checking) Value(key any) any {
	(*c.check)()
	return c.Context.Value(key)
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
	case <-time.After(patience):
		t.Fatal("the context does not end")
	}
	ended := make(chan error)
	go func() { ended <- h.Err() }()
	select {
	case err := <-ended:
		if !errors.Is(err, lockerr.ErrReleased) {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("the context ends with the mutex of the hold locked")
	}
}
