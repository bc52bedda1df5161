package pgxlock

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
)

// What Observe is told, when, and whom it holds up, in bubbles: by the clock, and without
// a server.

// told is an Observe that keeps what it is told, and does what an event is to bring about.
type told struct {
	mu     sync.Mutex
	events []Event
	on     map[EventOp]func() // by Op
}

func (o *told) observe(_ context.Context, e Event) {
	o.mu.Lock()
	o.events = append(o.events, e)
	on := o.on[e.Op]
	o.mu.Unlock()
	if on != nil {
		on()
	}
}

// ops returns what was told so far, in its order.
func (o *told) ops() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var ops []string
	for _, e := range o.events {
		ops = append(ops, string(e.Op))
	}
	return strings.Join(ops, " ")
}

// last returns the last event.
func (o *told) last() Event {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.events[len(o.events)-1]
}

func (o *told) wants(t *testing.T, what string) {
	t.Helper()
	if got := o.ops(); got != what {
		t.Errorf("told: %q, want %q", got, what)
	}
}

// observing runs test in a bubble with a Locker that is observed.
func observing(t *testing.T, on map[EventOp]func(), test func(t *testing.T, l *Locker, server *fakeServer, o *told)) {
	t.Helper()
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		o := &told{on: on}
		l.observe = o.observe
		test(t, l, server, o)
	})
}

func TestEventsTellHowLongWasWaitedAndHeld(t *testing.T) {
	observing(t, nil, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		server.answer(answer{after: time.Second, err: &hold.Busy{Holder: "other:1"}}, answer{after: time.Second})
		lock := acquired(t, l, "k") // asks, hears, waits a second, asks again
		time.Sleep(4 * time.Second)
		if err := lock.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		time.Sleep(2 * time.Second)
		if err := lock.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		o.wants(t, "busy wait acquired renewed released")
		type part struct {
			key, holder string
			token       int64
			busy        bool
			wait, held  time.Duration
		}
		var got []part
		for _, e := range o.events {
			got = append(got, part{e.Key, e.Holder, e.Token, e.Busy, e.Wait, e.Held})
			if e.Kind != KindLease || e.Mode != Exclusive || e.Call == 0 || e.Call != o.events[0].Call || e.Err != nil {
				t.Errorf("%+v", e)
			}
		}
		want := []part{
			{"k", "other:1", 0, true, time.Second, 0},
			{"k", "", 0, true, 3 * time.Second, 0},
			{"k", "me:1", 2, true, 3 * time.Second, 0},
			{"k", "me:1", 2, false, 0, 4 * time.Second},
			{"k", "me:1", 2, false, 0, 6 * time.Second},
		}
		if !slices.Equal(got, want) {
			t.Errorf("told\n%+v, want\n%+v", got, want)
		}
	})
}

func TestLossIsToldOnceHoweverLateItIsNoticed(t *testing.T) {
	observing(t, nil, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		lock := acquired(t, l, "k")
		server.freeze(time.Hour)
		if lock.Err() == nil || lock.Renew(t.Context()) == nil || lock.Release(t.Context()) == nil {
			t.Error("it is not lost")
		}
		o.wants(t, "wait acquired lost") // all is told when Release has returned
		if e := o.last(); e.Held != testTTL-testMargin {
			t.Errorf("it was held for %s, want %s: nobody believed in it any longer", e.Held, testTTL-testMargin)
		}
		mustBe(t, "the loss", o.last().Err, ErrLost)
	})
}

func TestReleaseThatFailsIsARelease(t *testing.T) {
	down := errors.New("no route to host")
	for what, test := range map[string]struct {
		refusal error
		ops     string
	}{
		"the server is away":         {down, "wait acquired released"},
		"the server says it is lost": {errors.Join(ErrLost, down), "wait acquired lost"}, // which nobody had noticed
	} {
		t.Run(what, func(t *testing.T) {
			observing(t, nil, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
				lock := acquired(t, l, "k")
				time.Sleep(time.Second)
				server.asides = []func(){func() { time.Sleep(time.Second) }}
				server.refusal = test.refusal
				err := lock.Release(t.Context())
				o.wants(t, test.ops)
				if e := o.last(); e.Err != err || !errors.Is(err, down) || e.Held != time.Second { //nolint:errorlint // that very error
					t.Errorf("%+v of %v", e, err)
				}
			})
		})
	}
}

// Whatever ends a lock before its call has returned is told behind the grant.
func TestLossBeforeTheCallReturnsIsObservedAfterTheGrant(t *testing.T) {
	for end, ops := range map[string]string{"loss": "wait acquired lost", "Close": "wait acquired released"} {
		t.Run(end, func(t *testing.T) {
			on := make(map[EventOp]func())
			observing(t, on, func(t *testing.T, l *Locker, _ *fakeServer, o *told) {
				o.mu.Lock()
				on[EventWait] = func() {
					if end == "Close" {
						ctx, cancel := context.WithCancel(t.Context())
						cancel()
						go func() { _ = l.Close(ctx) }() // does not wait for this call, and releases
					}
					time.Sleep(2 * testTTL)
				}
				o.mu.Unlock()
				lock := acquired(t, l, "k")
				synctest.Wait()
				o.wants(t, ops)
				_ = lock.Release(t.Context())
				o.wants(t, ops)
			})
		})
	}
}

func TestObserverThatBlocksHoldsUpItsOwnCallOnly(t *testing.T) {
	block := make(map[EventOp]func())
	observing(t, block, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		first, other := acquired(t, l, "k"), acquired(t, l, "other")
		gate := make(chan struct{})
		o.mu.Lock()
		block[EventRenewed] = func() { <-gate }
		o.mu.Unlock()
		for range 5 { // far beyond the first deadline
			time.Sleep(testTTL / 2)
			if err := errors.Join(first.Renew(t.Context()), other.Renew(t.Context())); err != nil {
				t.Fatalf("a renewal waits for Observe: %v", err)
			}
			synctest.Wait()
		}
		o.wants(t, "wait acquired wait acquired renewed renewed")
		third := acquired(t, l, "third")

		released := make(chan error, 1)
		go func() { released <- first.Release(t.Context()) }()
		synctest.Wait()
		if server.count(&server.releases) != 1 || len(released) > 0 {
			t.Error("Release does not give back first, and then wait for Observe")
		}
		closed := make(chan error, 1)
		go func() { closed <- l.Close(t.Context()) }()
		synctest.Wait()
		if len(closed) > 0 || third.Err() == nil {
			t.Error("Close does not release first, and then wait for Observe")
		}
		close(gate)
		if err := errors.Join(<-released, <-closed); err != nil {
			t.Error(err)
		}
		for _, lock := range []*Lock{first, other} {
			var ops []string
			for _, e := range o.events {
				if e.Key == lock.Key() {
					ops = append(ops, string(e.Op))
				}
			}
			// What came while it was blocked is nothing that the end does not say.
			if got := strings.Join(ops, " "); got != "wait acquired renewed released" {
				t.Errorf("%s: told %q", lock.Key(), got)
			}
		}
	})
}

func TestRenewalsThatObserveIsTooSlowForAreToldAsOne(t *testing.T) {
	block := make(map[EventOp]func())
	observing(t, block, func(t *testing.T, l *Locker, _ *fakeServer, o *told) {
		lock := acquired(t, l, "k")
		gate := make(chan struct{})
		o.mu.Lock()
		block[EventRenewed] = func() { <-gate }
		o.mu.Unlock()
		for range 5 {
			time.Sleep(time.Second)
			if err := lock.Renew(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		close(gate)
		synctest.Wait()
		o.wants(t, "wait acquired renewed renewed")
		if e := o.last(); e.Held != 5*time.Second {
			t.Errorf("the last one is of %s, want the last renewal, after 5 s", e.Held)
		}
	})
}

// An observer that blocks in the middle of a grant leaves a lock that is kept alive.
func TestLockWhoseGrantIsStillBeingToldIsRenewedAndLost(t *testing.T) {
	block := make(map[EventOp]func())
	observing(t, block, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		gate := make(chan struct{})
		o.mu.Lock()
		block[EventAcquired] = func() { <-gate }
		o.mu.Unlock()
		got := make(chan *Lock)
		go func() { got <- acquired(t, l, "k") }()
		synctest.Wait()
		held := l.holds.Holds()
		if len(held) != 1 {
			t.Fatalf("%d locks are held", len(held))
		}
		time.Sleep(testTTL / 2)
		if err := l.backend.Renew(t.Context(), held[0]); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * testTTL)
		synctest.Wait()
		mustBe(t, "the lock", held[0].Err(), ErrLost)
		o.wants(t, "wait acquired")
		close(gate)
		<-got
		synctest.Wait()
		o.wants(t, "wait acquired lost") // which says all that the renewal did
	})
}

func TestCloseReturnsWhenEveryLossIsTold(t *testing.T) {
	on := make(map[EventOp]func())
	observing(t, on, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		gate := make(chan struct{})
		o.mu.Lock()
		on[EventLost] = func() { <-gate }
		o.mu.Unlock()
		lock := acquired(t, l, "k")
		server.freeze(testTTL)
		mustBe(t, "the lock", lock.Err(), ErrLost)
		closed := make(chan error, 1)
		go func() { closed <- l.Close(t.Context()) }()
		synctest.Wait()
		if len(closed) > 0 {
			t.Error("Close does not wait for Observe")
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		mustBe(t, "a Close that does not wait", l.Close(ended), context.Canceled)
		close(gate)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		o.wants(t, "wait acquired lost")
	})
}

func TestPanicOfObserveIsLoggedAndHarmsNothing(t *testing.T) {
	always := func() { panic("of the observer") }
	on := map[EventOp]func(){EventBusy: always, EventWait: always, EventAcquired: always, EventRenewed: always, EventLost: always, EventReleased: always}
	observing(t, on, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		var said bytes.Buffer
		l.log = slog.New(slog.NewTextHandler(&said, nil))
		server.answer(busyFor(time.Second))
		err := l.Do(t.Context(), "k", func(ctx context.Context, lock *Lock) error {
			time.Sleep(time.Second)
			err := lock.Renew(ctx)
			synctest.Wait()
			return err
		})
		if err != nil {
			t.Error(err)
		}
		_ = acquired(t, l, "lost")
		time.Sleep(testTTL)
		synctest.Wait()
		o.wants(t, "busy wait acquired renewed released wait acquired lost")
		if n := strings.Count(said.String(), "Observe panicked"); n != 8 || !strings.Contains(said.String(), "observe_internal_test.go") {
			t.Errorf("%d are logged, want 8 with the stack:\n%s", n, said.String())
		}
	})
}

func TestCallThatGetsNothingHasOneWaitThatSaysWhy(t *testing.T) {
	observing(t, nil, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		down := errors.New("no route to host")
		server.answer(busyFor(time.Hour), answer{err: down}, busyFor(time.Hour), busyFor(time.Minute))
		check := func(ops string, busy bool, key, holder string, err error, wants ...error) {
			t.Helper()
			o.wants(t, ops)
			e := o.last()
			if e.Busy != busy || e.Key != key || e.Holder != holder || e.Err.Error() != err.Error() {
				t.Errorf("told %+v of %v", e, err)
			}
			mustBe(t, "Err", e.Err, wants...)
			o.events = nil
		}
		_, err := l.TryAcquire(t.Context(), "k")
		check("busy wait", true, "k", "other:1", err, ErrNotAcquired)
		_, err = l.Acquire(t.Context(), "k")
		check("wait", false, "k", "", err, down)
		_, err = l.TryDo(t.Context(), "k", nothing)
		if err != nil {
			t.Error(err)
		}
		o.wants(t, "busy wait")
		o.events = nil
		_, err = l.Acquire(t.Context(), "k", MaxWait(time.Second/2))
		check("busy wait", true, "k", "other:1", err, ErrNotAcquired)

		lock := acquired(t, l, "k")
		o.events = nil
		ctx, cancel := lock.Context(t.Context())
		_, err = l.Acquire(ctx, "k")
		check("wait", false, "k", "", err, ErrDeadlock)
		cancel()
		_, err = l.AcquireAll(ctx, []string{"b", "a"})
		check("wait", false, "a", "", err, context.Canceled)
		_, err = l.Acquire(t.Context(), "")
		if err == nil || o.ops() != "" {
			t.Errorf("a call without a key: %v, told %q", err, o.ops())
		}
	})
}

// Of many locks only those that a call returns are events.
func TestManyLocksAreToldWhenAllAreThere(t *testing.T) {
	observing(t, nil, func(t *testing.T, l *Locker, server *fakeServer, o *told) {
		server.answer(answer{}, busyFor(time.Second), answer{})
		_, err := l.AcquireAll(t.Context(), []string{"a", "b", "c"}, NoWait)
		mustBe(t, "one is busy", err, ErrNotAcquired)
		o.wants(t, "busy wait")
		if e := o.last(); e.Key != "b" || server.count(&server.releases) != 2 {
			t.Errorf("%+v, %d are given back", e, server.releases)
		}
		o.events = nil
		server.answer(answer{}, busyFor(time.Second), answer{})
		locks, err := l.AcquireAll(t.Context(), []string{"a", "b", "c"})
		if err != nil {
			t.Fatal(err)
		}
		o.wants(t, "busy wait acquired acquired acquired")
		if err := locks.Release(t.Context()); err != nil {
			t.Error(err)
		}
		o.wants(t, "busy wait acquired acquired acquired released released released")
		var keys []string
		for _, e := range o.events {
			if e.Call != o.events[0].Call {
				t.Errorf("%+v has another number", e)
			}
			keys = append(keys, e.Key)
		}
		slices.Sort(keys[5:])
		if want := []string{"b", "b", "a", "b", "c", "a", "b", "c"}; !slices.Equal(keys, want) {
			t.Errorf("told of %v, want %v", keys, want)
		}
	})
}

// Not parallel: it counts allocations.
func TestEventsAreNotMadeWithoutAnObserver(t *testing.T) {
	l := newFake(&fakeServer{})
	lock := l.newLock("k")
	err := l.fail("acquire", "k", ErrNotAcquired)
	ctx, o := t.Context(), new(options)
	n := testing.AllocsPerRun(1000, func() {
		c := l.observeCall(ctx, "k", o)
		c.busy("k", "other:1")
		c.failed(err)
		c.succeeded(lock)
		observed := lock.observed.Load()
		event := observed.now(EventReleased)
		observed.renewed(0, err)
		observed.lost(err, time.Hour)
		observed.released(ctx, event, err)
	})
	if n > 0 {
		t.Errorf("%v allocations, want none", n)
	}
}
