package pgxlock

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/migrations"
)

// These tests are about time, so they run in bubbles, where time is exact and
// costs nothing. A fakeServer takes the place of PostgreSQL, and its clock that
// of the system: it follows the bubble, and can be set ahead of it, which is
// what a program sees that slept or was frozen while its timers stood still.

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
	after time.Duration // how long the answer takes
	err   error
}

func busyFor(d time.Duration) answer {
	return answer{err: &busyError{holder: "other:1", remaining: d}}
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
	l.backend = server
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

func (s *fakeServer) options() options { return options{ttl: testTTL} }

func (s *fakeServer) try(ctx context.Context, keys []string, o options) []attempt {
	attempts := make([]attempt, len(keys))
	for i, key := range keys {
		attempts[i].lock, attempts[i].err = s.tryOne(ctx, key, o)
	}
	return attempts
}

func (s *fakeServer) tryOne(ctx context.Context, key string, o options) (*Lock, error) {
	sent := s.clock()
	s.mu.Lock()
	s.tries = append(s.tries, sent)
	var a answer
	if len(s.answers) > 0 {
		a, s.answers = s.answers[0], s.answers[1:]
	}
	token := int64(len(s.tries))
	s.mu.Unlock()
	if a.after > 0 && !clock.Sleep(ctx, a.after) {
		return nil, context.Cause(ctx)
	}
	if a.err != nil {
		return nil, a.err
	}
	lock := s.locker.newLock(key, "me:1", o.ttl, testMargin)
	if !lock.granted(token, sent, s.clock()) {
		return nil, errLateGrant
	}
	return lock, nil
}

func (s *fakeServer) takes(opt Option) bool        { return takenByLocks(opt) }
func (s *fakeServer) check(key string) error       { return lockkey.Check(key) }
func (s *fakeServer) name(key string) lockkey.Name { return lockkey.Name{Key: key} }

func (s *fakeServer) holders(context.Context, []string) ([]Holder, error) { return nil, nil }

func (s *fakeServer) discard(*Lock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.discards++
}

func (s *fakeServer) holdID(*Lock) string { return "" }

func (s *fakeServer) keep(*Lock) {}
func (s *fakeServer) drop(*Lock) {}

func (s *fakeServer) renew(_ context.Context, l *Lock) error {
	s.mu.Lock()
	s.renewals++
	s.mu.Unlock()
	return l.renewed(s.clock())
}

func (s *fakeServer) release(*Lock) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.releases++
	if len(s.asides) > 0 {
		s.asides[0]()
		s.asides = s.asides[1:]
	}
	return s.refusal
}

func (s *fakeServer) fence(context.Context, usertx.Tx, *Lock) error {
	return errors.New("a fence was sent to the server")
}

func (s *fakeServer) close(context.Context) error {
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
		if err := lock.renewed(sent); err != nil {
			t.Fatal(err)
		}
		if err := lock.renewed(sent - 10*time.Second); err != nil { // an earlier one is overtaken
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
		mustBe(t, "the late renewal", lock.renewed(sent), ErrLost)
		mustBe(t, "after it", lock.Err(), ErrLost)
		mustBe(t, "one more", lock.renewed(server.clock()), ErrLost)
		mustBe(t, "after that", lock.Err(), ErrLost)
	})
}

func TestALossIsForGood(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock := acquired(t, l, "k")
		mustBe(t, "what the server says", lock.lose(errTakenAway), ErrLost)
		for range 2 {
			mustBe(t, "Release", lock.Release(t.Context()), ErrLost)
			mustBe(t, "Err", lock.Err(), ErrLost)
			mustNotBe(t, "Err", lock.Err(), ErrReleased)
			mustBe(t, "Renew", lock.Renew(t.Context()), ErrLost)
		}
		if n := server.count(&server.discards); n != 1 {
			t.Errorf("its row, which may still stand there, was removed %d times", n)
		}
		if len(l.locks()) != 0 {
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
		lock.mu.Lock()
		left := len(lock.contexts)
		lock.mu.Unlock()
		if err := lock.Err(); err != nil || left != 0 {
			t.Errorf("the lock still has %d contexts that have ended: %v", left, err)
		}
	})
}

func TestAContextThatHoldsTheKeyIsNotLetToWaitForItself(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		lock := acquired(t, l, "k")
		work, cancel := lock.Context(t.Context())
		defer cancel()
		between, cancelBetween := context.WithTimeout(work, time.Hour)
		defer cancelBetween()
		inner := acquired(t, l, "inner")
		nested, cancelNested := inner.Context(between)
		defer cancelNested()
		for _, ctx := range []context.Context{work, between, nested} {
			_, err := l.Acquire(ctx, "k")
			mustBe(t, "Acquire", err, ErrDeadlock)
			_, err = l.TryAcquire(ctx, "k")
			mustBe(t, "TryAcquire", err, ErrDeadlock)
			ran, err := l.TryDo(ctx, "k", nothing)
			mustBe(t, "TryDo", err, ErrDeadlock)
			if ran {
				t.Error("TryDo ran")
			}
		}
		if n := len(server.tries); n != 2 {
			t.Errorf("%d tries were sent, want only those of the 2 locks", n)
		}
		if _, err := l.Acquire(nested, "another"); err != nil {
			t.Error(err)
		}
		if _, err := l.Acquire(t.Context(), "k"); err != nil {
			t.Errorf("a context that has nothing to do with the lock: %v", err)
		}
		other := &fakeServer{began: server.began}
		other.locker = newFake(other)
		if _, err := other.locker.Acquire(work, "k"); err != nil {
			t.Errorf("another Locker: %v", err)
		}
		// What has ended with the lock is no deadlock any more, but still an end.
		free, stop := context.WithCancel(context.WithoutCancel(nested))
		defer stop()
		_, err := l.Acquire(free, "k")
		mustBe(t, "values alone", err, ErrDeadlock)
		if err := lock.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Acquire(free, "k"); err != nil {
			t.Errorf("after the release: %v", err)
		}
		_, err = l.Acquire(work, "k")
		mustBe(t, "the released lock's context", err, context.Canceled, ErrReleased)
		mustNotBe(t, "the released lock's context", err, ErrDeadlock)
	})
}

func TestWaitingAsksAgainByBackoffButNoLaterThanTheHoldersLeaseLasts(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Minute), busyFor(time.Minute), busyFor(500*time.Millisecond), busyFor(0))
		var attempts []int
		backoff := l.backoff
		l.backoff = func(attempt int) time.Duration {
			attempts = append(attempts, attempt)
			return backoff(attempt)
		}
		acquired(t, l, "k")
		if want := []int{0, 1, 2, 3}; !slices.Equal(attempts, want) {
			t.Errorf("attempts %v, want %v", attempts, want)
		}
		if want := []time.Duration{0, time.Second, 3 * time.Second, 3500 * time.Millisecond, 7500 * time.Millisecond}; !slices.Equal(server.tries, want) {
			t.Errorf("tries at %v, want %v", server.tries, want)
		}
	})
}

func TestMaxWaitEndsWithNotAcquiredAndTheHolder(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Hour), busyFor(time.Hour), busyFor(time.Hour), never)
		began := time.Now()
		_, err := l.Acquire(t.Context(), "k", MaxWait(10*time.Second))
		mustBe(t, "Acquire", err, ErrNotAcquired)
		mustNotBe(t, "Acquire", err, context.DeadlineExceeded, context.Canceled, lockerr.ErrNoAnswer)
		if e, ok := errors.AsType[*Error](err); !ok || e.Holder != "other:1" || e.RetryAfter != time.Hour || e.Key != "k" {
			t.Errorf("%#v", err)
		}
		if d := time.Since(began); d != 10*time.Second {
			t.Errorf("it took %s", d)
		}
	})
}

func TestMaxWaitWithoutAnyAnswerIsNotBusy(t *testing.T) {
	t.Parallel()
	for _, wait := range []MaxWait{MaxWait(10 * time.Second), NoWait} {
		t.Run(wait.String(), func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
				server.answer(never, never)
				began := time.Now()
				_, err := l.Acquire(t.Context(), "k", wait)
				mustBe(t, "Acquire", err, lockerr.ErrNoAnswer, ErrUnavailable)
				mustNotBe(t, "Acquire", err, ErrNotAcquired)
				if d, want := time.Since(began), max(time.Duration(wait), min(dbconn.Timeout, 10*time.Second)); d != want {
					t.Errorf("it took %s, want %s", d, want)
				}
				ran, err := l.TryDo(t.Context(), "k", nothing, wait)
				if ran || err == nil {
					t.Errorf("TryDo: %t, %v: that is not to be skipped", ran, err)
				}
			})
		})
	}
}

func TestNoWaitAsksOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Minute), busyFor(time.Minute), busyFor(time.Minute))
		_, err := l.TryAcquire(t.Context(), "k")
		mustBe(t, "TryAcquire", err, ErrNotAcquired)
		_, err = l.Acquire(t.Context(), "k", MaxWait(-time.Second))
		mustBe(t, "Acquire", err, ErrNotAcquired)
		ran, err := l.TryDo(t.Context(), "k", nothing)
		if ran || err != nil {
			t.Errorf("TryDo: %t, %v", ran, err)
		}
		if len(server.tries) != 3 || server.tries[2] != 0 {
			t.Errorf("tries at %v, want 3 at once", server.tries)
		}
		_, err = l.TryAcquire(t.Context(), "k", MaxWait(time.Second))
		mustBe(t, "TryAcquire with MaxWait", err, errors.ErrUnsupported)
	})
}

func TestAWaitThatItsContextEndsIsBusyOnlyIfTheServerSaidSo(t *testing.T) {
	mine := errors.New("mine")
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Second, mine)
		defer cancel()
		server.answer(busyFor(time.Hour), busyFor(time.Hour), never)
		_, err := l.Acquire(ctx, "k")
		mustBe(t, "after busy", err, ErrNotAcquired, context.DeadlineExceeded, mine)

		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		server.answer(never)
		_, err = l.Acquire(ctx, "k")
		mustBe(t, "without an answer", err, context.DeadlineExceeded)
		mustNotBe(t, "without an answer", err, ErrNotAcquired)

		asked := len(server.tries)
		_, err = l.Acquire(ctx, "k")
		mustBe(t, "with a context that has ended", err, context.DeadlineExceeded)
		mustNotBe(t, "with a context that has ended", err, ErrNotAcquired)
		if len(server.tries) != asked {
			t.Error("a try was sent for a context that had ended")
		}

		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		server.answer(busyFor(time.Hour), busyFor(time.Hour), busyFor(time.Hour), busyFor(time.Hour), never)
		ran, err := l.TryDo(ctx, "k", nothing, MaxWait(time.Hour))
		mustBe(t, "TryDo, whose context ended: that is not to be skipped", err, context.DeadlineExceeded)
		if ran {
			t.Error("TryDo ran")
		}
	})
}

func TestAResourceErrorIsNeverReportedAsBusy(t *testing.T) {
	full := &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "53300"}
	restart := &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01"}
	forbidden := &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "42501"}
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		for _, first := range []error{full, restart, forbidden} {
			server.answer(answer{err: first})
			_, err := l.Acquire(t.Context(), "k", MaxWait(time.Minute))
			mustBe(t, "before any answer", err, first)
			mustNotBe(t, "before any answer", err, ErrNotAcquired)
		}
		server.answer(busyFor(time.Hour), answer{err: forbidden})
		_, err := l.Acquire(t.Context(), "k", MaxWait(time.Minute))
		mustBe(t, "after the server had said busy", err, forbidden)
		mustNotBe(t, "after the server had said busy", err, ErrNotAcquired)
		server.answer(busyFor(time.Hour), answer{err: restart}, answer{err: full}, answer{err: errors.New("connection refused")})
		acquired(t, l, "k") // what passes is waited out
	})
}

func TestWaitOutlastsGrantsThatAreLost(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		late := answer{after: believed}
		server.answer(late) // is asked for again at once, though the server has said nothing of anybody yet
		acquired(t, l, "k")
		server.answer(late, late)
		_, err := l.Acquire(t.Context(), "l")
		mustBe(t, "Acquire", err, errLateGrant, ErrUnavailable)
		server.answer(busyFor(time.Second), late, late, late, busyFor(time.Second), late)
		acquired(t, l, "m") // who was told that it is busy waits on
		if n := len(server.tries); n != 2+2+7 {
			t.Errorf("asked %d times", n)
		}
	})
}

func TestWaitThatIsTooShortKnowsWhatTheServerSaidToOthers(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(answer{after: time.Second, err: busyFor(time.Hour).err}, never, never)
		errs := make(chan error)
		go func() {
			_, err := l.Acquire(t.Context(), "k", MaxWait(10*time.Second))
			errs <- err
		}()
		synctest.Wait()
		_, err := l.Acquire(t.Context(), "k", MaxWait(2*time.Second)) // asks as well, for nobody has been answered yet
		mustBe(t, "Acquire", err, ErrNotAcquired)
		mustNotBe(t, "Acquire", err, ErrUnavailable)
		if e, ok := errors.AsType[*Error](err); !ok || e.Holder != "other:1" {
			t.Errorf("%v does not say who has the lock", err)
		}
		mustBe(t, "the other one", <-errs, ErrNotAcquired)
	})
}

// That the server refuses the user matters more than who has the lock.
func TestWaitThatIsTooShortDoesNotHideWhatTheServerSaid(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		acquired(t, l, "k")
		denied := &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "28P01"}
		for _, said := range []error{denied, ErrSchema} {
			l.backend = &refusingLate{server, said}
			_, err := l.Acquire(t.Context(), "k", MaxWait(1))
			mustBe(t, "Acquire", err, said)
			mustNotBe(t, "Acquire", err, ErrNotAcquired, ErrUnavailable)
		}
		l.backend = server
	})
}

// refusingLate is a backend whose answer comes when the wait is over.
type refusingLate struct {
	backend
	said error
}

func (b *refusingLate) try(context.Context, []string, options) []attempt {
	time.Sleep(time.Second)
	return []attempt{{err: b.said}}
}

func TestCloseEndsAWait(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
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
		_ = lost.lose(errTakenAway)
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

func TestAPanicAndGoexitInTheWorkRelease(t *testing.T) {
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

func TestTheWorksContextOutlivesTheWait(t *testing.T) {
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

// lateClock is the system's clock, set ahead by each statement that contains sql
// when its reply is there: as if we had been frozen in the meantime.
type lateClock struct {
	sql string
	by  time.Duration

	mu    sync.Mutex
	ahead time.Duration
	hits  int
}

func (c *lateClock) now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return clock.System() + c.ahead
}

func (c *lateClock) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if !strings.Contains(data.SQL, c.sql) {
		return ctx
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hits++
	c.ahead += c.by
	return ctx
}

func (c *lateClock) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestAGrantThatArrivesAfterItsDeadlineIsNotHandedOut(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	clock := &lateClock{sql: "pgxlock_acquire_batch", by: believed}
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = clock })
	l, err := newLease(pool, &LeaseConfig{TTL: testTTL}, clock.now)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := l.Acquire(t.Context(), "k")
	mustBe(t, "Acquire", err, errLateGrant)
	if lock != nil {
		t.Error("it was handed out")
	}
	if err := l.Close(t.Context()); err != nil || clock.hits == 0 {
		t.Errorf("%v, %d acquires seen", err, clock.hits)
	}
	// It is given back, not left for its TTL.
	var rows int
	if err := db.Pool.QueryRow(t.Context(), "select count(*) from distributed_locks").Scan(&rows); err != nil || rows != 0 {
		t.Errorf("%d leases are left: %v", rows, err)
	}
}
