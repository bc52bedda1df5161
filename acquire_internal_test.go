package pgxlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
	"github.com/pgxlock/pgxlock/migrations"
)

// A losingBackend loses what the next tries are granted, between the grant and the return of
// the call that asked for it.
type losingBackend struct {
	hold.Backend
	times atomic.Int32 // how many grants are lost
	lose  func(*hold.Hold)
}

func (b *losingBackend) Try(ctx context.Context, r hold.Request, attempts []hold.Attempt) {
	b.Backend.Try(ctx, r, attempts)
	for _, a := range attempts {
		if a.Err != nil || b.times.Add(-1) < 0 {
			continue
		}
		for b.lose(a.Hold); a.Hold.Err() == nil; { // the end of a session takes a moment to be heard of
			time.Sleep(time.Millisecond)
		}
	}
}

// migrated are databases with pgxlock in them.
var migrated = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Up(ctx, pool, nil) })

// losing returns Lockers of each kind on a database with the migrations, whose grants get lost:
// those of leases because the process does not run until their deadline, those of advisory
// locks because their session is ended.
func losing(t *testing.T) (pool *pgxpool.Pool, lockers map[string]func(t *testing.T) (*Locker, *losingBackend)) {
	t.Helper()
	db := migrated.New(t)
	advisory := func(cfg *AdvisoryConfig) func(t *testing.T) (*Locker, *losingBackend) {
		return func(t *testing.T) (*Locker, *losingBackend) {
			l, err := NewAdvisoryLocker(db.Pool, cfg)
			if err != nil {
				t.Fatal(err)
			}
			return lossy(t, l, func(h *hold.Hold) {
				pid := h.Holder[strings.LastIndex(h.Holder, ":")+1:]
				db.Exec(t, "select pg_terminate_backend($1::text::int)", pid)
			})
		}
	}
	lockers = map[string]func(t *testing.T) (*Locker, *losingBackend){
		"lease": func(t *testing.T) (*Locker, *losingBackend) {
			l, err := NewLeaseLocker(db.Pool, nil)
			if err != nil {
				t.Fatal(err)
			}
			return lossy(t, l, frozen(l))
		},
		"advisory": advisory(nil),
	}
	if !testing.Short() {
		lockers["advisory with tokens"] = advisory(&AdvisoryConfig{Tokens: true})
	}
	return db.Pool, lockers
}

// frozen returns what makes the Locker believe that it was frozen until its leases' deadlines.
func frozen(l *Locker) func(*hold.Hold) {
	var ahead atomic.Int64
	l.holds.Clock = func() time.Duration { return clock.System() + time.Duration(ahead.Load()) }
	return func(*hold.Hold) { ahead.Add(int64(time.Hour)) }
}

func lossy(t *testing.T, l *Locker, lose func(*hold.Hold)) (*Locker, *losingBackend) {
	b := &losingBackend{Backend: l.backend, lose: lose}
	l.backend = b
	t.Cleanup(func() {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l, b
}

func TestAcquireAsksAgainWhenItsGrantIsLostBeforeItReturns(t *testing.T) {
	t.Parallel()
	pool, kinds := losing(t)
	work := func(_ context.Context, lock *Lock) error { return lock.Err() }
	calls := map[string]func(*testing.T, *Locker, string) error{
		"Acquire": func(t *testing.T, l *Locker, key string) error {
			lock, err := l.Acquire(t.Context(), key)
			return errors.Join(err, released(t.Context(), lock))
		},
		"TryAcquire": func(t *testing.T, l *Locker, key string) error {
			lock, err := l.TryAcquire(t.Context(), key)
			return errors.Join(err, released(t.Context(), lock))
		},
		"Acquire, Shared": func(t *testing.T, l *Locker, key string) error {
			lock, err := l.Acquire(t.Context(), key, Shared)
			return errors.Join(err, released(t.Context(), lock))
		},
		"AcquireAll": func(t *testing.T, l *Locker, key string) error {
			locks, err := l.AcquireAll(t.Context(), []string{key, key + "2"})
			return errors.Join(err, locks.Release(t.Context()))
		},
		"AcquireAll, NoWait": func(t *testing.T, l *Locker, key string) error {
			locks, err := l.AcquireAll(t.Context(), []string{key, key + "2"}, NoWait)
			return errors.Join(err, locks.Release(t.Context()))
		},
		"Do": func(t *testing.T, l *Locker, key string) error { return l.Do(t.Context(), key, work) },
		"TryDo": func(t *testing.T, l *Locker, key string) error {
			ran, err := l.TryDo(t.Context(), key, work)
			if !ran {
				t.Error("TryDo did not run")
			}
			return err
		},
		"DoTx": func(t *testing.T, l *Locker, key string) error {
			err := l.DoTx(t.Context(), pool, key, func(context.Context, pgx.Tx, *Lock) error { return nil })
			if errors.Is(err, errors.ErrUnsupported) { // without tokens there is nothing to fence
				return nil
			}
			return err
		},
		"Lead": func(t *testing.T, l *Locker, key string) error { return l.Lead(t.Context(), key, work) },
		"a permit": func(t *testing.T, l *Locker, key string) error {
			s, err := l.Semaphore(2)
			if err != nil {
				return nil // there are none of this kind
			}
			lock, err := s.TryAcquire(t.Context(), key)
			return errors.Join(err, released(t.Context(), lock))
		},
	}
	for kind, newLosing := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			l, b := newLosing(t)
			for name, call := range calls {
				t.Run(name, func(t *testing.T) {
					b.times.Store(1)
					if err := call(t, l, kind+" "+name); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

// released releases a lock, which must be held until then; there may be none.
func released(ctx context.Context, lock *Lock) error {
	if lock == nil {
		return nil
	}
	return errors.Join(lock.Err(), lock.Release(ctx))
}

func TestAcquireEndsAsUnavailableWhenItsGrantsAreLostAgainAndAgain(t *testing.T) {
	t.Parallel()
	_, kinds := losing(t)
	for kind, newLosing := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			l, b := newLosing(t)
			for name, call := range map[string]func(string) error{
				"Acquire":    func(key string) error { _, err := l.Acquire(t.Context(), key); return err },
				"TryAcquire": func(key string) error { _, err := l.TryAcquire(t.Context(), key); return err },
				"AcquireAll": func(key string) error { _, err := l.AcquireAll(t.Context(), []string{key, key + "2"}); return err },
				"AcquireAll, NoWait": func(key string) error {
					_, err := l.AcquireAll(t.Context(), []string{key, key + "2"}, NoWait)
					return err
				},
				"TryDo": func(key string) error {
					ran, err := l.TryDo(t.Context(), key, func(context.Context, *Lock) error { return nil })
					if ran {
						t.Error("TryDo ran")
					}
					return err
				},
			} {
				key := kind + " " + name
				b.times.Store(1000)
				err := call(key)
				b.times.Store(0)
				mustBe(t, name, err, ErrUnavailable)
				mustNotBe(t, name, err, ErrLost, ErrNotAcquired)
				if pgErr, ok := errors.AsType[*pgconn.PgError](err); strings.HasPrefix(kind, "advisory") && (!ok || pgErr.Code != "57P01") {
					t.Errorf("%s: %v does not wrap what ended the session", name, err)
				}
				lock, err := l.TryAcquire(t.Context(), key) // nothing of it is in the way
				if err := errors.Join(err, released(t.Context(), lock)); err != nil {
					t.Errorf("after %s: %v", name, err)
				}
			}
		})
	}
}

func TestContextThatHoldsTheKeyIsNotLetToWaitForItself(t *testing.T) {
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
		backoff := func(attempt int) time.Duration {
			attempts = append(attempts, attempt)
			return l.backoff(attempt)
		}
		l.queue = waitqueue.New(waitqueue.Config{Closing: l.calls.Closing(), Holds: &l.holds, Backoff: backoff, Log: l.log})
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
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		const wait = MaxWait(10 * time.Second)
		server.answer(never, never)
		began := time.Now()
		_, err := l.Acquire(t.Context(), "k", wait)
		mustBe(t, "Acquire", err, lockerr.ErrNoAnswer, ErrUnavailable)
		mustNotBe(t, "Acquire", err, ErrNotAcquired)
		if d := time.Since(began); d != time.Duration(wait) {
			t.Errorf("it took %s, want %s", d, time.Duration(wait))
		}
		ran, err := l.TryDo(t.Context(), "k", nothing, wait)
		if ran || err == nil {
			t.Errorf("TryDo: %t, %v: that is not to be skipped", ran, err)
		}
	})
}

func TestTryWithoutAWaitAsksOnce(t *testing.T) {
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
	})
}

func TestTryAcquireWithMaxWaitWaits(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answer(busyFor(time.Minute))
		if _, err := l.TryAcquire(t.Context(), "k", MaxWait(time.Hour)); err != nil {
			t.Error(err)
		}
	})
}

func TestWaitThatItsContextEndsIsBusyOnlyIfTheServerSaidSo(t *testing.T) {
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

func TestResourceErrorIsNeverReportedAsBusy(t *testing.T) {
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
		mustBe(t, "Acquire", err, hold.ErrLateGrant, ErrUnavailable)
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

func TestGrantThatArrivesAfterItsDeadlineIsNotHandedOut(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	clock := &lateClock{sql: "pgxlock_acquire_one", by: believed}
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = clock })
	l, err := newLease(pool, &LeaseConfig{TTL: testTTL}, clock.now)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := l.Acquire(t.Context(), "k")
	mustBe(t, "Acquire", err, hold.ErrLateGrant)
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

// AcquireAll waits for b so long that a, which nobody renews here, is lost.
func TestAcquireAllStartsOverWhenItLosesWhatItHolds(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answers = []answer{{}}
		for range 7 { // 1 + 2 + ... + 7 s: past the local deadline of a
			server.answers = append(server.answers, busyFor(time.Hour))
		}
		locks, err := l.AcquireAll(t.Context(), []string{"b", "a"})
		if err != nil {
			t.Fatal(err)
		}
		if len(locks) != 2 || locks[0].Key() != "a" || locks[1].Key() != "b" {
			t.Fatalf("%d locks", len(locks))
		}
		for _, lock := range locks {
			if err := lock.Err(); err != nil {
				t.Errorf("%s: %v", lock.Key(), err)
			}
			if until, _ := lock.Deadline(); time.Until(until) < testTTL/2 {
				t.Errorf("%s is believed for %s only", lock.Key(), time.Until(until))
			}
		}
		if n := len(server.tries); n != 2+6+2 {
			t.Errorf("asked %d times, want a and b, 6 times b, and both again", n)
		}
	})
}

// What was granted before the wait is short of its deadline when the wait ends.
func TestAcquireAllRenewsWhatItHeldForLong(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		server.answers = []answer{{}}
		for range 6 { // 21 s
			server.answers = append(server.answers, busyFor(time.Hour))
		}
		locks, err := l.AcquireAll(t.Context(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		if until, _ := locks[0].Deadline(); time.Until(until) < testTTL/2 {
			t.Errorf("believed for %s only", time.Until(until))
		}
		if server.renewals != 1 {
			t.Errorf("%d renewals, want one", server.renewals)
		}
	})
}

// slowRelease is a fakeServer whose first grant is lost before the call can return it, and
// that answers releases after an hour.
type slowRelease struct {
	*fakeServer
	lose sync.Once
}

func (s *slowRelease) Try(ctx context.Context, r hold.Request, attempts []hold.Attempt) {
	s.fakeServer.Try(ctx, r, attempts)
	s.lose.Do(func() { s.freeze(testTTL) })
}

func (s *slowRelease) Release(h *hold.Hold) error {
	time.Sleep(time.Hour)
	return s.fakeServer.Release(h)
}

// slowRenewal is a fakeServer that answers renewals after an hour.
type slowRenewal struct{ *fakeServer }

func (s slowRenewal) Renew(ctx context.Context, h *hold.Hold) error {
	if !clock.Sleep(ctx, time.Hour) {
		return lockerr.ContextError(ctx)
	}
	return s.fakeServer.Renew(ctx, h)
}

// wantEndsWithClose closes the Locker after d of the call, which then has to end at once.
func wantEndsWithClose(t *testing.T, l *Locker, d time.Duration, call func() error) {
	t.Helper()
	began := time.Now()
	go func() {
		time.Sleep(d)
		_ = l.Close(context.Background())
	}()
	mustBe(t, "the call", call(), ErrClosed)
	if took := time.Since(began); took != d {
		t.Errorf("the call took %s, and Close was called after %s", took, d)
	}
}

func TestCloseEndsTheReleaseOfAGrantThatWasLost(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		l.use(&slowRelease{fakeServer: server})
		server.answer(answer{}, busyFor(time.Hour))
		wantEndsWithClose(t, l, 2*time.Second, func() error {
			_, err := l.Acquire(t.Context(), "k")
			return err
		})
	})
}

func TestTryDoesNotWaitLongForTheReleaseOfAGrantThatWasLost(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		l.use(&slowRelease{fakeServer: server})
		began := time.Now()
		if _, err := l.TryAcquire(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		if d, most := time.Since(began), dbconn.Timeout; d > most {
			t.Errorf("it took %s, want %s at most", d, most)
		}
	})
}

func TestCloseEndsTheRenewalsOfAcquireAll(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		l.use(slowRenewal{server})
		server.answers = []answer{{}}
		for range 6 { // 21 s
			server.answers = append(server.answers, busyFor(time.Hour))
		}
		wantEndsWithClose(t, l, 22*time.Second, func() error {
			_, err := l.AcquireAll(t.Context(), []string{"a", "b"})
			return err
		})
	})
}

func TestWaitSeesByTheClockThatTheLockOfItsContextIsLost(t *testing.T) {
	for name, opts := range map[string][]AcquireOption{"unbounded": nil, "MaxWait": {MaxWait(time.Hour)}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
				ctx, cancel := acquired(t, l, "held").Context(t.Context())
				defer cancel()
				call := l.newAcquisition(ctx)
				if err := l.collect(&call.options, opts); err != nil {
					t.Fatal(err)
				}
				call.begin("k")
				defer call.End()
				server.freeze(testTTL)
				mustBe(t, "the wait", call.Ended(), ErrLost)
			})
		})
	}
}

func TestDefaultBackoffGoesFromTenMillisecondsToHalfASecond(t *testing.T) {
	t.Parallel()
	backoff, _ := orDefaults(nil, nil)
	for attempt, most := range map[int]time.Duration{0: 10 * time.Millisecond, 1: 20 * time.Millisecond, 6: 500 * time.Millisecond, 1000: 500 * time.Millisecond} {
		if d := backoff(attempt); d < most/2 || d > most {
			t.Errorf("attempt %d: %s, want %s to %s", attempt, d, most/2, most)
		}
	}
}

// refusingLate is a backend whose answer comes when the wait is over.
type refusingLate struct {
	hold.Backend
	said error
}

func (b *refusingLate) Try(_ context.Context, _ hold.Request, attempts []hold.Attempt) {
	time.Sleep(time.Second)
	attempts[0].Err = b.said
}

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
		if !l.queue.Idle() {
			t.Error("a local queue is left")
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
		if !l.queue.Waiting(l.name("k")) {
			t.Error("nobody queues")
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

func TestTryDoesNotStandInLine(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "k")
		var s served
		s.wait(t, l, "k", 0, 1)
		if _, err := l.TryAcquire(t.Context(), "k"); !errors.Is(err, ErrNotAcquired) {
			t.Errorf("a try: %v", err)
		}
		_ = lock.Release(t.Context())
		s.mustBe(t, 0)
	})
}

func TestWaiterThatGivesUpDelaysNoOther(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "k")
		var endError sync.WaitGroup
		leave := make([]context.CancelFunc, 4)
		var s served
		for i := range leave { // they stand at 0, 2, 4 and 6 of eight
			ctx, cancel := context.WithCancel(t.Context())
			leave[i] = cancel
			endError.Go(func() {
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
		endError.Wait()
		_ = lock.Release(t.Context())
		s.mustBe(t, 0, 1, 2, 3)
	})
}

// The first waiter gives up just when the lock is released.
func TestReleaseIsNotLostOnOneWhoGivesUp(t *testing.T) {
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
func TestServerThatIsAwayForAWhileEndsNoWait(t *testing.T) {
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
		standing := false
		server.asides = []func(){func() { standing = l.queue.Waiting(l.name("a")) }}
		locks, err := l.AcquireAll(t.Context(), []string{"a", "b"})
		if err != nil {
			t.Fatal(err)
		}
		if !standing {
			t.Error("it did not queue for the busy key before it released the other one")
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

// Observe may take long: a lock that the call does not get must not be held meanwhile.
func TestAcquireAllThatDoesNotWaitReleasesWhatIsBehindBeforeItIsObserved(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		lock := acquired(t, l, "a")
		observed := false
		l.observe = func(ctx context.Context, e Event) {
			holders, err := l.backend.Holders(ctx, []string{"b"})
			if observed = true; len(holders) > 0 || err != nil {
				t.Errorf("%s: b is held by %v, %v", e.Op, holders, err)
			}
		}
		if _, err := l.AcquireAll(t.Context(), []string{"a", "b"}, NoWait); !errors.Is(err, ErrNotAcquired) {
			t.Errorf("AcquireAll: %v", err)
		}
		if l.observe = nil; !observed {
			t.Error("it was not observed")
		}
		_ = lock.Release(t.Context())
	})
}

func TestAcquireAllOfNoKeysReturnsNilLocks(t *testing.T) {
	inMemory(t, func(t *testing.T, l *Locker) {
		if locks, err := l.AcquireAll(t.Context(), nil); locks != nil || err != nil {
			t.Errorf("%#v, %v", locks, err)
		}
	})
}

// A contextThatAsks is one whose Err does something, like that of a lock, which may find that
// the lock is lost.
type contextThatAsks struct {
	context.Context
	ask func()
}

func (c contextThatAsks) Err() error {
	c.ask()
	return c.Context.Err()
}

func TestMemoryLockerAsksContextsWithoutItsMutex(t *testing.T) {
	t.Parallel()
	l := NewMemoryLocker()
	ctx := contextThatAsks{t.Context(), func() {
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			_, _ = l.Holders(context.Background(), "k")
		}()
		select {
		case <-asked:
		case <-time.After(pgtest.Patience):
			t.Error("Err of the caller's context waits for the Locker that called it")
		}
	}}
	for _, opt := range []AcquireOption{NoWait, MaxWait(time.Minute)} {
		lock, err := l.Acquire(ctx, "k", opt)
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := l.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestMemoryOfACallIsUsedAgainOnlyIfNothingElseMayReferToIt(t *testing.T) {
	for name, c := range map[string]struct {
		answers []answer
		opts    []AcquireOption
		want    bool
	}{
		"granted at once":              {nil, nil, true},
		"without a wait":               {nil, []AcquireOption{NoWait}, true},
		"with a context of its own":    {nil, []AcquireOption{MaxWait(time.Minute)}, false},
		"after a wait in a queue":      {[]answer{busyFor(time.Second)}, nil, false},
		"after a grant that came late": {[]answer{{after: believed}}, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
				server.answer(c.answers...)
				call := l.newAcquisition(t.Context())
				if err := l.collect(&call.options, c.opts); err != nil {
					t.Fatal(err)
				}
				call.begin("k")
				defer call.end()
				if _, err := call.one("k", false); err != nil {
					t.Fatal(err)
				}
				if got := call.unshared(); got != c.want {
					t.Errorf("%t, want %t", got, c.want)
				}
			})
		})
	}
}
