// Package locktest holds what every kind of Locker must do. A kind is tested by
// running the suite on it:
//
//	locktest.Run(t, func(t *testing.T) *pgxlock.Locker { ... })
package locktest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Run runs the suite. newLocker returns a Locker for keys that nobody has, and
// every call one that excludes nobody of the calls before.
func Run(t *testing.T, newLocker func(t *testing.T) *pgxlock.Locker) {
	for name, test := range map[string]func(*testing.T, *pgxlock.Locker){
		"one holds the key at a time":              oneAtATime,
		"a try of a held key says who has it":      busySaysWho,
		"a wait that is too short knows own locks": ownLocksAreKnown,
		"tokens grow": tokensGrow,
		"a release wakes or is noticed by a waiter":   releaseLetsIn,
		"a wait ends with its context":                waitEndsWithContext,
		"a second release returns the first's result": releaseTwice,
		"contexts end with the lock":                  contextsEnd,
		"the holder's context cannot wait for itself": noSelfWait,
		"a panic in the work releases":                panicReleases,
		"TryDo skips":                                 tryDoSkips,
		"a closed Locker refuses and releases":        closed,
		"all keys or none":                            allOrNone,
		"all keys in any order without a deadlock":    allWithoutDeadlock,
		"locks taken together end together":           allEndTogether,
		"holders are told":                            holders,
		"bad input is named":                          badInput,
		"what it cannot do is unsupported":            unsupported,
		"those who share exclude those who do not":    shared,
		"one leads at a time, and the next after it":  leads,
		"a leader steps down when asked":              stepsDown,
		"as many hold permits as there are":           permits,
		"permits that differ in number":               differentPermits,
		"who shares does not pass who waits alone":    readersDoNotPass,
		"many keys are shared together":               allShared,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			locks := newLocker(t)
			test(t, locks)
			if err := locks.Close(context.Background()); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
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

func oneAtATime(t *testing.T, locks *pgxlock.Locker) {
	const workers, rounds = 8, 12
	var inside, done atomic.Int32
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds {
				err := locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
					if inside.Add(1) != 1 {
						t.Error("two hold the key")
					}
					done.Add(1)
					inside.Add(-1)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := done.Load(); n != workers*rounds {
		t.Errorf("%d did their work, want %d", n, workers*rounds)
	}
}

func busySaysWho(t *testing.T, locks *pgxlock.Locker) {
	lock := acquire(t, locks, "k")
	for _, wait := range []pgxlock.MaxWait{pgxlock.NoWait, pgxlock.MaxWait(time.Second)} {
		_, err := locks.Acquire(t.Context(), "k", wait)
		is(t, "a held key", err, pgxlock.ErrNotAcquired)
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Holder != lock.Holder() || e.Key != "k" || e.Kind != locks.Kind() {
			t.Errorf("%#v does not say that %s has it", err, lock.Holder())
		}
	}
	acquire(t, locks, "another")
}

// A wait may be over before the server has answered, and the Locker knows all the same who is
// in the way if it is itself.
func ownLocksAreKnown(t *testing.T, locks *pgxlock.Locker) {
	const tooShort = pgxlock.MaxWait(1)
	held, group := acquire(t, locks, "k"), acquire(t, locks, "group", pgxlock.Shared)
	for what, call := range map[string]func() error{
		"Acquire":         func() error { _, err := locks.Acquire(t.Context(), "k", tooShort); return err },
		"Acquire, Shared": func() error { _, err := locks.Acquire(t.Context(), "k", tooShort, pgxlock.Shared); return err },
		"AcquireAll":      func() error { _, err := locks.AcquireAll(t.Context(), []string{"a", "k"}, tooShort); return err },
		"Do": func() error {
			return locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil }, tooShort)
		},
	} {
		err := call()
		is(t, what, err, pgxlock.ErrNotAcquired)
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Holder != held.Holder() && what != "AcquireAll" {
			t.Errorf("%s: %v does not say that %s has it", what, err, held.Holder())
		}
		if errors.Is(err, pgxlock.ErrUnavailable) {
			t.Errorf("%s: %v", what, err)
		}
	}
	ran, err := locks.TryDo(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil }, tooShort)
	if ran || err != nil {
		t.Errorf("TryDo: %t, %v", ran, err)
	}
	_, err = locks.Acquire(t.Context(), "group", tooShort)
	is(t, "a group", err, pgxlock.ErrNotAcquired)
	if _, err := locks.Acquire(t.Context(), "group", tooShort, pgxlock.Shared); errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("nothing is in the way of one more of the group: %v", err)
	}
	if _, err := locks.Acquire(t.Context(), "free", tooShort); errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("nobody has it: %v", err)
	}
	for _, lock := range []*pgxlock.Lock{held, group} {
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if _, err := locks.Acquire(t.Context(), "k", tooShort); errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("it was released: %v", err)
	}
}

func tokensGrow(t *testing.T, locks *pgxlock.Locker) {
	var last int64
	for i := range 5 {
		lock := acquire(t, locks, "k")
		if none := lock.Token() == 0; none && i == 0 {
			last = -1 // it draws none, and so for good
		}
		if last == -1 && lock.Token() != 0 || last != -1 && lock.Token() <= last {
			t.Errorf("token %d after %d", lock.Token(), last)
		}
		last = cmp.Or(lock.Token(), last)
		if err := lock.Renew(t.Context()); err != nil {
			t.Error(err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func releaseLetsIn(t *testing.T, locks *pgxlock.Locker) {
	first := acquire(t, locks, "k")
	got := make(chan error, 1)
	go func() {
		_, err := locks.Acquire(t.Context(), "k", pgxlock.MaxWait(pgtest.Patience))
		got <- err
	}()
	if err := first.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func waitEndsWithContext(t *testing.T, locks *pgxlock.Locker) {
	lock := acquire(t, locks, "k")
	var ctx context.Context
	var err error
	for patience := 30 * time.Millisecond; ; patience *= 2 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(t.Context(), patience, errors.New("enough"))
		defer cancel()
		_, err = locks.Acquire(ctx, "k")
		is(t, "the wait", err, context.DeadlineExceeded)
		if errors.Is(err, pgxlock.ErrNotAcquired) || t.Failed() || patience > pgtest.Patience {
			break // else it ended before anybody had said that the key is busy
		}
	}
	is(t, "the wait", err, pgxlock.ErrNotAcquired)
	if err := lock.Release(ctx); err != nil {
		t.Errorf("a release is stopped by its context: %v", err)
	}
	_, err = locks.Acquire(ctx, "k")
	is(t, "a context that has ended", err, context.DeadlineExceeded)
	acquire(t, locks, "k", pgxlock.MaxWait(pgtest.Patience)) // what the wait may have got is given back, and would expire later than that
}

func releaseTwice(t *testing.T, locks *pgxlock.Locker) {
	lock := acquire(t, locks, "k")
	for range 2 {
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	is(t, "Err", lock.Err(), pgxlock.ErrReleased)
	is(t, "Renew", lock.Renew(t.Context()), pgxlock.ErrReleased)
	select {
	case <-lock.Lost():
		t.Error("a released lock counts as lost")
	default:
	}
}

func contextsEnd(t *testing.T, locks *pgxlock.Locker) {
	lock := acquire(t, locks, "k")
	ctx, cancel := lock.Context(t.Context())
	defer cancel()
	child, stop := context.WithCancel(ctx)
	defer stop()
	if ctx.Err() != nil || lock.Err() != nil {
		t.Fatal(ctx.Err(), lock.Err())
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	<-child.Done()
	is(t, "the cause", context.Cause(child), pgxlock.ErrReleased)
}

func noSelfWait(t *testing.T, locks *pgxlock.Locker) {
	err := locks.Do(t.Context(), "k", func(ctx context.Context, _ *pgxlock.Lock) error {
		_, err := locks.Acquire(ctx, "k")
		is(t, "Acquire", err, pgxlock.ErrDeadlock)
		_, err = locks.AcquireAll(ctx, []string{"j", "k"})
		is(t, "AcquireAll", err, pgxlock.ErrDeadlock)
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func panicReleases(t *testing.T, locks *pgxlock.Locker) {
	func() {
		defer func() { _ = recover() }()
		_ = locks.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { panic("work") })
	}()
	acquire(t, locks, "k", pgxlock.MaxWait(pgtest.Patience))
}

func tryDoSkips(t *testing.T, locks *pgxlock.Locker) {
	ran, err := locks.TryDo(t.Context(), "k", func(context.Context, *pgxlock.Lock) error {
		ran, err := locks.TryDo(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil })
		if ran || err != nil {
			t.Errorf("a held key: %t, %v", ran, err)
		}
		return pgxlock.ErrNotAcquired
	})
	if !ran || !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("fn's own error: %t, %v", ran, err)
	}
}

func closed(t *testing.T, locks *pgxlock.Locker) {
	lock := acquire(t, locks, "k")
	waiting := make(chan error, 1)
	go func() {
		_, err := locks.Acquire(context.Background(), "k")
		waiting <- err
	}()
	ctx, cancel := lock.Context(t.Context())
	defer cancel()
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	is(t, "the waiter", <-waiting, pgxlock.ErrClosed)
	is(t, "the holder's context", context.Cause(ctx), pgxlock.ErrClosed)
	is(t, "the holder", lock.Err(), pgxlock.ErrClosed)
	_, err := locks.Acquire(t.Context(), "k")
	is(t, "Acquire", err, pgxlock.ErrClosed)
	_, err = locks.AcquireAll(t.Context(), []string{"k"})
	is(t, "AcquireAll", err, pgxlock.ErrClosed)
	_, err = locks.Holders(t.Context(), "k")
	is(t, "Holders", err, pgxlock.ErrClosed)
	is(t, "AskToStepDown", locks.AskToStepDown(t.Context(), "k"), pgxlock.ErrClosed)
}

func allOrNone(t *testing.T, locks *pgxlock.Locker) {
	busy := acquire(t, locks, "c")
	for _, wait := range []pgxlock.MaxWait{pgxlock.NoWait, pgxlock.MaxWait(time.Second)} {
		_, err := locks.AcquireAll(t.Context(), []string{"d", "c", "b", "a"}, wait)
		is(t, "one is busy", err, pgxlock.ErrNotAcquired)
		if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Key != "c" {
			t.Errorf("%v does not name the key that is busy", err)
		}
		for _, key := range []string{"a", "b", "d"} {
			if err := acquire(t, locks, key, pgxlock.NoWait).Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	got := make(chan error, 1)
	go func() {
		all, err := locks.AcquireAll(t.Context(), []string{"d", "c", "b", "a", "b"})
		if err == nil && len(all) != 4 {
			err = fmt.Errorf("%d locks", len(all))
		}
		names := make(map[string]bool)
		for _, lock := range all {
			names[lock.Key()] = true
		}
		if err == nil && !maps.Equal(names, map[string]bool{"a": true, "b": true, "c": true, "d": true}) {
			err = fmt.Errorf("the locks are on %v", names)
		}
		got <- errors.Join(err, all.Release(t.Context()))
	}()
	if err := busy.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
	if none, err := locks.AcquireAll(t.Context(), nil); len(none) != 0 || err != nil {
		t.Errorf("no keys: %v, %v", none, err)
	}
}

func allWithoutDeadlock(t *testing.T, locks *pgxlock.Locker) {
	orders := [][]string{{"a", "b", "c"}, {"c", "b", "a"}, {"b", "c"}, {"c", "a"}}
	var inside [3]atomic.Int32
	var wg sync.WaitGroup
	for _, keys := range orders {
		wg.Go(func() {
			for range 8 {
				all, err := locks.AcquireAll(t.Context(), keys)
				if err != nil {
					t.Error(err)
					return
				}
				for _, lock := range all {
					if inside[lock.Key()[0]-'a'].Add(1) != 1 {
						t.Error("two hold a key")
					}
				}
				for _, lock := range all {
					inside[lock.Key()[0]-'a'].Add(-1)
				}
				if err := all.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func allEndTogether(t *testing.T, locks *pgxlock.Locker) {
	all, err := locks.AcquireAll(t.Context(), []string{"a", "b", "c"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := all.Context(t.Context())
	defer cancel()
	_, err = locks.Acquire(ctx, "b")
	is(t, "a key that the context holds", err, pgxlock.ErrDeadlock)
	if err := all[1].Release(t.Context()); err != nil {
		t.Error(err)
	}
	<-ctx.Done()
	is(t, "the cause", context.Cause(ctx), pgxlock.ErrReleased)
	if err := all.Release(t.Context()); err != nil {
		t.Error(err)
	}
	for _, lock := range all {
		is(t, lock.Key(), lock.Err(), pgxlock.ErrReleased)
	}
}

func holders(t *testing.T, locks *pgxlock.Locker) {
	if none, err := locks.Holders(t.Context(), "k"); len(none) != 0 || err != nil {
		t.Errorf("a free key: %v, %v", none, err)
	}
	var metadata string
	var opts []pgxlock.AcquireOption
	if takes(t, locks, pgxlock.Metadata("any")) {
		metadata = `pod "7"`
		opts = append(opts, pgxlock.Metadata(metadata))
	}
	lock := acquire(t, locks, "k", opts...)
	found, err := locks.Holders(t.Context(), "k")
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	h := found[0]
	_, bounded := lock.Deadline()
	if h.Key != "k" || h.ID != lock.Holder() || h.Token != lock.Token() || h.Kind != locks.Kind() || h.Metadata != metadata ||
		h.Mode != pgxlock.Exclusive || h.Since.IsZero() || bounded == h.Expires.IsZero() {
		t.Errorf("%+v", h)
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if none, err := locks.Holders(t.Context(), "k"); len(none) != 0 || err != nil {
		t.Errorf("a released key: %v, %v", none, err)
	}
	changes(t, locks)
}

// What a lock was acquired with can change, and does not change that of others.
func changes(t *testing.T, locks *pgxlock.Locker) {
	supported := takes(t, locks, pgxlock.TTL(time.Hour)) && takes(t, locks, pgxlock.Metadata("any"))
	for _, mode := range []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared} {
		key := mode.String()
		lock := acquire(t, locks, key, mode)
		other := lock
		if mode == pgxlock.Shared {
			other = acquire(t, locks, key, mode)
		}
		before, bounded := lock.Deadline()
		if !supported {
			is(t, "SetTTL", lock.SetTTL(t.Context(), time.Hour), errors.ErrUnsupported)
			is(t, "SetMetadata", lock.SetMetadata(t.Context(), "any"), errors.ErrUnsupported)
			is(t, "the lock", lock.Err(), nil)
			continue
		}
		for _, ttl := range []time.Duration{2 * time.Hour, 30 * time.Minute} {
			began := time.Now()
			is(t, "SetMetadata", lock.SetMetadata(t.Context(), ttl.String()), nil)
			is(t, "SetTTL", lock.SetTTL(t.Context(), ttl), nil)
			if until, ok := lock.Deadline(); ok != bounded || bounded && (until.Sub(began) < ttl/2 || until.After(time.Now().Add(ttl))) {
				t.Errorf("%s: the deadline is %s away with a TTL of %s", key, time.Until(until), ttl)
			}
			found, err := locks.Holders(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			for _, h := range found {
				if mine := h.ID == lock.Holder(); mine && h.Metadata != ttl.String() || !mine && h.Metadata != "" {
					t.Errorf("%s: %+v", key, h)
				}
				if until, ok := lock.Deadline(); ok && h.ID == lock.Holder() && (h.Expires.Before(until) || h.Expires.After(time.Now().Add(ttl+time.Minute))) {
					t.Errorf("%s: it expires at %s, with a TTL of %s and the deadline %s", key, h.Expires, ttl, until)
				}
			}
		}
		if until, _ := other.Deadline(); other != lock && until.Before(before) {
			t.Errorf("another holder's deadline was %s, and is %s", before, until)
		}
		for _, wrong := range []time.Duration{0, -time.Hour, time.Millisecond} {
			if err := lock.SetTTL(t.Context(), wrong); err == nil || lock.Err() != nil {
				t.Errorf("a TTL of %s: %v, %v", wrong, err, lock.Err())
			}
		}
		if err := lock.SetMetadata(t.Context(), "\xff"); err == nil || lock.Err() != nil {
			t.Errorf("bad metadata: %v, %v", err, lock.Err())
		}
		is(t, "Release", lock.Release(t.Context()), nil)
		is(t, "SetTTL of a released lock", lock.SetTTL(t.Context(), time.Hour), pgxlock.ErrReleased)
	}
}

func badInput(t *testing.T, locks *pgxlock.Locker) {
	for _, key := range []string{"", "a\x00b", "\xff", string(slices.Repeat([]byte("k"), 256))} {
		if _, err := locks.TryAcquire(t.Context(), key); err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("Acquire %.10q: %v", key, err)
		}
		if _, err := locks.AcquireAll(t.Context(), []string{"fine", key}); err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("AcquireAll %.10q: %v", key, err)
		}
		if _, err := locks.Holders(t.Context(), key); err == nil {
			t.Errorf("Holders %.10q: no error", key)
		}
		if err := locks.AskToStepDown(t.Context(), key); err == nil {
			t.Errorf("AskToStepDown %.10q: no error", key)
		}
	}
	acquire(t, locks, "fine", pgxlock.NoWait)
	for _, opt := range []pgxlock.AcquireOption{nil, pgxlock.TTL(time.Millisecond), pgxlock.Metadata("\xff"), pgxlock.Mode(9)} {
		if _, err := locks.TryAcquire(t.Context(), "k", opt); err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%v: %v", opt, err)
		}
	}
	if err := locks.Do(t.Context(), "k", nil); err == nil {
		t.Error("a nil function was taken")
	}
}

// takes reports whether this kind of lock honours an option. One that it does not
// is refused, never ignored.
func takes(t *testing.T, locks *pgxlock.Locker, opt pgxlock.AcquireOption) bool {
	t.Helper()
	lock, err := locks.TryAcquire(t.Context(), "takes", opt)
	if err == nil {
		err = lock.Release(t.Context())
	}
	if errors.Is(err, errors.ErrUnsupported) {
		return false
	}
	if err != nil {
		t.Fatalf("%v: %v", opt, err)
	}
	return true
}

func unsupported(t *testing.T, locks *pgxlock.Locker) {
	for _, opt := range []pgxlock.AcquireOption{pgxlock.Shared, pgxlock.TTL(time.Hour), pgxlock.Metadata("any")} {
		if takes(t, locks, opt) {
			continue
		}
		_, err := locks.TryAcquire(t.Context(), "k", opt)
		is(t, fmt.Sprint(opt), err, errors.ErrUnsupported)
		_, err = locks.AcquireAll(t.Context(), []string{"k"}, opt)
		is(t, fmt.Sprint(opt), err, errors.ErrUnsupported)
	}
	acquire(t, locks, "k", pgxlock.Exclusive)
}

func shared(t *testing.T, locks *pgxlock.Locker) {
	first := acquire(t, locks, "k", pgxlock.Shared)
	second := acquire(t, locks, "k", pgxlock.Shared, pgxlock.NoWait)
	if found, err := locks.Holders(t.Context(), "k"); err != nil || len(found) != 2 || found[0].Mode != pgxlock.Shared {
		t.Errorf("%+v, %v", found, err)
	}
	inside, cancel := second.Context(t.Context())
	defer cancel()
	_, err := locks.Acquire(inside, "k")
	if is(t, "an upgrade", err, pgxlock.ErrDeadlock); err == nil || !strings.Contains(err.Error(), "shared, and two upgrades would wait") {
		t.Errorf("%v does not say why", err)
	}
	if err := first.Release(t.Context()); err != nil {
		t.Error(err)
	}
	_, err = locks.TryAcquire(t.Context(), "k")
	is(t, "an exclusive lock beside a shared one", err, pgxlock.ErrNotAcquired)
	if err := second.Renew(t.Context()); err != nil {
		t.Error(err)
	}
	if err := errors.Join(second.Release(t.Context()), second.Release(t.Context())); err != nil {
		t.Error(err)
	}
	alone := acquire(t, locks, "k", pgxlock.NoWait)
	if alone.Token() != 0 && (alone.Token() <= first.Token() || alone.Token() <= second.Token()) {
		t.Errorf("token %d after %d and %d", alone.Token(), first.Token(), second.Token())
	}
	_, err = locks.TryAcquire(t.Context(), "k", pgxlock.Shared)
	is(t, "a shared lock beside an exclusive one", err, pgxlock.ErrNotAcquired)
	downgrades(t, locks, alone)

	var wg sync.WaitGroup
	start := make(chan struct{})
	for range 8 {
		wg.Go(func() {
			<-start
			acquire(t, locks, "together", pgxlock.Shared, pgxlock.NoWait)
		})
	}
	close(start)
	wg.Wait()
}

// An exclusive lock becomes a shared one, which readers join and no writer.
func downgrades(t *testing.T, locks *pgxlock.Locker, alone *pgxlock.Lock) {
	ctx, cancel := alone.Context(t.Context())
	defer cancel()
	shared, err := alone.Downgrade(ctx)
	if locks.Kind() == pgxlock.KindAdvisory {
		is(t, "Downgrade", err, errors.ErrUnsupported)
		is(t, "the lock", errors.Join(alone.Err(), alone.Release(t.Context())), nil)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	is(t, "the exclusive lock", alone.Err(), pgxlock.ErrReleased)
	is(t, "its context", context.Cause(ctx), pgxlock.ErrReleased)
	is(t, "its Release", alone.Release(t.Context()), nil)
	_, err = alone.Downgrade(t.Context())
	is(t, "a second Downgrade", err, pgxlock.ErrReleased)
	if _, err := shared.Downgrade(t.Context()); err == nil || shared.Err() != nil {
		t.Errorf("a shared lock was shared: %v, %v", err, shared.Err())
	}
	if shared.Key() != "k" || shared.Token() != alone.Token() || shared.Holder() == alone.Holder() {
		t.Errorf("%s of %s, token %d, was %d of %s", shared.Key(), shared.Holder(), shared.Token(), alone.Token(), alone.Holder())
	}
	_, err = locks.TryAcquire(t.Context(), "k")
	is(t, "an exclusive lock beside it", err, pgxlock.ErrNotAcquired)
	reader := acquire(t, locks, "k", pgxlock.Shared, pgxlock.NoWait)
	is(t, "Renew", errors.Join(shared.Renew(t.Context()), reader.Renew(t.Context())), nil)
	is(t, "Release", errors.Join(shared.Release(t.Context()), reader.Release(t.Context())), nil)

	// A reader that waits joins as soon as it may.
	alone = acquire(t, locks, "k", pgxlock.NoWait)
	joined := make(chan error, 1)
	go func() {
		_, err := locks.Acquire(t.Context(), "k", pgxlock.Shared, pgxlock.MaxWait(pgtest.Patience))
		joined <- err
	}()
	if shared, err = alone.Downgrade(t.Context()); err != nil {
		t.Fatal(err)
	}
	is(t, "a reader", errors.Join(<-joined, shared.Err()), nil)
	if s := semaphore(t, locks, 1); s != nil {
		permit, err := s.Acquire(t.Context(), "jobs")
		if err != nil {
			t.Fatal(err)
		}
		_, err = permit.Downgrade(t.Context())
		is(t, "a permit", err, errors.ErrUnsupported)
		is(t, "a permit", permit.Err(), nil)
	}
}

func readersDoNotPass(t *testing.T, locks *pgxlock.Locker) {
	reading := acquire(t, locks, "k", pgxlock.Shared)
	writing := make(chan *pgxlock.Lock, 1)
	go func() {
		lock, err := locks.Acquire(t.Context(), "k", pgxlock.MaxWait(pgtest.Patience))
		if err != nil {
			t.Error(err)
		}
		writing <- lock
	}()
	for { // until the writer waits
		reader, err := locks.Acquire(t.Context(), "k", pgxlock.Shared, pgxlock.MaxWait(50*time.Millisecond))
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			break
		}
		if err != nil {
			continue // it took too long to ask
		}
		if err := reader.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	late := make(chan error, 1)
	go func() {
		_, err := locks.Acquire(t.Context(), "k", pgxlock.Shared, pgxlock.MaxWait(pgtest.Patience))
		late <- err
	}()
	if err := reading.Release(t.Context()); err != nil {
		t.Error(err)
	}
	writer := <-writing
	select {
	case err := <-late:
		t.Errorf("a reader has the key beside the writer: %v", err)
	default:
	}
	if writer == nil {
		return
	}
	if err := writer.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-late; err != nil {
		t.Error(err)
	}
}

func allShared(t *testing.T, locks *pgxlock.Locker) {
	keys := []string{"c", "a", "b"}
	first, err := locks.AcquireAll(t.Context(), keys, pgxlock.Shared)
	if err != nil {
		t.Fatal(err)
	}
	second, err := locks.AcquireAll(t.Context(), keys, pgxlock.Shared, pgxlock.NoWait)
	if err != nil {
		t.Fatal(err)
	}
	_, err = locks.AcquireAll(t.Context(), []string{"a", "z"}, pgxlock.NoWait)
	is(t, "a key that others share", err, pgxlock.ErrNotAcquired)
	if err := errors.Join(first.Release(t.Context()), second.Release(t.Context())); err != nil {
		t.Error(err)
	}
	acquire(t, locks, "a", pgxlock.NoWait)
	_, err = locks.AcquireAll(t.Context(), keys, pgxlock.Shared, pgxlock.NoWait)
	is(t, "a key that somebody has alone", err, pgxlock.ErrNotAcquired)
	acquire(t, locks, "b", pgxlock.NoWait) // nothing is kept
}
