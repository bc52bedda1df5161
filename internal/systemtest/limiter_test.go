package systemtest_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// What a limit allows is tested with limits so slow that the time which a test takes
// counts for nothing; where time has to pass, the buckets are told that it has.

// newLimiter returns a Limiter that is closed when the test is over.
func newLimiter(t *testing.T, db *pgtest.DB, limit ratelimit.Limit, burst int, owner ...string) *ratelimit.Limiter {
	t.Helper()
	l, err := ratelimit.New(db.Pool, limit, burst, &ratelimit.Config{Owner: strings.Join(owner, "")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return l
}

// later makes the buckets of a database as full as they will be after that time.
func later(t *testing.T, db *pgtest.DB, d time.Duration) {
	t.Helper()
	db.Exec(t, "update pgxlock_limits set tat = tat - $1", d.Nanoseconds())
}

// limits is a place where Limiters share their buckets.
type limits struct {
	new    func(limit ratelimit.Limit, burst int) *ratelimit.Limiter
	pass   func(d time.Duration)
	shared bool // those that new returns
}

// limiterTests are what every kind of Limiter must do.
var limiterTests = map[string]func(t *testing.T, in limits){
	"a limiter allows a burst and then its limit":          aLimiterAllowsABurstAndThenItsLimit,
	"many events are allowed together or not at all":       manyEventsAreAllowedTogetherOrNotAtAll,
	"a reservation tells when its events may happen":       aReservationTellsWhenItsEventsMayHappen,
	"a canceled reservation is given back":                 aCanceledReservationIsGivenBack,
	"a cancel gives nothing back from its time on":         aCancelGivesNothingBackFromItsTimeOn,
	"what is given back makes no room for more":            whatIsGivenBackMakesNoRoomForMore,
	"a wait that would take too long ends at once":         aWaitThatWouldTakeTooLongEndsAtOnce,
	"a wait that ends with its context gives back":         aWaitThatEndsWithItsContextGivesBack,
	"a wait ends when its event may happen and not before": aWaitEndsWhenItsEventMayHappenAndNotBefore,
	"a close ends waits and refuses calls":                 aCloseEndsWaitsAndRefusesCalls,
	"a wait that a close ends gives back":                  aWaitThatACloseEndsGivesBack,
	"what happens when it may is bounded by 100 years":     whatHappensWhenItMayIsBoundedBy100Years,
}

func TestLimitersDoWhatEveryKindDoes(t *testing.T) {
	t.Parallel()
	t.Run("server", func(t *testing.T) {
		t.Parallel()
		db := testkit.Migrated(t)
		for name, test := range limiterTests {
			t.Run(name, func(t *testing.T) {
				db.Exec(t, "truncate pgxlock_limits")
				test(t, limits{
					new:    func(limit ratelimit.Limit, burst int) *ratelimit.Limiter { return newLimiter(t, db, limit, burst) },
					pass:   func(d time.Duration) { later(t, db, d) },
					shared: true,
				})
			})
		}
	})
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		for name, test := range limiterTests {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					test(t, limits{
						new: func(limit ratelimit.Limit, burst int) *ratelimit.Limiter {
							l, err := ratelimit.NewMemory(limit, burst)
							if err != nil {
								t.Fatal(err)
							}
							return l
						},
						pass: time.Sleep,
					})
				})
			})
		}
	})
}

// allows checks what a Limiter allows, n events at a time.
func allows(t *testing.T, l *ratelimit.Limiter, key string, n int, want ...bool) {
	t.Helper()
	for i, want := range want {
		ok, err := l.AllowN(t.Context(), key, n)
		if ok != want || err != nil {
			t.Errorf("call %d for %d of %s: %t, %v", i+1, n, key, ok, err)
		}
	}
}

// reserves checks how late the next n events would be.
func reserves(t *testing.T, l *ratelimit.Limiter, key string, n int, want time.Duration) *ratelimit.Reservation {
	t.Helper()
	r, err := l.ReserveN(t.Context(), key, n)
	if err != nil {
		t.Fatal(err)
	}
	near(t, r.Delay(), want)
	return r
}

// near checks a time that has begun to pass. A test takes no longer than its patience, and what
// it must tell apart is hours.
func near(t *testing.T, got, want time.Duration) {
	t.Helper()
	if got > want || got < want-2*pgtest.Patience {
		t.Errorf("%s, want %s", got, want)
	}
}

// limited checks that an event was refused, and for how long.
func limited(t *testing.T, err error, after time.Duration) {
	t.Helper()
	e, ok := errors.AsType[*pgxlock.Error](err)
	if !ok || !errors.Is(err, ratelimit.ErrLimited) {
		t.Errorf("%v, want ErrLimited", err)
		return
	}
	near(t, e.RetryAfter, after)
}

var hourly = ratelimit.Every(time.Hour)

func aLimiterAllowsABurstAndThenItsLimit(t *testing.T, in limits) {
	l := in.new(hourly, 3)
	allows(t, l, "k", 1, true, true, true, false, false)
	allows(t, l, "other", 1, true, true, true, false) // keys have nothing to do with each other
	in.pass(time.Hour + time.Minute)
	allows(t, l, "k", 1, true, false)
	in.pass(100 * time.Hour)
	allows(t, l, "k", 1, true, true, true, false) // no more than a burst is saved up
}

func manyEventsAreAllowedTogetherOrNotAtAll(t *testing.T, in limits) {
	l := in.new(hourly, 5)
	allows(t, l, "k", 3, true, false)
	allows(t, l, "k", 2, true)
	allows(t, l, "k", 1, false)
	in.pass(4*time.Hour + time.Minute)
	allows(t, l, "k", 5, false)
	allows(t, l, "k", 4, true)
}

func aReservationTellsWhenItsEventsMayHappen(t *testing.T, in limits) {
	l := in.new(hourly, 2)
	reserves(t, l, "k", 2, 0)
	reserves(t, l, "k", 1, time.Hour)
	reserves(t, l, "k", 2, 3*time.Hour)
	_, err := l.Reserve(t.Context(), "k", pgxlock.MaxWait(3*time.Hour+30*time.Minute))
	limited(t, err, 4*time.Hour)
	_, err = l.Reserve(t.Context(), "k", pgxlock.NoWait)
	limited(t, err, 4*time.Hour)
	r, err := l.Reserve(t.Context(), "k", pgxlock.MaxWait(4*time.Hour+30*time.Minute)) // what was refused took nothing
	if err != nil {
		t.Fatal(err)
	}
	near(t, r.Delay(), 4*time.Hour)
	allows(t, l, "k", 1, false)
}

func aCanceledReservationIsGivenBack(t *testing.T, in limits) {
	l := in.new(hourly, 2)
	cancel := func(r *ratelimit.Reservation) {
		t.Helper()
		if err := r.Cancel(t.Context()); err != nil {
			t.Error(err)
		}
	}
	first := reserves(t, l, "k", 2, 0)
	cancel(reserves(t, l, "k", 2, 2*time.Hour))
	second := reserves(t, l, "k", 1, time.Hour)
	cancel(second)
	cancel(second) // once is enough
	second = reserves(t, l, "k", 1, time.Hour)
	third := reserves(t, l, "k", 2, 3*time.Hour)
	cancel(second) // the third keeps its place, so that nothing is left to give back
	reserves(t, l, "k", 1, 4*time.Hour)
	cancel(third) // nor here, though of its two one was given to nobody
	reserves(t, l, "k", 1, 5*time.Hour)
	in.pass(100 * time.Hour)
	cancel(first) // its bucket is full again
	allows(t, l, "k", 1, true, true, false)
}

// The events may have happened by then.
func aCancelGivesNothingBackFromItsTimeOn(t *testing.T, in limits) {
	l := in.new(hourly, 2)
	for range 2 {
		if err := reserves(t, l, "k", 1, 0).Cancel(t.Context()); err != nil {
			t.Error(err)
		}
	}
	allows(t, l, "k", 1, false)

	const events, interval = 10, 20 * time.Millisecond
	l = in.new(ratelimit.Every(interval), 1)
	began := time.Now()
	for range events {
		r, err := l.Reserve(t.Context(), "soon")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(r.Delay())
		if err := r.Cancel(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if passed := time.Since(began); passed < (events-1)*interval-time.Millisecond {
		t.Errorf("%d events within %s", events, passed)
	}
}

func TestReservationCancelGivesBackUntilItsTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for early, want := range map[time.Duration]time.Duration{time.Nanosecond: time.Nanosecond, 0: time.Hour, -time.Minute: 59 * time.Minute} {
			l, err := ratelimit.NewMemory(hourly, 1)
			if err != nil {
				t.Fatal(err)
			}
			allows(t, l, "k", 1, true)
			r := reserves(t, l, "k", 1, time.Hour)
			time.Sleep(time.Hour - early)
			if err := r.Cancel(t.Context()); err != nil {
				t.Error(err)
			}
			next, err := l.Reserve(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			if next.Delay() != want {
				t.Errorf("canceled %s before its time, the next event has to wait %s, want %s", early, next.Delay(), want)
			}
		}
	})
}

// What keeps its promised time may not meet more than the limit lets happen by then.
func whatIsGivenBackMakesNoRoomForMore(t *testing.T, in limits) {
	l := in.new(hourly, 5)
	cancel := func(reservations ...*ratelimit.Reservation) {
		t.Helper()
		for _, r := range reservations {
			if err := r.Cancel(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	// Two hours have given two for what then is given back.
	allows(t, l, "k", 5, true)
	first := reserves(t, l, "k", 3, 3*time.Hour)
	in.pass(2 * time.Hour)
	reserves(t, l, "k", 1, 2*time.Hour)
	cancel(first)
	reserves(t, l, "k", 1, 3*time.Hour)
	// Each of two could go alone, but not both: somebody is behind.
	allows(t, l, "other", 5, true)
	first, second := reserves(t, l, "other", 5, 5*time.Hour), reserves(t, l, "other", 5, 10*time.Hour)
	reserves(t, l, "other", 1, 11*time.Hour)
	cancel(second, first)
	reserves(t, l, "other", 5, 16*time.Hour)
	// The last one first, nothing is lost.
	allows(t, l, "third", 5, true)
	first, second, third := reserves(t, l, "third", 5, 5*time.Hour), reserves(t, l, "third", 2, 7*time.Hour), reserves(t, l, "third", 1, 8*time.Hour)
	cancel(third, second, first)
	reserves(t, l, "third", 1, time.Hour)
}

func aWaitThatWouldTakeTooLongEndsAtOnce(t *testing.T, in limits) {
	l := in.new(hourly, 1)
	if err := l.Wait(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour-time.Minute)
	defer cancel()
	limited(t, l.Wait(ctx, "k"), time.Hour)
	limited(t, l.Wait(t.Context(), "k", pgxlock.NoWait), time.Hour)
	limited(t, l.Wait(t.Context(), "k", pgxlock.MaxWait(time.Minute)), time.Hour)
	limited(t, l.Wait(ctx, "k", pgxlock.MaxWait(2*time.Hour)), time.Hour)
	in.pass(time.Hour)
	allows(t, l, "k", 1, true, false) // nothing was counted
}

func aWaitThatEndsWithItsContextGivesBack(t *testing.T, in limits) {
	l := in.new(hourly, 1)
	allows(t, l, "k", 1, true)
	why := errors.New("why")
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Wait(ctx, "k") }()
	taken(t, l, "k")
	cancel(why)
	err := <-ended
	limited(t, err, time.Hour)
	if !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
		t.Errorf("%v", err)
	}
	if err := l.Wait(ctx, "k"); !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrLimited) {
		t.Errorf("with a context that has ended: %v", err)
	}
	// What was given back was asked for before this.
	reserves(t, l, "k", 1, time.Hour)
}

// taken returns when somebody else has taken the next event, too.
func taken(t *testing.T, l *ratelimit.Limiter, key string) {
	t.Helper()
	pgtest.Until(t, "the wait is counted", func() bool {
		_, err := l.Reserve(t.Context(), key, pgxlock.NoWait)
		e, ok := errors.AsType[*pgxlock.Error](err)
		return ok && e.RetryAfter > time.Hour
	})
}

func aWaitEndsWhenItsEventMayHappenAndNotBefore(t *testing.T, in limits) {
	const interval = 20 * time.Millisecond
	l := in.new(ratelimit.Every(interval), 2)
	began := time.Now()
	for range 5 {
		if err := l.Wait(t.Context(), "k", pgxlock.MaxWait(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	if passed := time.Since(began); passed < 3*interval-time.Millisecond {
		t.Errorf("5 events within %s", passed)
	}
}

func TestWaitersAreAllowedInTheOrderInWhichTheyCame(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, err := ratelimit.NewMemory(hourly, 1)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		for i := range 5 {
			go func() {
				if err := l.Wait(t.Context(), "k"); err != nil || time.Since(began) != time.Duration(i)*time.Hour {
					t.Errorf("number %d after %s: %v", i, time.Since(began), err)
				}
			}()
			synctest.Wait()
		}
		time.Sleep(5 * time.Hour)
	})
}

func aCloseEndsWaitsAndRefusesCalls(t *testing.T, in limits) {
	l, other := in.new(hourly, 1), in.new(hourly, 1)
	allows(t, l, "k", 1, true)
	ended := make(chan error, 1)
	go func() { ended <- l.Wait(t.Context(), "k") }()
	taken(t, l, "k")
	r := reserves(t, l, "k", 1, 2*time.Hour)
	for range 2 {
		if err := l.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-ended; !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("the wait: %v", err)
	}
	_, err := l.Allow(t.Context(), "k")
	_, err2 := l.Reserve(t.Context(), "k")
	for _, err := range []error{err, err2, l.Wait(t.Context(), "k"), r.Cancel(t.Context())} {
		if !errors.Is(err, pgxlock.ErrClosed) || !strings.HasSuffix(err.Error(), `"k": closed`) { // there is no Locker
			t.Errorf("afterwards: %v", err)
		}
	}
	allows(t, other, "elsewhere", 1, true)
}

// When Close returns it has been given back.
func aWaitThatACloseEndsGivesBack(t *testing.T, in limits) {
	l, other := in.new(hourly, 1), in.new(hourly, 1)
	allows(t, l, "k", 1, true)
	ended := make(chan error, 1)
	go func() { ended <- l.Wait(t.Context(), "k") }()
	taken(t, l, "k")
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("the wait: %v", err)
	}
	if in.shared {
		reserves(t, other, "k", 1, time.Hour)
	}
}

func whatHappensWhenItMayIsBoundedBy100Years(t *testing.T, in limits) {
	const year = 360 * 24 * time.Hour
	l := in.new(ratelimit.Every(60*year), 1)
	reserves(t, l, "k", 1, 0)
	reserves(t, l, "k", 1, 60*year) // without a bound
	_, err := l.Reserve(t.Context(), "k")
	limited(t, err, 120*year)
	_, err = l.Reserve(t.Context(), "k", pgxlock.MaxWait(math.MaxInt64))
	limited(t, err, 120*year)
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(math.MaxInt64))
	defer cancel()
	limited(t, l.Wait(ctx, "k"), 120*year)
}

// Each call is judged by its own limit and burst.
func TestLimitersWithDifferentLimitsShareABucket(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	small, great := newLimiter(t, db, hourly, 2), newLimiter(t, db, hourly, 5)
	allows(t, small, "k", 1, true, true, false)
	allows(t, great, "k", 1, true, true, true, false) // what the other one took is taken
	allows(t, small, "k", 1, false)
	later(t, db, 4*time.Hour)
	allows(t, small, "k", 1, true, false)
}

func TestNonsenseIsRefusedByALimiter(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	tooMany := int64(math.MaxInt32) + 1 // less than 1 as an int of 32 bits
	for _, test := range []struct {
		limit ratelimit.Limit
		burst int
		says  string
	}{
		{0, 1, "more than 0"},
		{-1, 1, "more than 0"},
		{ratelimit.Limit(math.NaN()), 1, "more than 0"},
		{ratelimit.Limit(math.Inf(1)), 1, "use no Limiter"},
		{ratelimit.Every(0), 1, "use no Limiter"},
		{ratelimit.Every(-time.Second), 1, "use no Limiter"},
		{ratelimit.Limit(math.Inf(-1)), 1, "more than 0"},
		{1_000_001, 1, "at most 1000000"},
		{1, 0, "burst is 0"},
		{1, -1, "burst is -1"},
		{1, int(tooMany), "between 1 and"},
		{ratelimit.Every(24 * time.Hour), 36_001, "100 years"},
		{1e-300, 1, "100 years"},
	} {
		_, err := ratelimit.New(db.Pool, test.limit, test.burst, nil)
		_, err2 := ratelimit.NewMemory(test.limit, test.burst)
		for _, err := range []error{err, err2} {
			if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "new" || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, %d: %v", test.limit, test.burst, err)
			}
		}
	}
	for says, make := range map[string]func() (*ratelimit.Limiter, error){
		"pgxpool.New": func() (*ratelimit.Limiter, error) { return ratelimit.New(nil, 1, 1, nil) },
		"ratelimit.Config.Owner": func() (*ratelimit.Limiter, error) {
			return ratelimit.New(db.Pool, 1, 1, &ratelimit.Config{Owner: "*"})
		},
		"ratelimit.Config.Schema": func() (*ratelimit.Limiter, error) {
			return ratelimit.New(db.Pool, 1, 1, &ratelimit.Config{Schema: "a\x00"})
		},
	} {
		if _, err := make(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	allows(t, newLimiter(t, db, ratelimit.Every(24*time.Hour), 36_000), strings.Repeat("é", 255), 36_000, true, false)
	allows(t, newLimiter(t, db, 1_000_000, math.MaxInt32), strings.Repeat("è", 255), math.MaxInt32, true, false)

	l := newLimiter(t, db, 1, 2)
	for says, call := range map[string]func() error{
		"key is empty":   func() error { _, err := l.Allow(t.Context(), ""); return err },
		"256 characters": func() error { _, err := l.Reserve(t.Context(), strings.Repeat("k", 256)); return err },
		"valid UTF-8":    func() error { return l.Wait(t.Context(), "\xff") },
		"zero byte":      func() error { return l.Wait(t.Context(), "a\x00") },
		"n is 0":         func() error { _, err := l.AllowN(t.Context(), "k", 0); return err },
		"burst of 2":     func() error { return l.WaitN(t.Context(), "k", 3) },
		"n is -1":        func() error { _, err := l.ReserveN(t.Context(), "k", -1); return err },
	} {
		err := call()
		if _, ok := errors.AsType[*pgxlock.Error](err); !ok || !strings.Contains(err.Error(), says) || errors.Is(err, ratelimit.ErrLimited) {
			t.Errorf("%s: %v", says, err)
		}
	}
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_limits where limit_key = 'k'"); n != 0 {
		t.Error("nonsense was counted")
	}
}
