package pgxlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Waiting returns how many callers stand in line for the key.
func (l *Locker) Waiting(key string) int {
	l.lines.mu.Lock()
	defer l.lines.mu.Unlock()
	if line := l.lines.of[l.name(key)]; line != nil {
		return line.places.Len()
	}
	return 0
}

// Wanted reports whether the Locker knows that others wait for a lock that it has, where
// that is told to the holder.
func (l *Locker) Wanted(key string) bool {
	if l.kind != KindAdvisory {
		return true
	}
	attempts := []hold.Attempt{{Hold: &l.newLock(key).hold}} // normally refused, because the key is held
	l.backend.Try(context.Background(), hold.Request{}, attempts)
	if attempts[0].Err == nil {
		l.backend.Discard(attempts[0].Hold)
	}
	busy, ok := errors.AsType[*hold.Busy](attempts[0].Err)
	return ok && busy.Wanted
}

// Told reports whether those who wait here for a key have a ticket, and know of it.
func (l *Locker) Told(key string) bool {
	l.lines.mu.Lock()
	defer l.lines.mu.Unlock()
	line := l.lines.of[l.name(key)]
	return line != nil && line.ticket != nil && line.ticket.wokenInTurnLocked()
}

// ListenFor makes a Locker of advisory locks hear who wants the locks of a backend.
func (l *Locker) ListenFor(pid int32) { l.queue.listener.listenFor(pid) }

// inMemory runs test in a bubble with a Locker that has no server.
func inMemory(t *testing.T, test func(t *testing.T, l *Locker)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := NewMemoryLocker()
		test(t, l)
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if n := l.lines.count.Load(); n != 0 || len(l.lines.of) != 0 {
			t.Errorf("%d lines are left, %d are counted", len(l.lines.of), n)
		}
	})
}

// served collects in which order callers were granted a lock.
type served struct {
	mu    sync.Mutex
	order []int
	wg    sync.WaitGroup
}

// wait begins n waits for the key, one after the other, and gives each lock back.
func (s *served) wait(t *testing.T, l *Locker, key string, from, n int) {
	for i := from; i < from+n; i++ {
		s.wg.Go(func() {
			if err := l.Do(t.Context(), key, func(context.Context, *Lock) error {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.order = append(s.order, i)
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()
	}
}

func (s *served) mustBe(t *testing.T, want ...int) {
	t.Helper()
	s.wg.Wait()
	if !slices.Equal(s.order, want) {
		t.Errorf("served in the order %v, want %v", s.order, want)
	}
}

func TestWaitersAreServedInTheOrderInWhichTheyCame(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "k")
		var s served
		s.wait(t, l, "k", 0, 5)
		if n := l.Waiting("k"); n != 5 {
			t.Errorf("%d stand in line, want 5", n)
		}
		_ = lock.Release(t.Context())
		s.mustBe(t, 0, 1, 2, 3, 4)
	})
}

func TestLaterCallerQueuesBehindWaiters(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "k")
		var s served
		s.wait(t, l, "k", 0, 2)
		// The lock is free at once after Release, and the first in line was only told.
		_ = lock.Release(t.Context())
		last := acquired(t, l, "k")
		s.mustBe(t, 0, 1)
		_ = last.Release(t.Context())
	})
}

func TestATryDoesNotStandInLine(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "k")
		var s served
		s.wait(t, l, "k", 0, 1)
		if _, err := l.TryAcquire(t.Context(), "k"); !errors.Is(err, ErrNotAcquired) {
			t.Errorf("a try: %v", err)
		}
		if n := l.Waiting("k"); n != 1 {
			t.Errorf("%d stand in line, want 1", n)
		}
		_ = lock.Release(t.Context())
		s.mustBe(t, 0)
	})
}

func TestWaiterThatGivesUpDelaysNoOther(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "k")
		var gaveUp sync.WaitGroup
		leave := make([]context.CancelFunc, 4)
		var s served
		for i := range leave { // they stand at 0, 2, 4 and 6 of eight
			ctx, cancel := context.WithCancel(t.Context())
			leave[i] = cancel
			gaveUp.Go(func() {
				_, err := l.Acquire(ctx, "k")
				mustBe(t, "who gave up", err, ErrNotAcquired, context.Canceled)
				if e, ok := errors.AsType[*Error](err); !ok || e.Holder != lock.Holder() {
					t.Errorf("%v does not say who has the lock", err)
				}
			})
			synctest.Wait()
			s.wait(t, l, "k", i, 1)
		}
		for _, i := range []int{2, 0, 3, 1} {
			leave[i]()
		}
		gaveUp.Wait()
		_ = lock.Release(t.Context())
		s.mustBe(t, 0, 1, 2, 3)
	})
}

// The first waiter gives up just when the lock is released.
func TestAReleaseIsNotLostOnOneWhoGivesUp(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		for range 200 {
			lock := acquired(t, l, "k")
			ctx, cancel := context.WithCancel(t.Context())
			var both sync.WaitGroup
			both.Go(func() {
				if got, err := l.Acquire(ctx, "k"); err == nil {
					_ = got.Release(ctx)
				}
			})
			synctest.Wait()
			began := time.Now()
			both.Go(func() {
				got, err := l.Acquire(t.Context(), "k")
				if err != nil {
					t.Error(err)
					return
				}
				if d := time.Since(began); d > 0 {
					t.Errorf("it took %s to notice that the lock was free", d)
				}
				_ = got.Release(t.Context())
			})
			synctest.Wait()
			if rand.N(2) == 0 {
				go cancel()
				_ = lock.Release(t.Context())
			} else {
				go func() { _ = lock.Release(t.Context()) }()
				cancel()
			}
			both.Wait()
			cancel()
		}
	})
}

func TestWaiterThatLeavesWithASignalPassesItOn(t *testing.T) {
	t.Parallel()
	var ls lines
	name := lockkey.Name{Key: "k"}
	first, second := ls.join(name, &hold.Busy{}, nil, hold.Exclusive), ls.join(name, nil, nil, hold.Exclusive)
	ls.Freed(name)
	if len(first.turn) != 1 || len(second.turn) != 0 {
		t.Fatalf("%d signals for the first, %d for the second", len(first.turn), len(second.turn))
	}
	first.leave()
	if len(second.turn) != 1 {
		t.Error("the second one was not told")
	}
	second.leave()
	if ls.exists(name) {
		t.Error("the line is left")
	}
}

func TestALockIsHereFromItsGrantUntilItIsFreed(t *testing.T) {
	t.Parallel()
	var ls lines
	name := lockkey.Name{Key: "k"}
	first, second := ls.join(name, &hold.Busy{}, nil, hold.Exclusive), ls.join(name, nil, nil, hold.Exclusive)
	isHere := func() bool {
		_, here, _, _ := second.look()
		return here
	}
	first.granted(0, true)
	if !isHere() || len(second.turn) != 0 {
		t.Errorf("granted to the first: here %t, and %d signals for the second", isHere(), len(second.turn))
	}
	ls.Freed(name)
	if isHere() || len(second.turn) != 1 {
		t.Errorf("freed: here %t, and %d signals for the second", isHere(), len(second.turn))
	}
	second.granted(0, false)
}

func TestOnlyTheFirstInLineAsksTheServer(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		for range 4 {
			server.answer(busyFor(time.Hour))
		}
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if err := l.Do(t.Context(), "k", nothing); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		all.Wait()
		// At 0, 1, 3 and 6 s, and then each gets it.
		if n := len(server.tries); n != 4+50 {
			t.Errorf("asked %d times, want 4 refusals, and 50", n)
		}
	})
}

func TestWaiterThatHasNotTriedKnowsTheServersRefusal(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Hour), busyFor(time.Hour), busyFor(time.Hour))
		go func() { _, _ = l.Acquire(t.Context(), "k", MaxWait(3*time.Second)) }()
		synctest.Wait()
		_, err := l.Acquire(t.Context(), "k", MaxWait(2*time.Second))
		mustBe(t, "Acquire", err, ErrNotAcquired)
		if e, ok := errors.AsType[*Error](err); !ok || e.Holder != "other:1" {
			t.Errorf("%v does not say who has the lock", err)
		}
		synctest.Wait()
		time.Sleep(2 * time.Second)
	})
}

// The server is away when the first in line asks: it goes on asking, and the others
// go on waiting.
func TestAServerThatIsAwayForAWhileEndsNoWait(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Hour), answer{err: lockerr.ErrNoAnswer}, answer{err: lockerr.ErrNoAnswer})
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				if err := l.Do(t.Context(), "k", nothing); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		all.Wait()
		if n := len(server.tries); n != 6 {
			t.Errorf("asked %d times, want once busy, two refusals, and three", n)
		}
	})
}

func TestCloseEndsTheWaitOfAllInLine(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		acquired(t, l, "k")
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				_, err := l.Acquire(t.Context(), "k")
				mustBe(t, "Acquire", err, ErrClosed)
			})
		}
		synctest.Wait()
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
		all.Wait()
	})
}

// A waiter that is notified of what it releases must not come before it at the busy key.
func TestAcquireAllStandsInLineBeforeItGivesBackWhatIsBehind(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Hour), answer{})
		standing := -1
		server.asides = []func(){func() { standing = l.Waiting("a") }}
		locks, err := l.AcquireAll(t.Context(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		if standing != 1 {
			t.Errorf("%d stood in line for the busy key when the other one was given back, want 1", standing)
		}
		if err := locks.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

func TestAcquireAllStandsInTheLineThatItFinds(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "b")
		var s served
		s.wait(t, l, "b", 0, 1)
		_ = lock.Release(t.Context())
		locks, err := l.AcquireAll(t.Context(), []string{"a", "b", "c"})
		if err != nil {
			t.Fatal(err)
		}
		s.mustBe(t, 0)
		_ = locks.Release(t.Context())
	})
}
