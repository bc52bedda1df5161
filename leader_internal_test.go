package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
)

// runs is a runner whose exchanges reach the server.
type runs func(dbconn.Exchange) error

func (r runs) Do(fn dbconn.Exchange) error { return r(fn) }
func (r runs) Reached() bool               { return true }

// A fakeListener listens when the test says so.
type fakeListener struct{ listens atomic.Bool }

func (f *fakeListener) StartListener()  {}
func (f *fakeListener) Listening() bool { return f.listens.Load() }

// asksNobody gives a Locker in a bubble a table of requests whose statements run does, on that
// schema, "" for none.
func asksNobody(l *Locker, schema string, run func() error) *fakeListener {
	var listener fakeListener
	server := waitqueue.Server{Owner: "me", Place: &dbconn.Installation{Schema: schema}, Runner: runs(func(dbconn.Exchange) error { return run() })}
	l.leading.server, l.leading.listener = server, &listener
	return &listener
}

func TestLeadersLookForRequestsAndSeldomIfTheyAreToldOfThem(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, _ *fakeServer) {
		var looks atomic.Int64
		listener := asksNobody(l, "s", func() error { looks.Add(1); return nil })
		lock := l.newLock("k")
		inAnHour := func(what string, least, most int64) {
			t.Helper()
			looks.Store(0)
			time.Sleep(time.Hour)
			if n := looks.Load(); n < least || n > most {
				t.Errorf("%s: %d looks in an hour, want %d to %d", what, n, least, most)
			}
		}
		inAnHour("before it leads", 0, 0)
		for range 2 { // terms
			l.leading.begin(t.Context(), lock, func(error) {})
			inAnHour("nobody tells it", 3600*4/5, 3600*4/3)
			listener.listens.Store(true)
			inAnHour("it is told", 360*4/5, 360*4/3+1)
			listener.listens.Store(false)
			l.leading.end(lock)
			time.Sleep(2 * stepDownEvery)
			inAnHour("it does not lead any more", 0, 0)
		}
		l.leading.begin(t.Context(), lock, func(error) {})
		l.leading.stop()
		l.leading.begin(t.Context(), lock, func(error) {})
		l.leading.Look()
		inAnHour("it is stopped", 0, 0)
	})
}

func TestLeaderWithoutASchemaLooksForNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, _ *fakeServer) {
		asksNobody(l, "", func() error { t.Error("it looks"); return nil })
		l.leading.begin(t.Context(), l.newLock("k"), func(error) {})
		time.Sleep(time.Hour)
	})
}

// A check that has already read the table may not see a request that arrives during it.
func TestRequestDuringALookIsLookedForOnceMore(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, _ *fakeServer) {
		const never = time.Duration(1<<63 - 1)
		looks, goesOn := 0, make(chan error)
		asksNobody(l, "s", func() error { looks++; return <-goesOn })
		l.leading.begin(t.Context(), l.newLock("k"), func(error) {})
		want := func(what string, want int) {
			t.Helper()
			l.leading.timer.Reset(never) // no look but those that are asked for
			synctest.Wait()
			if looks != want {
				t.Errorf("%s: %d looks, want %d", what, looks, want)
			}
		}
		for range 3 {
			l.leading.Look()
			want("while the first goes on", 1)
		}
		goesOn <- nil
		want("when it is over", 2)
		goesOn <- nil
		want("when that is over as well", 2)

		// Where the server is away the next look will do.
		l.leading.Look()
		l.leading.Look()
		goesOn <- errors.New("away")
		want("when it has failed", 3)

		// Who stops waits for what is under way.
		l.leading.Look()
		stopped := false
		go func() { l.leading.stop(); stopped = true }()
		want("before the stop", 4)
		l.leading.Look()
		if stopped {
			t.Error("it does not wait")
		}
		goesOn <- nil
		want("after it", 4)
		if !stopped {
			t.Error("it waits on")
		}
	})
}

// The look now and then is put off, so that only the notification can tell.
func TestLeaderIsToldOfARequestByANotification(t *testing.T) {
	t.Parallel()
	db := migrated.New(t)
	locks, err := NewLeaseLocker(db.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = locks.Close(context.Background()) }()
	done := errors.New("done")
	terms := 0
	err = locks.Lead(t.Context(), "leader", func(ctx context.Context, _ *Lock) error {
		if terms++; terms == 2 {
			return done
		}
		for quiet := false; !quiet; time.Sleep(time.Millisecond) {
			listening := locks.queue.Listening()
			locks.leading.mu.Lock()
			quiet = listening && !locks.leading.looking && locks.leading.timer.Stop()
			locks.leading.mu.Unlock()
		}
		db.Exec(t, "select ask_to_step_down('leader', 'drained')")
		<-ctx.Done()
		return nil
	})
	if !errors.Is(err, done) {
		t.Error(err)
	}
	if n := len(locks.leading.terms); n != 0 {
		t.Errorf("%d terms are not over", n)
	}
}

// A look has asked for a term that ends meanwhile. The next one is of the same session, and
// the answer says what was asked of that.
func TestRequestReachesATermThatBeganDuringALook(t *testing.T) {
	t.Parallel()
	db := migrated.New(t)
	newAdvisory := func() *Locker {
		l, err := NewAdvisoryLocker(db.Pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close(context.Background()) })
		return l
	}
	locks, other := newAdvisory(), newAdvisory()
	var during atomic.Pointer[func()]
	run := locks.leading.server.Runner
	locks.leading.server.Runner = runs(func(fn dbconn.Exchange) error {
		if between := during.Swap(nil); between != nil {
			(*between)()
		}
		return run.Do(fn)
	})
	done := errors.New("done")
	lead := func(fn func(context.Context) error) <-chan error {
		ended := make(chan error, 1)
		go func() {
			ended <- locks.Lead(t.Context(), "leader", func(ctx context.Context, _ *Lock) error { return fn(ctx) })
		}()
		return ended
	}
	leads, resign := make(chan struct{}), make(chan struct{})
	first := lead(func(context.Context) error {
		leads <- struct{}{}
		<-resign
		return done
	})
	<-leads
	for quiet := false; !quiet; time.Sleep(time.Millisecond) {
		listening := locks.queue.Listening()
		locks.leading.mu.Lock()
		quiet = listening && !locks.leading.looking && locks.leading.timer.Stop()
		locks.leading.mu.Unlock()
	}
	var second <-chan error
	asked := make(chan error, 1)
	between := func() {
		close(resign)
		mustBe(t, "the first", <-first, done)
		began, terms := make(chan struct{}), 0
		second = lead(func(ctx context.Context) error {
			if terms++; terms == 2 {
				return done
			}
			close(began)
			<-ctx.Done()
			return nil
		})
		<-began
		asked <- other.AskToStepDown(t.Context(), "leader")
	}
	during.Store(&between)
	locks.leading.Look()
	mustBe(t, "AskToStepDown", <-asked, nil)
	mustBe(t, "the second", <-second, done)
}

// A Locker without the schema has no place in a queue, and one in memory needs none.
func TestFormerLeaderWithoutAQueueLetsOthersTryFirst(t *testing.T) {
	for what, test := range map[string]struct {
		queued      bool
		schema      string
		least, most time.Duration
	}{
		"in memory":       {},
		"without a queue": {true, "", clock.CheckInterval * 3 / 4, clock.CheckInterval * 5 / 4},
		"with a queue":    {true, "s", 0, 0},
	} {
		t.Run(what, func(t *testing.T) {
			inBubble(t, func(t *testing.T, l *Locker, _ *fakeServer) {
				if test.queued {
					asksNobody(l, test.schema, func() error { return nil })
				}
				done := errors.New("done")
				var ended, began time.Time
				err := l.Lead(t.Context(), "k", func(ctx context.Context, lock *Lock) error {
					if !ended.IsZero() {
						began = time.Now()
						return done
					}
					l.leading.terms[lock].stepDown(ErrStepDown)
					<-ctx.Done()
					ended = time.Now()
					return errors.New("which does not end Lead")
				})
				if aside := began.Sub(ended); !errors.Is(err, done) || aside < test.least || aside > test.most {
					t.Errorf("it stood aside for %s, want %s to %s; %v", aside, test.least, test.most, err)
				}
			})
		})
	}
}

// The fake server's Locker waits a second after the first failure, two after the second.
func TestCandidateAsksLessAndLessOftenWhileNoServerIsThere(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		away := answer{err: errors.New("away")}
		server.answer(away, away, away, answer{}, away, away, answer{})
		done := errors.New("done")
		terms := 0
		err := l.Lead(t.Context(), "k", func(ctx context.Context, _ *Lock) error {
			if terms++; terms == 2 {
				return done
			}
			<-ctx.Done() // nobody renews it
			mustBe(t, "the end of a term", context.Cause(ctx), ErrLost)
			return nil
		})
		const lost = 6*time.Second + believed
		want := []time.Duration{0, time.Second, 3 * time.Second, 6 * time.Second, lost, lost + time.Second, lost + 3*time.Second}
		if !errors.Is(err, done) || !slices.Equal(server.tries, want) {
			t.Errorf("it asked at %v, want %v; %v", server.tries, want, err)
		}

		// What does not pass ends it, and so does ctx between two campaigns.
		for _, end := range []error{ErrSchema, ErrDeadlock, ErrPooler} {
			server.answer(away, answer{err: end}, away)
			mustBe(t, "Lead", l.Lead(t.Context(), "k", nothing), end)
			server.answers = nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		server.tries, server.answers = nil, []answer{away, away, away, away}
		mustBe(t, "Lead until ctx ends", l.Lead(ctx, "k", nothing), context.DeadlineExceeded)
		if n := len(server.tries); n != 3 {
			t.Errorf("it asked %d times in 4 s, want 3", n)
		}
	})
}

// A watched is a server that tells who has the lock.
type watched struct {
	*fakeServer
	tells []any // holders, or an error
}

func (w *watched) Holders(context.Context, []string) ([]hold.Holder, error) {
	next := w.tells[0]
	if len(w.tells) > 1 {
		w.tells = w.tells[1:]
	}
	if err, ok := next.(error); ok {
		return nil, err
	}
	return next.([]hold.Holder), nil
}

func TestWatchTellsEachChangeAndEachFailureOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, l *Locker, server *fakeServer) {
		nobody, away := []hold.Holder(nil), errors.New("away")
		a, b := []hold.Holder{{ID: "a", Token: 1}}, []hold.Holder{{ID: "b", Token: 2}}
		renewed := []hold.Holder{{ID: "a", Token: 1, Expires: time.Unix(1, 0), Metadata: "more"}}
		l.backend = &watched{server, []any{nobody, nobody, away, away, nobody, a, renewed, away, a, b, ErrSchema, nobody}}
		began, asked := time.Now(), 11
		var got []string
		for holders, err := range l.Watch(t.Context(), "k") {
			switch {
			case err != nil:
				got = append(got, errors.Unwrap(err).Error())
			case len(holders) == 0:
				got = append(got, "nobody")
			default:
				got = append(got, holders[0].ID)
			}
		}
		want := []string{"nobody", "away", "nobody", "a", "away", "a", "b", ErrSchema.Error()}
		if !slices.Equal(got, want) {
			t.Errorf("it told %q, want %q", got, want)
		}
		if took := time.Since(began); took < time.Duration(asked-1)*clock.CheckInterval*3/4 || took > time.Duration(asked-1)*clock.CheckInterval*5/4 {
			t.Errorf("it asked %d times within %s", asked, took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		l.backend = &watched{server, []any{nobody}}
		told := 0
		for _, err := range l.Watch(ctx, "k") {
			mustBe(t, "Watch", err, nil)
			told++
		}
		if told != 1 {
			t.Errorf("nothing changed, and it told %d times", told)
		}
	})
}

func TestHoldIsAnotherOneByItsOwnerTokenModeOrSession(t *testing.T) {
	t.Parallel()
	one := Holder{Key: "k", Kind: KindAdvisory, Mode: Exclusive, ID: "a", Token: 1, PID: 7}
	renewed := one
	renewed.Expires, renewed.Metadata = time.Unix(1, 0), "more"
	if !sameHold(one, renewed) {
		t.Error("a renewal is no other hold")
	}
	for i, change := range []func(*Holder){
		func(h *Holder) { h.ID = "b" },
		func(h *Holder) { h.Token = 2 },
		func(h *Holder) { h.Mode = Shared },
		func(h *Holder) { h.PID = 8 },
	} {
		other := one
		change(&other)
		if sameHold(one, other) {
			t.Errorf("change %d is not seen: %s", i, fmt.Sprintf("%+v", other))
		}
	}
}

// The request is there for an hour: the next term of the session is not its.
func TestRequestEndsOneTerm(t *testing.T) {
	t.Parallel()
	db := migrated.New(t)
	for _, kind := range []Kind{KindAdvisory, KindLease} {
		locks, err := NewLeaseLocker(db.Pool, nil)
		if kind == KindAdvisory {
			locks, err = NewAdvisoryLocker(db.Pool, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = locks.Close(context.Background()) }()
		look := func() {
			locks.leading.Look()
			for looking := true; looking; time.Sleep(time.Millisecond) {
				locks.leading.mu.Lock()
				looking = locks.leading.looking
				locks.leading.mu.Unlock()
			}
		}
		done, terms := errors.New("done"), 0
		campaign, end := context.WithCancel(t.Context())
		defer end()
		err = locks.Lead(campaign, "leader", func(ctx context.Context, _ *Lock) error {
			if terms++; terms == 2 {
				look()
				if ctx.Err() != nil {
					t.Errorf("%s: %v", kind, context.Cause(ctx))
					end()
				}
				return done
			}
			mustBe(t, "AskToStepDown", locks.AskToStepDown(context.Background(), "leader"), nil)
			<-ctx.Done()
			look()
			return nil
		})
		if !errors.Is(err, done) {
			t.Error(err)
		}
		if locks.leading.mu.Lock(); kind == KindLease && len(locks.leading.followed) > 0 {
			t.Errorf("it remembers %d terms", len(locks.leading.followed))
		}
		locks.leading.mu.Unlock()
	}
}
