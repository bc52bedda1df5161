package locktest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func leads(t *testing.T, locks *pgxlock.Locker) {
	const candidates = 4
	var leading atomic.Int32
	resigned := errors.New("resigned")
	ended := make(chan error, candidates)
	for range candidates {
		go func() {
			ended <- locks.Lead(t.Context(), "leader", func(ctx context.Context, term *pgxlock.Lock) error {
				if leading.Add(1) != 1 {
					t.Error("two lead")
				}
				is(t, "a leader's lock", term.Err(), nil)
				is(t, "a leader's context", ctx.Err(), nil)
				if !locks.Leads("leader") || locks.Leads("else") {
					t.Errorf("the leader leads: %t, and for another key: %t", locks.Leads("leader"), locks.Leads("else"))
				}
				leading.Add(-1)
				return resigned
			})
		}()
	}
	for range candidates {
		is(t, "Lead", <-ended, resigned)
	}
	if locks.Leads("leader") {
		t.Error("it leads after all have resigned")
	}

	lock := acquire(t, locks, "leader")
	is(t, "Lead without a wait", locks.Lead(t.Context(), "leader", func(context.Context, *pgxlock.Lock) error { return nil }, pgxlock.NoWait), pgxlock.ErrNotAcquired)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	is(t, "Lead whose context has ended", locks.Lead(ctx, "leader", func(context.Context, *pgxlock.Lock) error { return nil }), context.Canceled)
	if err := locks.Lead(t.Context(), "leader", nil); err == nil {
		t.Error("Lead has nothing to do, and did it")
	}
	inside, cancel := lock.Context(t.Context())
	defer cancel()
	is(t, "Lead by the holder of the lock", locks.Lead(inside, "leader", func(context.Context, *pgxlock.Lock) error { return nil }), pgxlock.ErrDeadlock)
	if err := locks.Lead(t.Context(), "", func(context.Context, *pgxlock.Lock) error { return nil }); err == nil {
		t.Error("nobody was asked who leads")
	}
}

func stepsDown(t *testing.T, locks *pgxlock.Locker) {
	err := locks.AskToStepDown(t.Context(), "leader")
	if errors.Is(err, pgxlock.ErrSchema) && locks.Kind() == pgxlock.KindAdvisory {
		return // which lock where nothing is installed
	}
	is(t, "asking nobody", err, nil)
	type term struct {
		who string
		ctx context.Context
	}
	terms := make(chan term)
	ended := make(chan error, 2)
	ctx, stop := context.WithCancel(t.Context())
	candidate := func(who string) {
		ended <- locks.Lead(ctx, "leader", func(ctx context.Context, _ *pgxlock.Lock) error {
			select {
			case terms <- term{who, ctx}:
			case <-ctx.Done(): // it got the lock when the test was over
			}
			<-ctx.Done()
			return context.Cause(ctx)
		})
	}
	go candidate("a")
	first := <-terms
	go candidate("b")
	is(t, "asking about another key", locks.AskToStepDown(t.Context(), "else"), nil)
	is(t, "who leads by this one", first.ctx.Err(), nil)
	for _, want := range []string{"b", "a", "b"} {
		for limit := time.Now().Add(pgtest.Patience); first.who != want; { // the other one may not wait yet
			if time.Now().After(limit) {
				t.Fatalf("%s goes on leading", first.who)
			}
			is(t, "AskToStepDown", locks.AskToStepDown(t.Context(), "leader"), nil)
			<-first.ctx.Done()
			is(t, "why it ended", context.Cause(first.ctx), pgxlock.ErrStepDown)
			first = <-terms
		}
	}
	stop()
	for range 2 {
		is(t, "Lead", <-ended, context.Canceled)
	}
}
