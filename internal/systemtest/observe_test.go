package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/locktest"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What Observe is told when a server, a network and callers do what they do. The ledger
// sees to it that each event comes once and in its turn, for whatever the tests do here,
// and for the conformance suite.

// An observedLocker is a Locker of either kind whose events are kept.
type observedLocker struct {
	*pgxlock.Locker
	locktest.Ledger

	mu     sync.Mutex
	events []observedEvent
	on     func(context.Context, pgxlock.Event) // is called first; may be nil
}

type observedEvent struct {
	pgxlock.Event
	ctx       context.Context
	goroutine uint64
}

func (o *observedLocker) observe(ctx context.Context, e pgxlock.Event) {
	if o.on != nil {
		o.on(ctx, e)
	}
	o.mu.Lock()
	o.events = append(o.events, observedEvent{e, ctx, goroutine()})
	o.mu.Unlock()
	o.Observe(ctx, e)
}

// of returns the events with that Op.
func (o *observedLocker) of(op pgxlock.EventOp) []observedEvent {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(o.events), func(e observedEvent) bool { return e.Op != op })
}

// wants checks the account of a Locker that is closed.
func (o *observedLocker) wants(t *testing.T, acquired, lost, released int) {
	t.Helper()
	o.Check(t)
	got := [3]int{o.Count(pgxlock.EventAcquired), o.Count(pgxlock.EventLost), o.Count(pgxlock.EventReleased)}
	if want := [3]int{acquired, lost, released}; got != want {
		t.Errorf("acquired, lost, released: %v, want %v", got, want)
	}
}

// onEachKind runs a test with an observed Locker of each kind.
func onEachKind(t *testing.T, test func(t *testing.T, o *observedLocker, db *pgtest.DB, p *testkit.Proxy)) {
	t.Helper()
	t.Parallel()
	for _, kind := range []pgxlock.Kind{pgxlock.KindLease, pgxlock.KindAdvisory} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			p, through := testkit.Proxied(t, db)
			o := &observedLocker{}
			var err error
			if kind == pgxlock.KindLease {
				o.Locker, err = pgxlock.NewLeaseLocker(through.Pool, &pgxlock.LeaseConfig{Owner: "observed", Observe: o.observe})
			} else {
				o.Locker, err = pgxlock.NewAdvisoryLocker(through.Pool, &pgxlock.AdvisoryConfig{Owner: "observed", Observe: o.observe})
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { // for a test that fails before it has closed it
				p.Heal()
				p.Cut()
				_ = o.Close(context.Background())
			})
			test(t, o, db, p)
		})
	}
}

func closes(t *testing.T, o *observedLocker) {
	t.Helper()
	if err := o.Close(t.Context()); err != nil {
		t.Errorf("Close: %v", err)
	}
}

type observeKey struct{}

func TestEventsComeInTheGoroutineOfTheCallWithItsContext(t *testing.T) {
	onEachKind(t, func(t *testing.T, o *observedLocker, _ *pgtest.DB, _ *testkit.Proxy) {
		acquiring, cancel := context.WithCancel(context.WithValue(t.Context(), observeKey{}, "of the call"))
		lock, err := o.Acquire(acquiring, "k")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := lock.Renew(t.Context()); err != nil {
			t.Error(err)
		}
		pgtest.Until(t, "the renewal is told", func() bool { return o.Count(pgxlock.EventRenewed) > 0 })
		releasing := context.WithValue(t.Context(), observeKey{}, "of Release")
		if err := lock.Release(releasing); err != nil {
			t.Error(err)
		}
		closes(t, o)
		o.wants(t, 1, 0, 1)
		for op, want := range map[pgxlock.EventOp]context.Context{pgxlock.EventWait: acquiring, pgxlock.EventAcquired: acquiring, pgxlock.EventReleased: releasing} {
			if e := o.of(op)[0]; e.ctx != want || e.goroutine != goroutine() {
				t.Errorf("%s is told in goroutine %d with context %v, want %d, %v", op, e.goroutine, e.ctx, goroutine(), want)
			}
		}
		renewed := o.of(pgxlock.EventRenewed)[0]
		if renewed.goroutine == goroutine() || renewed.ctx.Err() != nil || renewed.ctx.Value(observeKey{}) != "of the call" {
			t.Errorf("the renewal is told in goroutine %d with context %v", renewed.goroutine, renewed.ctx)
		}
		if e := o.of(pgxlock.EventAcquired)[0]; e.Key != "k" || e.Kind != o.Kind() || e.Token != lock.Token() || e.Holder != lock.Holder() {
			t.Errorf("%+v is not of the lock", e.Event)
		}
	})
}

func TestPanicAndGoexitInTheWorkAreAReleaseLikeAnyOther(t *testing.T) {
	pgtest.Long(t)
	onEachKind(t, func(t *testing.T, o *observedLocker, _ *pgtest.DB, _ *testkit.Proxy) {
		var working sync.WaitGroup
		for _, end := range []func(){func() { panic("of the work") }, runtime.Goexit} {
			working.Go(func() {
				defer func() { _ = recover() }()
				_ = o.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					end()
					return nil
				})
			})
		}
		working.Wait()
		closes(t, o)
		o.wants(t, 2, 0, 2)
	})
}

func TestGrantThatNobodyHeardOfIsNoEvent(t *testing.T) {
	pgtest.Long(t)
	onEachKind(t, func(t *testing.T, o *observedLocker, db *pgtest.DB, p *testkit.Proxy) {
		if err := testkit.Acquire(t, o.Locker, "warm").Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		sql := testkit.AcquireSQL
		if o.Kind() == pgxlock.KindAdvisory {
			sql = fmt.Sprintf("call of function %d", lockFunctions[0])
		}
		held := p.Arm(t, testkit.HoldReply, sql)
		ctx, cancel := context.WithCancel(t.Context())
		failed := make(chan error, 1)
		go func() {
			_, err := o.Acquire(ctx, "k")
			failed <- err
		}()
		held.Happened(t) // the server has granted it
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("a call that was left: %v", err)
		}
		held.Resume()
		testkit.Acquire(t, o.Locker, "k", testkit.LongWait) // it was given back
		closes(t, o)
		o.wants(t, 2, 0, 2)
		waits := o.of(pgxlock.EventWait)
		if e := waits[1]; len(waits) != 3 || !errors.Is(e.Err, context.Canceled) || e.Key != "k" || e.Busy {
			t.Errorf("%d calls, and that which was left is %+v", len(waits), e.Event)
		}
	})
}

func TestLostConnectionIsObservedOncePerLock(t *testing.T) {
	onEachKind(t, func(t *testing.T, o *observedLocker, db *pgtest.DB, p *testkit.Proxy) {
		const n = 20
		held := testkit.AcquireMany(t, o.Locker, n)
		inside, done := make(chan struct{}), make(chan error, 1)
		go func() {
			done <- o.Do(t.Context(), "do", func(ctx context.Context, _ *pgxlock.Lock) error {
				close(inside)
				if o.Kind() == pgxlock.KindAdvisory {
					<-ctx.Done()
				}
				return nil
			})
		}()
		<-inside
		testkit.Terminate(t, db, "observed")
		lost := 0
		if o.Kind() == pgxlock.KindAdvisory {
			lost = n + 1
			pgtest.Until(t, "all are told to be lost", func() bool { return o.Count(pgxlock.EventLost) == lost })
		}
		for _, lock := range held {
			if err := lock.Release(t.Context()); errors.Is(err, pgxlock.ErrLost) != (lost > 0) {
				t.Errorf("%s: %v", lock.Key(), err)
			}
		}
		if err := <-done; errors.Is(err, pgxlock.ErrLost) != (lost > 0) {
			t.Errorf("Do: %v", err)
		}
		closes(t, o)
		o.wants(t, n+1, lost, n+1-lost)
	})
}

// A network that swallows everything: renewals fail, and then the lock is lost, which is
// told though nobody looks at it.
func TestLeaseThatRunsOutIsToldToBeLost(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	o := &observedLocker{}
	o.Locker = testkit.NewLocker(t, through, &pgxlock.LeaseConfig{Observe: o.observe})
	t.Cleanup(func() { p.Heal(); p.Cut() }) // the Locker can say goodbye in the end
	lock, err := acquireInTime(t.Context(), o.Locker, "k", pgxlock.TTL(3*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	p.BlackHole()
	pgtest.Until(t, "it is told to be lost", func() bool { return o.Count(pgxlock.EventLost) == 1 })
	p.Heal()
	p.Cut()
	wantLost(t, lock)
	closes(t, o)
	o.wants(t, 1, 1, 0)
	e := o.of(pgxlock.EventLost)[0]
	if e.Err.Error() != lock.Err().Error() || e.ctx.Err() != nil {
		t.Errorf("told %v with context %v, want %v", e.Err, e.ctx.Err(), lock.Err())
	}
}

func TestFailedRenewalIsToldWithItsError(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	o := &observedLocker{}
	o.Locker = testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 100 * time.Millisecond, Observe: o.observe})
	testkit.Acquire(t, o.Locker, "k")
	good := func() (n int) {
		for _, e := range o.of(pgxlock.EventRenewed) {
			if e.Err == nil {
				n++
			}
		}
		return n
	}
	pgtest.Until(t, "it is renewed", func() bool { return good() > 0 })
	p.Refuse()
	p.Cut()
	pgtest.Until(t, "a renewal fails", func() bool { return o.Count(pgxlock.EventRenewed) > good() })
	failures, before := o.Count(pgxlock.EventRenewed)-good(), good()
	p.Heal()
	pgtest.Until(t, "it is renewed again", func() bool { return good() > before })
	closes(t, o)
	o.wants(t, 1, 0, 1)
	for _, e := range o.of(pgxlock.EventRenewed) {
		if failure, ok := errors.AsType[*pgxlock.Error](e.Err); e.Err != nil && (!ok || failure.Op != "renew" || failure.Key != "k") {
			t.Errorf("%v does not say what failed", e.Err)
		}
	}
	t.Logf("%d renewals failed", failures)
}

// Close cannot wait for work that goes on: a lease runs out then, and a session is gone
// at once.
func TestLockLeftInUseByCloseIsLostInTheEnd(t *testing.T) {
	pgtest.Long(t)
	onEachKind(t, func(t *testing.T, o *observedLocker, _ *pgtest.DB, _ *testkit.Proxy) {
		var opts []pgxlock.AcquireOption
		if o.Kind() == pgxlock.KindLease {
			opts = append(opts, pgxlock.TTL(3*time.Second))
		}
		inside, told, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
		go func() {
			err := pgxlock.ErrUnavailable
			for errors.Is(err, pgxlock.ErrUnavailable) { // what was granted was over when this machine read the answer
				err = o.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					close(inside)
					<-told
					return nil
				}, opts...)
			}
			done <- err
		}()
		<-inside
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := o.Close(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("Close: %v", err)
		}
		pgtest.Until(t, "it is told to be lost", func() bool { return o.Count(pgxlock.EventLost) == 1 })
		close(told)
		if err := <-done; !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("Do: %v", err)
		}
		o.wants(t, 1, 1, 0)
	})
}

// gate is a moment that others wait for.
type gate struct {
	opened chan struct{}
	once   sync.Once
}

func newGate() *gate { return &gate{opened: make(chan struct{})} }

func (g *gate) open() { g.once.Do(func() { close(g.opened) }) }

func (g *gate) wait(t *testing.T) {
	t.Helper()
	pgtest.Receive(t, "the gate opens", g.opened)
}

func TestWaiterIsObservedAsBusyOnce(t *testing.T) {
	onEachKind(t, func(t *testing.T, o *observedLocker, _ *pgtest.DB, _ *testkit.Proxy) {
		lock := testkit.Acquire(t, o.Locker, "k")
		var working sync.WaitGroup
		for range 3 {
			working.Go(func() {
				err := o.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil }, testkit.LongWait)
				if err != nil {
					t.Error(err)
				}
			})
		}
		pgtest.Until(t, "all of them wait", func() bool { return o.Count(pgxlock.EventBusy) == 3 })
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		working.Wait()
		closes(t, o)
		o.wants(t, 4, 0, 4)
		if first := o.of(pgxlock.EventBusy)[0]; first.Holder != lock.Holder() {
			t.Errorf("%q is in the way, want %q", first.Holder, lock.Holder())
		}
		if busy := o.Count(pgxlock.EventBusy); busy != 3 {
			t.Errorf("%d calls were busy, want 3", busy)
		}
	})
}

// Who is told that the key is busy stands in no line yet.
func TestCallThatObserveHoldsUpHoldsUpNobodyBehindIt(t *testing.T) {
	pgtest.Long(t)
	onEachKind(t, func(t *testing.T, o *observedLocker, _ *pgtest.DB, _ *testkit.Proxy) {
		slow, blocked := newGate(), newGate()
		t.Cleanup(slow.open)
		o.on = func(ctx context.Context, e pgxlock.Event) {
			if e.Op == pgxlock.EventBusy && ctx.Value(observeKey{}) != nil {
				blocked.open()
				<-slow.opened
			}
		}
		lock := testkit.Acquire(t, o.Locker, "k")
		got := make(chan error, 1)
		go func() {
			_, err := o.Acquire(context.WithValue(t.Context(), observeKey{}, true), "k", testkit.LongWait)
			got <- err
		}()
		blocked.wait(t)
		behind := make(chan *pgxlock.Lock, 1)
		go func() {
			lock, err := o.Acquire(t.Context(), "k", testkit.LongWait)
			if err != nil {
				t.Error(err)
			}
			behind <- lock
		}()
		pgtest.Until(t, "the second one waits", func() bool { return o.Count(pgxlock.EventBusy) == 1 }) // that of the first is not told yet
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if lock = <-behind; lock == nil {
			return
		}
		slow.open()
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-got; err != nil {
			t.Error(err)
		}
		closes(t, o)
		o.wants(t, 3, 0, 3)
	})
}

func TestPermitIsToldByItsSemaphoreAndItsNumber(t *testing.T) {
	t.Parallel()
	o := &observedLocker{}
	o.Locker = testkit.NewLocker(t, testkit.Migrated(t), &pgxlock.LeaseConfig{Observe: o.observe})
	s := testkit.Semaphore(t, o.Locker, 2)
	first, err := s.Acquire(t.Context(), "jobs")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Acquire(t.Context(), "jobs"); err != nil {
		t.Fatal(err)
	}
	_, err = s.TryAcquire(t.Context(), "jobs")
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Fatal(err)
	}
	busy := o.of(pgxlock.EventWait)[2]
	if busy.Err.Error() != err.Error() || busy.Err == err { //nolint:errorlint // not the one that the caller has, which is changed before it gets it
		t.Errorf("told %q, want a copy of %q", busy.Err, err)
	}
	if err := first.Release(t.Context()); err != nil {
		t.Error(err)
	}
	closes(t, o)
	o.wants(t, 2, 0, 2)
	type of struct{ permit, permits int }
	var got []of
	for _, e := range o.events {
		if e.Key != "jobs" {
			t.Errorf("%+v", e.Event)
		}
		got = append(got, of{e.Permit, e.Permits})
	}
	one, other := 1, 2 // whichever it got
	if first.Key() == "jobs#2" {
		one, other = 2, 1
	}
	want := []of{{0, 2}, {one, 2}, {0, 2}, {other, 2}, {0, 2}, {0, 2}, {one, 2}, {other, 2}}
	if !slices.Equal(got, want) {
		t.Errorf("told of %v, want %v", got, want)
	}
}

func TestSoakLocksAreLostOrReleasedOnceWhateverHappens(t *testing.T) {
	calls := pgtest.Soak(t, 40, 4000)
	onEachKind(t, func(t *testing.T, o *observedLocker, db *pgtest.DB, p *testkit.Proxy) {
		const workers = 8
		var got atomic.Int64 // locks that callers got
		stop, faults := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(faults)
			dice := rand.New(rand.NewPCG(7, 7))
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Duration(dice.Int64N(int64(400 * time.Millisecond)))):
				}
				if dice.IntN(2) == 0 {
					p.Cut()
				} else if _, err := db.Pool.Exec(t.Context(), `select pg_terminate_backend(pid) from pg_stat_activity
					where datname = current_database() and application_name = 'pgxlock observed'`); err != nil {
					t.Error(err)
				}
			}
		}()
		var working sync.WaitGroup
		for w := range workers {
			working.Go(func() {
				dice := rand.New(rand.NewPCG(uint64(w), 2))
				if _, err := o.Acquire(t.Context(), fmt.Sprint("left to Close:", w)); err == nil {
					got.Add(1)
				}
				for range calls {
					got.Add(int64(anyCall(t.Context(), dice, o.Locker)))
				}
			})
		}
		working.Wait()
		close(stop)
		<-faults
		closes(t, o)
		acquired, lost := o.Count(pgxlock.EventAcquired), o.Count(pgxlock.EventLost)
		o.wants(t, int(got.Load()), lost, acquired-lost)
		t.Logf("%d calls, %d of them busy: %d acquired, %d lost, %d renewed", o.Count(pgxlock.EventWait), o.Count(pgxlock.EventBusy), acquired, lost, o.Count(pgxlock.EventRenewed))
	})
}

// anyCall makes one call or another, and returns how many locks it got.
func anyCall(ctx context.Context, dice *rand.Rand, locks *pgxlock.Locker) (got int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	soon := func() time.Duration { return time.Duration(dice.Int64N(int64(100 * time.Millisecond))) }
	key := func() string { return fmt.Sprint("key:", dice.IntN(6)) }
	opts := []pgxlock.AcquireOption{pgxlock.MaxWait(soon() + 1), pgxlock.Mode(dice.IntN(2))}
	if dice.IntN(4) == 0 {
		defer time.AfterFunc(soon(), cancel).Stop()
	}
	work := func(ctx context.Context, lock *pgxlock.Lock) error {
		got++
		switch dice.IntN(4) {
		case 0:
			panic("of the work")
		case 1:
			_ = lock.Renew(ctx)
		}
		return nil
	}
	switch dice.IntN(5) {
	case 0:
		func() {
			defer func() { _ = recover() }()
			_ = locks.Do(ctx, key(), work, opts...)
		}()
	case 1:
		func() {
			defer func() { _ = recover() }()
			_, _ = locks.TryDo(ctx, key(), work)
		}()
	case 2:
		all, err := locks.AcquireAll(ctx, []string{key(), key(), key()}, opts...)
		if err == nil {
			got = len(all)
			_ = all.Release(ctx)
		}
	case 3:
		if lock, err := locks.TryAcquire(ctx, key()); err == nil {
			got = 1
			_ = lock.Release(ctx)
		}
	default:
		if lock, err := locks.Acquire(ctx, key(), opts...); err == nil {
			got = 1
			_ = lock.Release(ctx)
		}
	}
	return got
}
