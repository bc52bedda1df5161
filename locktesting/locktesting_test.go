package locktesting_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/locktest"
	"github.com/pgxlock/pgxlock/locktesting"
)

func TestLockerDoesWhatEveryKindDoes(t *testing.T) {
	t.Parallel()
	locktest.Run(t, func(t *testing.T) *pgxlock.Locker {
		ledger := &locktest.Ledger{}
		t.Cleanup(func() { ledger.Check(t) })
		locks, _ := locktesting.New(t, &pgxlock.LeaseConfig{Observe: ledger.Observe})
		return locks
	})
}

func acquire(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) *pgxlock.Lock {
	t.Helper()
	lock, err := locks.Acquire(t.Context(), key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

func is(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// took returns how long a call takes.
func took(call func()) time.Duration {
	began := time.Now()
	call()
	return time.Since(began)
}

// events keeps what Observe receives of one key.
type events struct {
	mu  sync.Mutex
	all []pgxlock.Event
}

func (e *events) observe(_ context.Context, event pgxlock.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, event)
}

// words returns each event as its Op and its Result.
func (e *events) words() (words []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, event := range e.all {
		words = append(words, string(event.Op)+" "+event.Result())
	}
	return words
}

func TestLoseEndsTheLockAsALeaseEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		why    error
		result string
	}{
		"taken away": {nil, "lost lost"},
		"evicted":    {fmt.Errorf("%w by an operator", pgxlock.ErrEvicted), "lost evicted"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var seen events
				locks, control := locktesting.New(t, &pgxlock.LeaseConfig{Observe: seen.observe})
				lock := acquire(t, locks, "k")
				ctx, cancel := lock.Context(t.Context())
				defer cancel()
				lost := lock.Lost()
				control.Lose("k", test.why)
				for what, err := range map[string]error{
					"Err": lock.Err(), "the cause": context.Cause(ctx), "Renew": lock.Renew(t.Context()),
					"Fence": lock.Fence(t.Context(), struct{ pgx.Tx }{}), "Release": lock.Release(t.Context()),
				} {
					is(t, what, err, pgxlock.ErrLost)
					is(t, what, err, cmp.Or(test.why, pgxlock.ErrLost))
					if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Key != "k" || e.Kind != pgxlock.KindMemory {
						t.Errorf("%s: %#v", what, err)
					}
				}
				is(t, "the context", ctx.Err(), context.Canceled)
				select {
				case <-lost:
				default:
					t.Error("Lost is open")
				}
				synctest.Wait() // until Observe has received the loss
				if next := acquire(t, locks, "k", pgxlock.NoWait); next.Token() <= lock.Token() {
					t.Errorf("token %d after %d", next.Token(), lock.Token())
				}
				if want := []string{"wait ok", "acquired ok", test.result, "wait ok", "acquired ok"}; !slices.Equal(seen.words(), want) {
					t.Errorf("%q, want %q", seen.words(), want)
				}
			})
		})
	}
}

func TestLoseWorksWithoutABubble(t *testing.T) {
	t.Parallel()
	locks, control := locktesting.New(t, nil)
	began, ended := make(chan struct{}), make(chan error)
	go func() {
		ended <- locks.Do(t.Context(), "k", func(ctx context.Context, _ *pgxlock.Lock) error {
			close(began)
			<-ctx.Done()
			return nil
		})
	}()
	<-began
	control.Lose("k", nil)
	is(t, "Do", <-ended, pgxlock.ErrLost)
}

func TestLoseEndsAllThatShareTheKey(t *testing.T) {
	t.Parallel()
	locks, control := locktesting.New(t, nil)
	readers := []*pgxlock.Lock{acquire(t, locks, "k", pgxlock.Shared), acquire(t, locks, "k", pgxlock.Shared)}
	other := acquire(t, locks, "else")
	control.Lose("k", nil)
	for _, reader := range readers {
		is(t, "a reader", reader.Err(), pgxlock.ErrLost)
	}
	is(t, "another key", other.Err(), nil)
	acquire(t, locks, "k", pgxlock.NoWait)
}

func TestLoseOfAPermitFreesIt(t *testing.T) {
	t.Parallel()
	locks, control := locktesting.New(t, nil)
	jobs, err := locks.Semaphore(1)
	if err != nil {
		t.Fatal(err)
	}
	permit, err := jobs.Acquire(t.Context(), "jobs")
	if err != nil {
		t.Fatal(err)
	}
	control.Lose("jobs#1", nil)
	is(t, "the permit", permit.Err(), pgxlock.ErrLost)
	release := control.Hold("jobs#1")
	_, err = jobs.TryAcquire(t.Context(), "jobs")
	is(t, "a permit that another process has", err, pgxlock.ErrNotAcquired)
	release()
	if _, err := jobs.TryAcquire(t.Context(), "jobs"); err != nil {
		t.Error(err)
	}
}

// queue makes callers wait for a key, in order, and returns where each says that it has the key,
// which it then releases.
func queue(t *testing.T, locks *pgxlock.Locker, key string, callers int) <-chan int {
	order := make(chan int, callers)
	for i := range callers {
		go func() {
			if err := locks.Do(t.Context(), key, func(context.Context, *pgxlock.Lock) error { order <- i; return nil }); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
	}
	return order
}

func TestWaitersGoOnInOrderWhenTheKeyIsFree(t *testing.T) {
	t.Parallel()
	for name, busy := range map[string]func(*testing.T, *pgxlock.Locker, *locktesting.Control) (free func()){
		"another process releases": func(_ *testing.T, _ *pgxlock.Locker, control *locktesting.Control) func() { return control.Hold("k#7") },
		"the lock is lost": func(t *testing.T, locks *pgxlock.Locker, control *locktesting.Control) func() {
			acquire(t, locks, "k#7")
			return func() { control.Lose("k#7", nil) }
		},
		"the lock is taken over and released": func(t *testing.T, locks *pgxlock.Locker, control *locktesting.Control) func() {
			acquire(t, locks, "k#7")
			return func() { control.TakeOver("k#7")() }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				locks, control := locktesting.New(t, nil)
				free := busy(t, locks, control)
				order := queue(t, locks, "k#7", 4)
				if len(order) > 0 {
					t.Error("a waiter has a busy key")
				}
				if d := took(func() {
					free()
					for want := range 4 {
						if got := <-order; got != want {
							t.Errorf("waiter %d, want %d", got, want)
						}
					}
				}); d != 0 {
					t.Errorf("the waiters went on after %s", d)
				}
			})
		})
	}
}

func TestHoldIsSeenAsAnotherProcess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, &pgxlock.LeaseConfig{Owner: "me"})
		release := control.Hold("k")
		_, err := locks.TryAcquire(t.Context(), "k")
		is(t, "TryAcquire", err, pgxlock.ErrNotAcquired)
		holders, holdersErr := locks.Holders(t.Context(), "k")
		if holdersErr != nil || len(holders) != 1 || !strings.HasPrefix(holders[0].ID, "another-process:") {
			t.Fatalf("%v, %v", holders, holdersErr)
		}
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Holder != holders[0].ID {
			t.Errorf("%v does not name %s", err, holders[0].ID)
		}
		if d := took(func() { _, err = locks.Acquire(t.Context(), "k", pgxlock.MaxWait(time.Minute)) }); d != time.Minute {
			t.Errorf("MaxWait was over after %s", d)
		}
		is(t, "Acquire with MaxWait", err, pgxlock.ErrNotAcquired)
		release()
		lock := acquire(t, locks, "k", pgxlock.NoWait)
		release()
		is(t, "the lock behind a second release", lock.Err(), nil)
		if !strings.HasPrefix(lock.Holder(), "me:") {
			t.Errorf("the holder is %s", lock.Holder())
		}
		_, err = locks.TryAcquire(t.Context(), "k")
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Holder != lock.Holder() || e.RetryAfter != 30*time.Second {
			t.Errorf("%#v", err)
		}
	})
}

func TestSemaphoreGoesOnWhenAnotherProcessReleasesAPermit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, nil)
		jobs, err := locks.Semaphore(1)
		if err != nil {
			t.Fatal(err)
		}
		release := control.Hold("jobs#1")
		began := time.Now()
		got := make(chan time.Duration)
		go func() {
			_, err := jobs.Acquire(t.Context(), "jobs")
			is(t, "Acquire", err, nil)
			got <- time.Since(began)
		}()
		synctest.Wait()
		release()
		if d := <-got; d != 0 {
			t.Errorf("the waiter went on after %s", d)
		}
	})
}

func TestLeaderWhoseLockIsLostCampaignsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var seen events
		locks, control := locktesting.New(t, &pgxlock.LeaseConfig{Observe: seen.observe})
		terms, causes := make(chan int64), make(chan error, 3)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			ended <- locks.Lead(ctx, "leader", func(ctx context.Context, term *pgxlock.Lock) error {
				terms <- term.Token()
				<-ctx.Done()
				causes <- context.Cause(ctx)
				return context.Cause(ctx)
			})
		}()
		first := <-terms
		control.Lose("leader", nil)
		is(t, "the first term", <-causes, pgxlock.ErrLost)
		if second := <-terms; second <= first {
			t.Errorf("term %d after %d", second, first)
		}
		release := control.TakeOver("leader")
		is(t, "the second term", <-causes, pgxlock.ErrLost)
		time.Sleep(time.Hour)
		if locks.Leads("leader") {
			t.Error("two lead")
		}
		release()
		<-terms
		stop()
		is(t, "Lead", <-ended, context.Canceled)
		if got, want := seen.words(), "term_ended lost"; !slices.Contains(got, want) {
			t.Errorf("%q has no %q", got, want)
		}
	})
}

func TestRenewalsKeepTheLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var seen events
		locks, _ := locktesting.New(t, &pgxlock.LeaseConfig{TTL: 10 * time.Second, Renew: 2 * time.Second, Observe: seen.observe})
		lock, other := acquire(t, locks, "k"), acquire(t, locks, "other", pgxlock.TTL(time.Hour))
		time.Sleep(time.Hour + time.Millisecond)
		is(t, "the lock", lock.Err(), nil)
		is(t, "the other lock", other.Err(), nil)
		until, ok := lock.Deadline()
		if left := time.Until(until); !ok || left != 9*time.Second-time.Millisecond {
			t.Errorf("the deadline is in %s, %t", left, ok)
		}
		if until, ok := other.Deadline(); !ok || time.Until(until) != 54*time.Minute-time.Millisecond {
			t.Errorf("the deadline with a TTL of its own is in %s, %t", time.Until(until), ok)
		}
		holders, err := locks.Holders(t.Context(), "k")
		if err != nil || len(holders) != 1 || !holders[0].Expires.Equal(until.Add(time.Second)) {
			t.Errorf("%v, %v", holders, err)
		}
		if n := len(slices.DeleteFunc(seen.words(), func(word string) bool { return word != "renewed ok" })); n != 1803 {
			t.Errorf("%d renewals", n)
		}
	})
}

func TestExpireLosesTheLockAtItsDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var seen events
		locks, control := locktesting.New(t, &pgxlock.LeaseConfig{TTL: 10 * time.Second, Observe: seen.observe})
		lock := acquire(t, locks, "k")
		ctx, cancel := lock.Context(t.Context())
		defer cancel()
		time.Sleep(time.Hour)
		is(t, "Renew", lock.Renew(t.Context()), nil)
		began := time.Now()
		control.Expire("k")
		next := make(chan *pgxlock.Lock)
		go func() { next <- acquire(t, locks, "k") }()
		time.Sleep(4 * time.Second)
		is(t, "the lock before its deadline", lock.Err(), nil)
		is(t, "Renew", lock.Renew(t.Context()), pgxlock.ErrUnavailable)
		<-ctx.Done()
		if d := time.Since(began); d != 9*time.Second {
			t.Errorf("lost after %s", d)
		}
		is(t, "the cause", context.Cause(ctx), pgxlock.ErrLost)
		is(t, "a fence of the lost lock", lock.Fence(t.Context(), struct{ pgx.Tx }{}), pgxlock.ErrLost)
		got := <-next
		if d := time.Since(began); d != 10*time.Second {
			t.Errorf("the next caller had it after %s", d)
		}
		if got.Token() <= lock.Token() {
			t.Errorf("token %d after %d", got.Token(), lock.Token())
		}
		time.Sleep(time.Minute)
		is(t, "the next lock", got.Err(), nil)
		is(t, "Release", lock.Release(t.Context()), pgxlock.ErrLost)
		is(t, "the next lock behind the release of the lost one", got.Err(), nil)
		words := seen.words()
		if !slices.Contains(words, "renewed unavailable") || !slices.Contains(words, "lost lost") {
			t.Errorf("%q", words)
		}
	})
}

func TestReleaseBeforeTheDeadlineIsNoLoss(t *testing.T) {
	t.Parallel()
	locks, control := locktesting.New(t, nil)
	lock := acquire(t, locks, "k")
	control.Expire("k")
	is(t, "Release", lock.Release(t.Context()), nil)
	acquire(t, locks, "k", pgxlock.NoWait)
}

func TestDelayIsSeenByContextsAndMaxWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, nil)
		control.Delay(2 * time.Second)
		var lock *pgxlock.Lock
		if d := took(func() { lock = acquire(t, locks, "k") }); d != 2*time.Second {
			t.Errorf("Acquire took %s", d)
		}
		if until, _ := lock.Deadline(); time.Until(until) != 25*time.Second {
			t.Errorf("the deadline is in %s: it counts from the request", time.Until(until))
		}
		var err error
		if d := took(func() { _, err = locks.Acquire(t.Context(), "j", pgxlock.MaxWait(time.Second)) }); d != time.Second {
			t.Errorf("MaxWait was over after %s", d)
		}
		is(t, "MaxWait", err, pgxlock.ErrUnavailable)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if d := took(func() { _, err = locks.Acquire(ctx, "j") }); d != time.Second {
			t.Errorf("the context ended after %s", d)
		}
		is(t, "the context", err, context.DeadlineExceeded)
		if d := took(func() { err = lock.Renew(t.Context()) }); d != 2*time.Second || err != nil {
			t.Errorf("Renew took %s: %v", d, err)
		}
		if until, _ := lock.Deadline(); time.Until(until) != 25*time.Second {
			t.Errorf("the deadline is in %s after Renew", time.Until(until))
		}
		time.Sleep(time.Hour)
		if d := took(func() { err = lock.Release(t.Context()) }); d != 2*time.Second || err != nil {
			t.Errorf("Release took %s: %v", d, err)
		}
		control.Delay(0)
		if d := took(func() { acquire(t, locks, "k"); acquire(t, locks, "j") }); d != 0 {
			t.Errorf("Acquire without a delay took %s", d)
		}
	})
}

func TestDelayBeyondPatienceIsNoAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, nil)
		lock, kept := acquire(t, locks, "k"), acquire(t, locks, "kept")
		control.Delay(time.Minute)
		var err error
		if d := took(func() { _, err = locks.TryAcquire(t.Context(), "j") }); d != 5*time.Second {
			t.Errorf("TryAcquire took %s", d)
		}
		is(t, "TryAcquire", err, pgxlock.ErrUnavailable)
		is(t, "Release", lock.Release(t.Context()), pgxlock.ErrUnavailable)
		<-kept.Lost()
		is(t, "a lock that could not be renewed", kept.Err(), pgxlock.ErrLost)
		if d := took(func() { _, err = locks.Acquire(t.Context(), "j") }); d != 50*time.Second {
			t.Errorf("Acquire took %s", d)
		}
		is(t, "Acquire", err, pgxlock.ErrUnavailable)
		control.Delay(0)
		acquire(t, locks, "k", pgxlock.NoWait) // the lease that was not released has expired
		is(t, "Release of the lost lock", kept.Release(t.Context()), pgxlock.ErrLost)
	})
}

func TestDelayedGrantThatComesTooLateIsNoLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, &pgxlock.LeaseConfig{TTL: time.Second})
		control.Delay(2 * time.Second)
		_, err := locks.TryAcquire(t.Context(), "k")
		is(t, "TryAcquire", err, hold.ErrLateGrant)
		is(t, "TryAcquire", err, pgxlock.ErrUnavailable)
		control.Delay(0)
		acquire(t, locks, "k", pgxlock.NoWait)
	})
}

func TestRefuseIsTheNextRequestsError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, nil)
		refused := []error{pgxlock.ErrUnavailable, pgxlock.ErrSchema, pgxlock.ErrReadOnly, pgxlock.ErrDeadlock, errors.New("out of disk")}
		for _, want := range refused {
			control.Refuse("k", want)
		}
		for _, want := range refused {
			acquire(t, locks, "else", pgxlock.NoWait, pgxlock.Shared)
			_, err := locks.Acquire(t.Context(), "k")
			is(t, "Acquire", err, want)
			if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "acquire" || e.Key != "k" {
				t.Errorf("%#v", err)
			}
		}
		control.Refuse("k", pgxlock.ErrUnavailable)
		_, err := locks.AcquireAll(t.Context(), []string{"i", "k"})
		is(t, "AcquireAll", err, pgxlock.ErrUnavailable)
		control.Refuse("k", pgxlock.ErrNotAcquired)
		if ran, err := locks.TryDo(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil }); ran || err != nil {
			t.Errorf("TryDo: %t, %v", ran, err)
		}
		control.Refuse("k", pgxlock.ErrNotAcquired)
		var all pgxlock.Locks
		if d := took(func() { all, err = locks.AcquireAll(t.Context(), []string{"i", "k"}) }); err != nil || d == 0 || d > time.Second {
			t.Errorf("AcquireAll took %s: %v", d, err)
		}
		is(t, "Release", all.Release(t.Context()), nil)

		jobs, err := locks.Semaphore(2)
		if err != nil {
			t.Fatal(err)
		}
		control.Refuse("jobs#", pgxlock.ErrUnavailable)
		_, err = jobs.Acquire(t.Context(), "jobs")
		is(t, "a permit", err, pgxlock.ErrUnavailable)
	})
}

func TestWaitersAndLeadersTryAgainWhenRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, nil)
		release := control.Hold("k")
		order := queue(t, locks, "k", 1)
		control.Refuse("k", pgxlock.ErrUnavailable)
		release()
		<-order

		control.Refuse("leader", pgxlock.ErrUnavailable)
		is(t, "Lead", locks.Lead(t.Context(), "leader", func(context.Context, *pgxlock.Lock) error { return nil }), nil)
		control.Refuse("leader", pgxlock.ErrSchema)
		is(t, "Lead", locks.Lead(t.Context(), "leader", func(context.Context, *pgxlock.Lock) error { return nil }), pgxlock.ErrSchema)
	})
}

func TestUnsupportedIsWhatALockInMemoryRefuses(t *testing.T) {
	t.Parallel()
	locks, _ := locktesting.New(t, nil)
	memory := pgxlock.NewMemoryLocker()
	if locks.Kind() != memory.Kind() {
		t.Errorf("the kind is %s", locks.Kind())
	}
	for name, call := range map[string]func(*pgxlock.Locker) error{
		"Fence": func(locks *pgxlock.Locker) error {
			return acquire(t, locks, "k").Fence(t.Context(), struct{ pgx.Tx }{})
		},
		"a RawKey": func(locks *pgxlock.Locker) error {
			_, err := locks.TryAcquire(t.Context(), pgxlock.RawKey(1))
			return err
		},
		"a TTL": func(locks *pgxlock.Locker) error {
			_, err := locks.TryAcquire(t.Context(), "t", pgxlock.TTL(1))
			return err
		},
		"a key":     func(locks *pgxlock.Locker) error { _, err := locks.TryAcquire(t.Context(), ""); return err },
		"DoTx":      func(locks *pgxlock.Locker) error { return locks.DoTx(t.Context(), nil, "k", nil) },
		"Semaphore": func(locks *pgxlock.Locker) error { _, err := locks.Semaphore(0); return err },
	} {
		got, want := call(locks), call(memory)
		if got == nil || want == nil || got.Error() != want.Error() || errors.Is(got, errors.ErrUnsupported) != errors.Is(want, errors.ErrUnsupported) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if err := memory.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// A failingTB keeps the message of a test that fails, and goes on.
type failingTB struct {
	testing.TB
	said string
}

func (f *failingTB) Fatalf(format string, args ...any) {
	f.said = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestMistakeFailsTheTestAndNamesTheKey(t *testing.T) {
	t.Parallel()
	f := &failingTB{TB: t}
	locks, control := locktesting.New(f, &pgxlock.LeaseConfig{Owner: "me"})
	acquire(t, locks, "held")
	control.Hold("foreign")
	for want, call := range map[string]func(){
		`Lose "k": no Lock has it, only "held"`:                         func() { control.Lose("k", nil) },
		`Lose "foreign": another-process:`:                              func() { control.Lose("foreign", nil) },
		`TakeOver "k": no Lock has it, only "held"`:                     func() { control.TakeOver("k") },
		`Expire "k": no Lock has it, only "held"`:                       func() { control.Expire("k") },
		`Hold "held": ` + "":                                            func() { control.Hold("held") },
		`Hold "foreign": another-process:`:                              func() { control.Hold("foreign") },
		`Hold "": the key is empty`:                                     func() { control.Hold("") },
		`Refuse "": the key is empty`:                                   func() { control.Refuse("", pgxlock.ErrUnavailable) },
		`Refuse "k": the error is nil`:                                  func() { control.Refuse("k", nil) },
		`Refuse "k": no request fails with pgxlock: lock lost`:          func() { control.Refuse("k", pgxlock.ErrLost) },
		`Delay: -1s is negative`:                                        func() { control.Delay(-time.Second) },
		`New: pgxlock: new: LeaseConfig.TTL is 1ms, it must be between`: func() { locktesting.New(f, &pgxlock.LeaseConfig{TTL: time.Millisecond}) },
	} {
		f.said = ""
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			call()
		}()
		<-ended
		if !strings.HasPrefix(f.said, "locktesting: "+want) {
			t.Errorf("%q, want %q", f.said, want)
		}
	}
	acquire(t, locks, "k", pgxlock.NoWait)
}

func TestLockerIsClosedWhenTheTestEnds(t *testing.T) {
	t.Parallel()
	var locks *pgxlock.Locker
	var lock *pgxlock.Lock
	t.Run("test", func(t *testing.T) {
		locks, _ = locktesting.New(t, nil)
		lock = acquire(t, locks, "k")
	})
	is(t, "the lock", lock.Err(), pgxlock.ErrClosed)
	_, err := locks.TryAcquire(t.Context(), "k")
	is(t, "TryAcquire", err, pgxlock.ErrClosed)
}

func TestCloseWaitsForNoRenewal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		locks, control := locktesting.New(t, nil)
		began, ended := make(chan struct{}), make(chan error)
		go func() {
			ended <- locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
				close(began)
				time.Sleep(13 * time.Second) // beyond the first renewal
				return nil
			})
		}()
		<-began
		control.Delay(4 * time.Second)
		time.Sleep(11 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if d := took(func() { is(t, "Close", locks.Close(ctx), context.DeadlineExceeded) }); d != time.Second {
			t.Errorf("Close took %s", d)
		}
		is(t, "Do", <-ended, nil)
	})
}
