package locktest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgxlock/pgxlock"
)

// semaphore returns one, or nil if the kind has none.
func semaphore(t *testing.T, locks *pgxlock.Locker, n int) *pgxlock.Semaphore {
	t.Helper()
	s, err := locks.Semaphore(n)
	if locks.Kind() == pgxlock.KindAdvisory {
		is(t, "a semaphore", err, errors.ErrUnsupported)
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func permits(t *testing.T, locks *pgxlock.Locker) {
	for _, n := range []int{0, -1, 10001} {
		if _, err := locks.Semaphore(n); err == nil {
			t.Errorf("a semaphore has %d permits", n)
		}
	}
	const n = 3
	s := semaphore(t, locks, n)
	if s == nil {
		return
	}
	const workers, rounds = 8, 6
	var inside, most, done atomic.Int32
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds {
				if err := s.Do(t.Context(), "jobs", func(ctx context.Context, permit *pgxlock.Lock) error {
					now := inside.Add(1)
					for was := most.Load(); now > was && !most.CompareAndSwap(was, now); was = most.Load() {
					}
					is(t, "a permit", permit.Renew(ctx), nil)
					inside.Add(-1)
					done.Add(1)
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if most := most.Load(); most > n || done.Load() != workers*rounds {
		t.Errorf("%d did their work, up to %d at a time, want %d, up to %d", done.Load(), most, workers*rounds, n)
	}

	var held []*pgxlock.Lock
	var keys []string
	for range n {
		permit, err := s.TryAcquire(t.Context(), "jobs", pgxlock.Metadata("mine"))
		if err != nil {
			t.Fatal(err)
		}
		held, keys = append(held, permit), append(keys, permit.Key())
	}
	slices.Sort(keys)
	if want := []string{"jobs#1", "jobs#2", "jobs#3"}; !slices.Equal(keys, want) {
		t.Errorf("the permits are %v, want %v", keys, want)
	}
	_, err := s.TryAcquire(t.Context(), "jobs")
	is(t, "one more", err, pgxlock.ErrNotAcquired)
	if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Key != "jobs" || e.Holder == "" {
		t.Errorf("%#v does not say who has permits of jobs", err)
	}
	if ran, err := s.TryDo(t.Context(), "jobs", func(context.Context, *pgxlock.Lock) error { return nil }); ran || err != nil {
		t.Errorf("TryDo: %v %v", ran, err)
	}
	who, err := s.Holders(t.Context(), "jobs")
	if err != nil || len(who) != n || who[1].Key != "jobs#2" || who[1].Metadata != "mine" || who[1].Token == 0 {
		t.Errorf("the holders are %+v, %v", who, err)
	}
	inside1, cancel := held[0].Context(t.Context())
	defer cancel()
	_, err = s.Acquire(inside1, "jobs")
	is(t, "a second permit for a holder of one", err, pgxlock.ErrDeadlock)

	waited := make(chan error, 1)
	go func() {
		permit, err := s.Acquire(t.Context(), "jobs")
		if err == nil && permit.Key() != held[1].Key() {
			t.Errorf("%s was given back, and %s granted", held[1].Key(), permit.Key())
		}
		waited <- err
	}()
	other := acquire(t, locks, "jobs") // is no permit
	if err := held[1].Release(t.Context()); err != nil {
		t.Error(err)
	}
	is(t, "a wait for a permit", <-waited, nil)
	for _, key := range []string{"", string(make([]rune, 255))} {
		if _, err := s.Acquire(t.Context(), key); err == nil {
			t.Errorf("a permit of %q", key)
		}
	}
	is(t, "Release", other.Release(t.Context()), nil)
	together(t, locks)
}

// Four jobs that need three of eight permits: one by one, each could have two and wait for the third for
// ever.
func together(t *testing.T, locks *pgxlock.Locker) {
	const n, jobs, each, rounds = 8, 4, 3, 6
	s := semaphore(t, locks, n)
	var inside atomic.Int32
	var wg sync.WaitGroup
	for range jobs {
		wg.Go(func() {
			for range rounds {
				all, err := s.AcquireN(t.Context(), "many", each)
				if err != nil {
					t.Error(err)
					return
				}
				keys := make(map[string]bool)
				for _, permit := range all {
					keys[permit.Key()] = true
					is(t, "a permit", permit.Renew(t.Context()), nil)
				}
				if now := inside.Add(each); len(all) != each || len(keys) != each || now > n {
					t.Errorf("%d permits, %d different ones, %d in all", len(all), len(keys), now)
				}
				inside.Add(-each)
				is(t, "Release", all.Release(t.Context()), nil)
			}
		})
	}
	wg.Wait()

	// A larger request lets none pass that came later.
	held, err := s.TryAcquireN(t.Context(), "many", 6)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.TryAcquireN(t.Context(), "many", 3)
	is(t, "three of two", err, pgxlock.ErrNotAcquired)
	large := make(chan pgxlock.Locks, 1)
	go func() {
		all, err := s.AcquireN(t.Context(), "many", 5)
		is(t, "a larger request", err, nil)
		large <- all
	}()
	for { // until it waits
		permit, err := s.TryAcquire(t.Context(), "many")
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		is(t, "Release", permit.Release(t.Context()), nil)
	}
	small := make(chan error, 1)
	go func() {
		_, err := s.Acquire(t.Context(), "many")
		small <- err
	}()
	_, err = s.TryAcquireN(t.Context(), "many", 1)
	is(t, "a try while others wait", err, pgxlock.ErrNotAcquired)
	is(t, "Release", held.Release(t.Context()), nil)
	all := <-large
	is(t, "a smaller request behind it", <-small, nil)
	inside1, cancel := all.Context(t.Context())
	defer cancel()
	_, err = s.AcquireN(inside1, "many", 2)
	is(t, "more for a holder of some", err, pgxlock.ErrDeadlock)
	is(t, "Release", all.Release(t.Context()), nil)
	for _, wrong := range []int{-1, 0, n + 1} {
		if _, err := s.AcquireN(t.Context(), "many", wrong); err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%d of %d: %v", wrong, n, err)
		}
		if _, err := s.TryAcquireN(t.Context(), "many", wrong); err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%d of %d: %v", wrong, n, err)
		}
	}
}

func differentPermits(t *testing.T, locks *pgxlock.Locker) {
	few, many := semaphore(t, locks, 1), semaphore(t, locks, 3)
	if few == nil {
		return
	}
	var held []*pgxlock.Lock
	for range 3 {
		permit, err := many.TryAcquire(t.Context(), "jobs")
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, permit)
	}
	for _, permit := range held {
		if _, err := few.TryAcquire(t.Context(), "jobs"); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("one of one, beside those of three: %v", err)
		}
		if permit.Key() != "jobs#1" {
			is(t, "Release", permit.Release(t.Context()), nil)
		}
	}
	permit, err := many.TryAcquire(t.Context(), "jobs")
	if err != nil || permit.Key() == "jobs#1" {
		t.Errorf("the second of three: %v %v", permit, err)
	}
}
