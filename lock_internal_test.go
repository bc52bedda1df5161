package pgxlock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
)

func TestALockIsBelievedForTTLLessMarginFromTheRequestOn(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		asked := time.Now()
		server.answer(answer{after: 2 * time.Second}) // a slow answer takes from the time, not adds to it
		lock := acquired(t, l, "k")
		if deadline, ok := lock.Deadline(); !ok || !deadline.Equal(asked.Add(believed)) {
			t.Errorf("deadline %s after the request, want %s", deadline.Sub(asked), believed)
		}
		server.freeze(believed - 2*time.Second - 1)
		if err := lock.Err(); err != nil {
			t.Errorf("just before the deadline: %v", err)
		}
		server.freeze(1)
		mustBe(t, "at the deadline", lock.Err(), ErrLost)
	})
}

func TestEveryLookFromTheDeadlineOnSeesTheLossThoughNoTimerRan(t *testing.T) {
	t.Parallel()
	for name, look := range map[string]func(*Lock, context.Context) error{
		"Err":     func(lock *Lock, _ context.Context) error { return lock.Err() },
		"context": func(_ *Lock, work context.Context) error { return errors.Join(work.Err(), context.Cause(work)) },
		"Renew":   func(lock *Lock, _ context.Context) error { return lock.Renew(context.Background()) },
		"Fence":   func(lock *Lock, _ context.Context) error { return lock.Fence(context.Background(), struct{ pgx.Tx }{}) },
		"Release": func(lock *Lock, _ context.Context) error { return lock.Release(context.Background()) },
		"Context": func(lock *Lock, _ context.Context) error {
			late, cancel := lock.Context(context.Background())
			defer cancel()
			return context.Cause(late)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
				lock := acquired(t, l, "k")
				work, cancel := lock.Context(t.Context())
				defer cancel()
				child, cancelChild := context.WithCancel(context.WithValue(work, "a", "b")) //nolint:staticcheck // any key will do
				defer cancelChild()
				server.freeze(believed)
				if err := child.Err(); err != nil {
					t.Fatalf("something looked before us: %v", err)
				}
				mustBe(t, "the first look", look(lock, work), ErrLost)
				mustBe(t, "the child's cause, without a pause", context.Cause(child), ErrLost)
				mustBe(t, "the child, without a pause", child.Err(), context.Canceled)
				if !isClosed(lock.Lost()) || !isClosed(work.Done()) {
					t.Error("Lost and Done are still open after the look")
				}
				if n := server.count(&server.renewals); n != 0 {
					t.Errorf("%d renewals were sent for a lock known to be lost", n)
				}
			})
		})
	}
}

func TestTheContextOfALostLockHasTheCauseAndTheLocksKey(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock := acquired(t, l, "order:42")
		work, cancel := lock.Context(t.Context())
		defer cancel()
		server.freeze(testTTL)
		mustBe(t, "Err", work.Err(), context.Canceled)
		e, ok := errors.AsType[*Error](context.Cause(work))
		if !ok || e.Key != "order:42" || !errors.Is(e, ErrLost) {
			t.Errorf("cause %v", context.Cause(work))
		}
	})
}

func TestLostAndDoneCloseByTimerAtTheDeadline(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, _ *fakeServer) {
		began := time.Now()
		lock := acquired(t, l, "k")
		work, cancel := lock.Context(t.Context())
		defer cancel()
		<-work.Done()
		<-lock.Lost()
		if d := time.Since(began); d != believed {
			t.Errorf("lost after %s, want %s", d, believed)
		}
		mustBe(t, "cause", context.Cause(work), ErrLost)
	})
}

func TestAMachineThatSleptIsToldBeforeTheMarginIsUsedUp(t *testing.T) {
	t.Parallel()
	// It falls asleep somewhere before the deadline and wakes at it: Go's timers
	// believe that there is plenty of time left.
	for _, awake := range []time.Duration{0, time.Second, 20 * time.Second, believed - 1} {
		t.Run(awake.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
				lock := acquired(t, l, "k")
				time.Sleep(awake)
				server.freeze(believed - awake)
				woke := time.Now()
				<-lock.Lost()
				if d := time.Since(woke); d >= testMargin {
					t.Errorf("told %s after the deadline, but the server lets others in %s after it", d, testMargin)
				}
			})
		})
	}
}

func TestARenewalMovesTheDeadlineToItsOwnRequest(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock := acquired(t, l, "k")
		time.Sleep(20 * time.Second)
		sent := server.clock()
		time.Sleep(5 * time.Second) // the reply takes its time
		if err := lock.hold.Renewed(sent); err != nil {
			t.Fatal(err)
		}
		if err := lock.hold.Renewed(sent - 10*time.Second); err != nil { // an earlier one is overtaken
			t.Fatal(err)
		}
		time.Sleep(believed - 5*time.Second - 1)
		if err := lock.Err(); err != nil {
			t.Errorf("before the new deadline: %v", err)
		}
		time.Sleep(time.Nanosecond)
		mustBe(t, "at the new deadline", lock.Err(), ErrLost)
	})
}

func TestALateRenewalRevivesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock := acquired(t, l, "k")
		server.freeze(believed - time.Second)
		sent := server.clock()
		server.freeze(time.Second) // its reply comes at the deadline, and nobody has looked
		mustBe(t, "the late renewal", lock.hold.Renewed(sent), ErrLost)
		mustBe(t, "after it", lock.Err(), ErrLost)
		mustBe(t, "one more", lock.hold.Renewed(server.clock()), ErrLost)
		mustBe(t, "after that", lock.Err(), ErrLost)
	})
}

func TestALossIsForGood(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock := acquired(t, l, "k")
		mustBe(t, "what the server says", lock.hold.Lose(errors.New("taken over")), ErrLost)
		for range 2 {
			mustBe(t, "Release", lock.Release(t.Context()), ErrLost)
			mustBe(t, "Err", lock.Err(), ErrLost)
			mustNotBe(t, "Err", lock.Err(), ErrReleased)
			mustBe(t, "Renew", lock.Renew(t.Context()), ErrLost)
		}
		if n := server.count(&server.discards); n != 1 {
			t.Errorf("its row, which may still stand there, was removed %d times", n)
		}
		if len(l.holds.Holds()) != 0 {
			t.Error("the Locker still counts it among what is held")
		}
	})
}

func TestASecondReleaseReturnsWhatTheFirstReturned(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		good, bad := acquired(t, l, "good"), acquired(t, l, "bad")
		work, cancel := good.Context(t.Context())
		defer cancel()
		if err := errors.Join(good.Release(t.Context()), good.Release(t.Context())); err != nil {
			t.Errorf("Release: %v", err)
		}
		mustBe(t, "Err", good.Err(), ErrReleased)
		mustBe(t, "Renew", good.Renew(t.Context()), ErrReleased)
		mustBe(t, "cause", context.Cause(work), ErrReleased)
		if isClosed(good.Lost()) {
			t.Error("Release closed Lost")
		}
		server.refusal = errors.New("no answer")
		first := bad.Release(t.Context())
		mustBe(t, "the first", first, server.refusal)
		if second := bad.Release(t.Context()); second != first { //nolint:errorlint // the very same
			t.Errorf("first %v, second %v", first, second)
		}
		if n := server.count(&server.releases); n != 2 {
			t.Errorf("%d releases were sent for 2 locks", n)
		}
		time.Sleep(testTTL)
		mustBe(t, "long after", good.Err(), ErrReleased)
	})
}

func TestReleaseIsNotStoppedByItsContext(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock := acquired(t, l, "k")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := lock.Release(ctx); err != nil || server.count(&server.releases) != 1 {
			t.Errorf("%v, %d releases were sent", err, server.count(&server.releases))
		}
	})
}

func TestALocksContextEndsWithItsParentAndItsCancel(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, _ *fakeServer) {
		lock := acquired(t, l, "k")
		mine := errors.New("mine")
		parent, end := context.WithCancelCause(t.Context())
		work, cancel := lock.Context(parent)
		defer cancel()
		end(mine)
		mustBe(t, "cause", context.Cause(work), mine)
		cancel()
		other, cancel := lock.Context(t.Context())
		cancel()
		mustBe(t, "cancelled", other.Err(), context.Canceled)
		mustNotBe(t, "cancelled", context.Cause(other), ErrLost, ErrReleased)
		synctest.Wait()
		if err := lock.Err(); err != nil {
			t.Errorf("the lock has ended with its contexts: %v", err)
		}
	})
}
