package pgxlock

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/hold"
)

// A bubble makes time exact and free. A fakeServer replaces PostgreSQL, and its clock the
// system's: it follows the bubble, and a test can set it ahead of the bubble, which is what
// a program sees that slept or was frozen while its timers stood still.

const (
	testTTL    = 30 * time.Second
	testMargin = 3 * time.Second
	believed   = testTTL - testMargin // from the request on
)

// fakeServer is a backend that answers as it is told.
type fakeServer struct {
	locker *Locker
	began  time.Time

	mu       sync.Mutex
	ahead    time.Duration // of the bubble's clock
	answers  []answer      // to the next tries; when used up, every try is granted
	tries    []time.Duration
	releases int
	discards int
	renewals int
	closed   bool
	refusal  error    // what release returns
	asides   []func() // called by the next releases
}

// answer is what a try gets: an error, or a grant.
type answer struct {
	after     time.Duration // how long the answer takes
	meanwhile func()        // nil: nothing else happens before the answer
	err       error
}

func busyFor(d time.Duration) answer {
	return answer{err: &hold.Busy{Holder: "other:1", Remaining: d}}
}

// never is a try to which no answer comes.
var never = answer{after: 1000 * time.Hour}

// inBubble runs test in a bubble with a Locker on a fakeServer.
func inBubble(t *testing.T, test func(t *testing.T, l *Locker, server *fakeServer)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := &fakeServer{began: time.Now()}
		server.locker = newFake(server)
		test(t, server.locker, server)
		_ = server.locker.Close(t.Context())
	})
}

// newFake makes a Locker on a fakeServer. It waits a second before its second
// try, two before the third, and so on.
func newFake(server *fakeServer) *Locker {
	l := newLocker(KindLease, server.clock, func(attempt int) time.Duration { return time.Duration(attempt+1) * time.Second },
		slog.New(slog.DiscardHandler))
	l.ttl = testTTL
	l.use(server)
	return l
}

func (s *fakeServer) clock() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.began) + s.ahead
}

// freeze lets time pass of which no timer of the program takes notice.
func (s *fakeServer) freeze(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ahead += d
}

func (s *fakeServer) answer(a ...answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers = append(s.answers, a...)
}

func (s *fakeServer) count(n *int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *n
}

func (s *fakeServer) Try(ctx context.Context, r hold.Request, attempts []hold.Attempt) {
	for i := range attempts {
		attempts[i].Err = s.tryOne(ctx, r, attempts[i].Hold)
	}
}

func (s *fakeServer) tryOne(ctx context.Context, r hold.Request, h *hold.Hold) error {
	sent := s.clock()
	s.mu.Lock()
	s.tries = append(s.tries, sent)
	var a answer
	if len(s.answers) > 0 {
		a, s.answers = s.answers[0], s.answers[1:]
	}
	token := int64(len(s.tries))
	s.mu.Unlock()
	if a.after > 0 {
		select {
		case <-time.After(a.after):
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.locker.host().Closing.Done():
			return ErrClosed
		}
	}
	if a.meanwhile != nil {
		a.meanwhile()
	}
	if a.err != nil {
		return a.err
	}
	h.Holder, h.TTL, h.Margin = "me:1", r.TTL, testMargin
	if !h.Granted(token, sent, s.clock()) {
		return hold.ErrLateGrant
	}
	return nil
}

func (s *fakeServer) Holders(context.Context, []string) ([]hold.Holder, error) { return nil, nil }

func (s *fakeServer) Discard(*hold.Hold) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.discards++
}

func (s *fakeServer) ID(*hold.Hold) string { return "" }

func (s *fakeServer) Keep(*hold.Hold) {}

func (s *fakeServer) Drop(*hold.Hold, bool) {}

func (s *fakeServer) Renew(_ context.Context, h *hold.Hold) error {
	s.mu.Lock()
	s.renewals++
	s.mu.Unlock()
	return h.Renewed(s.clock())
}

func (s *fakeServer) Change(_ context.Context, h *hold.Hold, ttl time.Duration, _ *string) error {
	return h.Changed(ttl, testMargin, s.clock())
}

func (s *fakeServer) Share(_, _ *hold.Hold) error { return errors.ErrUnsupported }

func (s *fakeServer) Release(*hold.Hold) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.releases++
	if len(s.asides) > 0 {
		s.asides[0]()
		s.asides = s.asides[1:]
	}
	return s.refusal
}

func (s *fakeServer) Fence(context.Context, hold.Tx, *hold.Hold) error {
	return errors.New("a fence was sent to the server")
}

func (s *fakeServer) Close(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

// acquired acquires, which must work.
func acquired(t *testing.T, l *Locker, key string) *Lock {
	t.Helper()
	lock, err := l.Acquire(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

func nothing(context.Context, *Lock) error { return nil }

func mustBe(t *testing.T, what string, err error, wants ...error) {
	t.Helper()
	for _, want := range wants {
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
}

func mustNotBe(t *testing.T, what string, err error, unwanted ...error) {
	t.Helper()
	for _, u := range unwanted {
		if errors.Is(err, u) {
			t.Errorf("%s: %v, which must not match %v", what, err, u)
		}
	}
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func TestCloseEndsAWait(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		began := time.Now()
		server.answer(busyFor(time.Hour), never) // one waits for its next try, one for an answer
		errs := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := l.Acquire(t.Context(), "k")
				errs <- err
			}()
			synctest.Wait()
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
		for range 2 {
			err := <-errs
			mustBe(t, "Acquire", err, ErrClosed)
			mustNotBe(t, "Acquire", err, ErrNotAcquired)
		}
		if d := time.Since(began); d != 0 {
			t.Errorf("Close ended them after %s", d)
		}
		for name, call := range map[string]func() error{
			"Acquire":    func() error { _, err := l.Acquire(t.Context(), "k"); return err },
			"TryAcquire": func() error { _, err := l.TryAcquire(t.Context(), "k"); return err },
			"Do":         func() error { return l.Do(t.Context(), "k", nothing) },
		} {
			mustBe(t, name+" after Close", call(), ErrClosed)
		}
		if !server.closed {
			t.Error("the backend was not closed")
		}
	})
}

func TestCloseEndsContextsAndReleasesWhatIsHeld(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock, lost := acquired(t, l, "k"), acquired(t, l, "lost")
		work, cancel := lock.Context(t.Context())
		defer cancel()
		_ = lost.hold.Lose(errors.New("taken over"))
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
		mustBe(t, "cause", context.Cause(work), ErrClosed)
		mustBe(t, "Err", lock.Err(), ErrClosed)
		mustBe(t, "Renew", lock.Renew(t.Context()), ErrClosed)
		if err := lock.Release(t.Context()); err != nil {
			t.Errorf("Release after Close: %v", err)
		}
		if n := server.count(&server.releases); n != 1 {
			t.Errorf("%d releases were sent, want that of the lock that was held", n)
		}
	})
}

func TestCloseWaitsForDoUntilItsContextEnds(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		loose := acquired(t, l, "loose")
		let := make(chan struct{})
		done := make(chan error, 1)
		var held *Lock
		go func() {
			done <- l.Do(t.Context(), "k", func(ctx context.Context, lock *Lock) error {
				held = lock
				<-ctx.Done()
				mustBe(t, "the work's cause", context.Cause(ctx), ErrClosed)
				late, cancel := lock.Context(t.Context())
				defer cancel()
				mustBe(t, "a context made after Close", context.Cause(late), ErrClosed)
				<-let
				return nil
			})
		}()
		synctest.Wait()
		why := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Second, why)
		defer cancel()
		mustBe(t, "Close", l.Close(ctx), why)
		mustBe(t, "a second Close", l.Close(t.Context()), why)
		if n := server.count(&server.releases); n != 1 || loose.Err() == nil {
			t.Errorf("%d releases, want 1: nobody may have the key of the Do, which goes on", n)
		}
		if err := held.Err(); err != nil {
			t.Errorf("the Do's lock is held until its deadline: %v", err)
		}
		close(let)
		if err := <-done; err != nil {
			t.Errorf("Do: %v", err)
		}
	})
}

func TestCloseRefusesAGrantThatArrivesAfterItHasBegun(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context, *Locker) error{
		"Acquire": func(ctx context.Context, l *Locker) error { _, err := l.Acquire(ctx, "k"); return err },
		"Do": func(ctx context.Context, l *Locker) error {
			return l.Do(ctx, "k", func(context.Context, *Lock) error { return errors.New("the work was begun") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
				closed := make(chan error, 1)
				server.answer(answer{meanwhile: func() {
					go func() { closed <- l.Close(t.Context()) }()
					<-l.calls.Closing().Done()
				}})
				mustBe(t, name, call(t.Context(), l), ErrClosed)
				if n := server.count(&server.releases); n != 1 || len(l.holds.Holds()) != 0 {
					t.Errorf("%d releases were sent, %d locks are held", n, len(l.holds.Holds()))
				}
				if err := <-closed; err != nil {
					t.Errorf("Close: %v", err)
				}
			})
		})
	}
}

func TestCloseReturnsWhenTheLastDoHas(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		go func() {
			_ = l.Do(t.Context(), "k", func(ctx context.Context, _ *Lock) error {
				<-ctx.Done()
				time.Sleep(time.Second)
				return nil
			})
		}()
		synctest.Wait()
		began := time.Now()
		if err := l.Close(t.Context()); err != nil || time.Since(began) != time.Second {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		if n := server.count(&server.releases); n != 1 {
			t.Errorf("%d releases, want 1", n)
		}
	})
}

func TestDoTellsItsOwnErrorsFromThoseOfTheWork(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		inner := &Error{Op: "acquire", Key: "inner", Err: ErrNotAcquired}
		fails := func(context.Context, *Lock) error { return inner }
		ran, err := l.TryDo(t.Context(), "k", fails)
		if !ran || !errors.Is(err, inner) {
			t.Errorf("the work ran and found another lock busy: %t, %v", ran, err)
		}
		server.answer(busyFor(time.Minute), busyFor(time.Minute))
		if ran, err = l.TryDo(t.Context(), "k", fails); ran || err != nil {
			t.Errorf("busy: %t, %v", ran, err)
		}
		mustBe(t, "Do", l.Do(t.Context(), "k", fails, NoWait), ErrNotAcquired)

		mine := errors.New("mine")
		for _, result := range []error{nil, mine} {
			err := l.Do(t.Context(), "k", func(ctx context.Context, _ *Lock) error {
				server.freeze(testTTL)
				return result
			})
			mustBe(t, "the lock was lost", err, ErrLost)
			if result != nil {
				mustBe(t, "the lock was lost", err, mine)
				if !strings.HasPrefix(err.Error(), "mine") {
					t.Errorf("the work's error does not come first: %v", err)
				}
			}
		}
		server.refusal = errors.New("no answer to the release")
		if err := l.Do(t.Context(), "k", nothing); err != nil {
			t.Errorf("the work was done under the lock: %v", err)
		}
	})
}

func TestPanicAndGoexitInTheWorkRelease(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		var work context.Context
		func() {
			defer func() {
				if r := recover(); r != "oops" {
					t.Errorf("recovered %v", r)
				}
			}()
			_ = l.Do(t.Context(), "k", func(ctx context.Context, _ *Lock) error {
				work = ctx
				panic("oops")
			})
		}()
		if server.count(&server.releases) != 1 || work.Err() == nil {
			t.Error("a panic left the lock or its context behind")
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = l.Do(t.Context(), "k", func(context.Context, *Lock) error {
				runtime.Goexit()
				return nil
			})
		}()
		<-ended
		if server.count(&server.releases) != 2 {
			t.Error("runtime.Goexit left the lock behind")
		}
		if err := l.Close(t.Context()); err != nil {
			t.Errorf("Close waits for a call that is over: %v", err)
		}
	})
}

func TestWorksContextOutlivesTheWait(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Minute))
		err := l.Do(t.Context(), "k", func(ctx context.Context, _ *Lock) error {
			time.Sleep(20 * time.Second)
			return ctx.Err()
		}, MaxWait(10*time.Second))
		if err != nil {
			t.Error(err)
		}
	})
}

// A Fence that is sent returns another error here.
func TestEachCallFromTheDeadlineOnReturnsTheLossAndSendsNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		for name, call := range map[string]func(*Lock, context.Context) error{
			"Err":     func(lock *Lock, _ context.Context) error { return lock.Err() },
			"context": func(_ *Lock, work context.Context) error { return errors.Join(work.Err(), context.Cause(work)) },
			"Renew":   func(lock *Lock, _ context.Context) error { return lock.Renew(context.Background()) },
			"Fence":   func(lock *Lock, _ context.Context) error { return lock.Fence(context.Background(), struct{ pgx.Tx }{}) },
			"Release": func(lock *Lock, _ context.Context) error { return lock.Release(context.Background()) },
			"Context": func(lock *Lock, _ context.Context) error {
				late, cancel := lock.Context(context.Background())
				defer cancel()
				<-late.Done()
				return context.Cause(late)
			},
		} {
			began := time.Now()
			lock := acquired(t, l, name)
			work, cancel := lock.Context(t.Context())
			defer cancel()
			if deadline, ok := lock.Deadline(); !ok || !deadline.Equal(began.Add(believed)) {
				t.Errorf("deadline %s after the request, want %s", deadline.Sub(began), believed)
			}
			server.freeze(believed)
			mustBe(t, name, call(lock, work), ErrLost)
			if !isClosed(lock.Lost()) {
				t.Errorf("%s: Lost is still open", name)
			}
			if renewals, releases := server.count(&server.renewals), server.count(&server.releases); renewals+releases != 0 {
				t.Errorf("%s: %d renewals and %d releases were sent for a lock known to be lost", name, renewals, releases)
			}
		}
	})
}

func TestContextOfALostLockHasTheCauseAndTheLocksKey(t *testing.T) {
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

func TestLossIsForGood(t *testing.T) {
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

func TestSecondReleaseReturnsWhatTheFirstReturned(t *testing.T) {
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
