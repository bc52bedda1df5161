package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
)

// A period that no test sees the end of.
const age = 3650 * 24 * time.Hour

// runners runs a test with Runners on a server and in memory. Those that newRunner returns in
// one test see each other's runs, on a server.
func runners(t *testing.T, test func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner)) {
	t.Helper()
	made := func(t *testing.T, o *once.Runner, err error) *once.Runner {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := o.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		return o
	}
	t.Run("server", func(t *testing.T) {
		t.Parallel()
		db := testkit.Migrated(t)
		test(t, func(period time.Duration, cfg *once.Config) *once.Runner {
			t.Helper()
			o, err := once.New(db.Pool, period, cfg)
			return made(t, o, err)
		})
	})
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		test(t, func(period time.Duration, cfg *once.Config) *once.Runner {
			t.Helper()
			o, err := once.NewMemory(period, cfg)
			return made(t, o, err)
		})
	})
}

// runnerOn returns a Runner that is closed when the test is over.
func runnerOn(t *testing.T, db *pgtest.DB, period time.Duration, cfg *once.Config) *once.Runner {
	t.Helper()
	o, err := once.New(db.Pool, period, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return o
}

// A job is what a test has run; it counts.
type job struct {
	mu   sync.Mutex
	runs []once.Run
	err  error // what it returns
}

func (j *job) run(_ context.Context, run once.Run) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.runs = append(j.runs, run)
	return j.err
}

// wantDo calls Do, and checks whether it ran.
func wantDo(t *testing.T, o *once.Runner, key string, j *job, want bool) {
	t.Helper()
	ran, err := o.Do(t.Context(), key, j.run)
	if ran != want || want && !errors.Is(err, j.err) || !want && err != nil {
		t.Errorf("Do: ran %t, %v; want %t", ran, err, want)
	}
}

func TestPeriodIsRunByOneOfManyCalls(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		for _, retry := range []bool{false, true} {
			key := fmt.Sprint("k ", retry)
			o := newRunner(age, &once.Config{Retry: retry})
			var done atomic.Int32
			var j job
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					ran, err := o.Do(t.Context(), key, j.run)
					if err != nil {
						t.Error(err)
					}
					if ran {
						done.Add(1)
					}
				})
			}
			wg.Wait()
			if len(j.runs) != 1 || done.Load() != 1 {
				t.Errorf("Retry %t: it ran %d times, and %d were told so", retry, len(j.runs), done.Load())
			}
			run := j.runs[0]
			if run.Key != key || run.Attempt != 1 || (run.Lock != nil) != retry || run.Slot.After(time.Now()) || run.Slot.Before(time.Now().Add(-age)) || run.Slot.Location() != time.UTC {
				t.Errorf("Retry %t: run %+v", retry, run)
			}
			wantDo(t, o, key, &j, false)
			wantDo(t, o, "another "+key, &j, true)
		}
	})
}

func TestTickIsRunOnce(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		for _, retry := range []bool{false, true} {
			key := fmt.Sprint("k ", retry)
			o := newRunner(time.Millisecond, &once.Config{Retry: retry})
			var j job
			tick := time.Now().Truncate(time.Microsecond)
			for _, at := range []time.Time{
				tick, tick.Add(time.Microsecond), tick.Add(-time.Hour), tick.Add(time.Hour), // all others than
				tick, tick.Add(999), tick.In(time.FixedZone("", 3600)), tick.Add(-time.Hour).UTC(),
			} {
				if _, err := o.DoAt(t.Context(), key, at, j.run); err != nil {
					t.Error(err)
				}
			}
			if len(j.runs) != 4 {
				t.Errorf("Retry %t: %d runs, want 4", retry, len(j.runs))
			}
			if !j.runs[1].Slot.Equal(tick.Add(time.Microsecond)) {
				t.Errorf("the slot is %s, want %s", j.runs[1].Slot, tick.Add(time.Microsecond))
			}
		}
	})
}

func TestTickThatNobodyRemembersIsRefused(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		o := newRunner(time.Hour, &once.Config{Keep: 2 * time.Hour})
		var j job
		now := time.Now().Round(time.Second)
		for ago, says := range map[time.Duration]string{3 * time.Hour: "older than what is kept", -3 * time.Hour: "further ahead"} {
			ran, err := o.DoAt(t.Context(), "k", now.Add(-ago), j.run)
			if ran || err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("a tick %s ago: %t, %v", ago, ran, err)
			}
		}
		for _, ago := range []time.Duration{time.Hour, -time.Hour} {
			if ran, err := o.DoAt(t.Context(), "k", now.Add(-ago), j.run); !ran || err != nil {
				t.Errorf("a tick %s ago: %t, %v", ago, ran, err)
			}
		}
	})
}

func TestFailedRunsRepeatOnlyWithRetry(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		plain := newRunner(age, nil)
		j := job{err: errors.New("broken")}
		wantDo(t, plain, "k", &j, true)
		wantDo(t, plain, "k", &j, false)

		again := newRunner(age, &once.Config{Retry: true})
		wantDo(t, again, "retried", &j, true)
		wantDo(t, again, "retried", &j, true)
		j.err = nil
		wantDo(t, again, "retried", &j, true)
		wantDo(t, again, "retried", &j, false) // success is final
		if last := j.runs[len(j.runs)-1]; last.Attempt != 3 || !last.Slot.Equal(j.runs[1].Slot) {
			t.Errorf("the last run is %+v, want attempt 3 of one slot", last)
		}
	})
}

// With Retry the lease says that it runs; without, its row.
func TestRunThatIsRunningIsNotStartedAgain(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		for _, retry := range []bool{false, true} {
			key := fmt.Sprint("k ", retry)
			o := newRunner(age, &once.Config{Retry: retry})
			var others job
			ran, err := o.Do(t.Context(), key, func(context.Context, once.Run) error {
				wantDo(t, o, key, &others, false)
				return nil
			})
			if !ran || err != nil || len(others.runs) != 0 {
				t.Errorf("Retry %t: ran %t, %v, and meanwhile %d times", retry, ran, err, len(others.runs))
			}
		}
	})
}

func TestPanicAndGoexitAreFailures(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		for _, retry := range []bool{false, true} {
			o := newRunner(age, &once.Config{Retry: retry})
			for how, end := range map[string]func(){"panic": func() { panic("why") }, "goexit": runtime.Goexit} {
				var why any
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					defer func() { why = recover() }()
					_, _ = o.Do(t.Context(), fmt.Sprint(how, retry), func(context.Context, once.Run) error {
						end()
						return nil
					})
				}()
				<-ended
				if how == "panic" && why != "why" {
					t.Errorf("the panic did not go on: %v", why)
				}
				var j job
				wantDo(t, o, fmt.Sprint(how, retry), &j, retry)
			}
		}
	})
}

func TestCallWhoseContextHasEndedStartsNothing(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		o := newRunner(age, nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		var j job
		ran, err := o.Do(ctx, "k", j.run)
		if ran || !errors.Is(err, context.Canceled) {
			t.Errorf("Do: %t, %v", ran, err)
		}
		if err := o.Run(ctx, "k", j.run); !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
		wantDo(t, o, "k", &j, true)
	})
}

func TestRunEndsWithItsCallersContext(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		for _, retry := range []bool{false, true} {
			key := fmt.Sprint("k ", retry)
			o := newRunner(age, &once.Config{Retry: retry})
			ctx, cancel := context.WithCancel(t.Context())
			ran, err := o.Do(ctx, key, func(ctx context.Context, _ once.Run) error {
				cancel()
				<-ctx.Done()
				return ctx.Err()
			})
			if !ran || !errors.Is(err, context.Canceled) {
				t.Errorf("Retry %t: %t, %v", retry, ran, err)
			}
			var j job
			wantDo(t, o, key, &j, retry) // it is recorded as failed
		}
	})
}

func TestCloseEndsAndAwaitsRuns(t *testing.T) {
	t.Parallel()
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		for _, retry := range []bool{false, true} {
			key := fmt.Sprint("k ", retry)
			o := newRunner(age, &once.Config{First: once.FirstNow, Retry: retry})
			looping := make(chan error, 1)
			var loops job
			go func() { looping <- o.Run(t.Context(), "loop "+key, loops.run) }()
			closed := make(chan error, 1)
			over := false
			ran, err := o.Do(t.Context(), key, func(ctx context.Context, _ once.Run) error {
				go func() { closed <- o.Close(context.Background()) }()
				<-ctx.Done()
				if cause := context.Cause(ctx); !errors.Is(cause, pgxlock.ErrClosed) {
					t.Errorf("the context's cause is %v", cause)
				}
				select {
				case err := <-closed:
					t.Errorf("Close does not wait for the run: %v", err)
				default:
				}
				over = true
				return nil
			})
			if !ran || err != nil {
				t.Errorf("Do: %t, %v", ran, err)
			}
			if err := <-closed; err != nil || !over {
				t.Errorf("Close: %v", err)
			}
			if err := <-looping; !errors.Is(err, pgxlock.ErrClosed) {
				t.Errorf("Run: %v", err)
			}
			for name, err := range map[string]error{"Do": second(o.Do(t.Context(), key, loops.run)), "Run": o.Run(t.Context(), key, loops.run)} {
				if e, ok := errors.AsType[*pgxlock.Error](err); !ok || !errors.Is(err, pgxlock.ErrClosed) || e.Op != "once" || e.Key != key {
					t.Errorf("%s of a closed Runner: %v", name, err)
				}
			}
		}
	})
}

// The run goes on, unrecorded, so that no other process may run the job beside it.
func TestCloseWhoseContextEndsLeavesARunItsLease(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	o, err := once.New(db.Pool, age, &once.Config{Retry: true})
	if err != nil {
		t.Fatal(err)
	}
	others := runnerOn(t, db, age, &once.Config{Retry: true})
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	ran, err := o.Do(t.Context(), "k", func(ctx context.Context, run once.Run) error {
		if err := o.Close(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("Close: %v", err)
		}
		if err := o.Close(t.Context()); !errors.Is(err, context.Canceled) { // what the first one returned
			t.Errorf("the second Close: %v", err)
		}
		if cause := context.Cause(ctx); !errors.Is(cause, pgxlock.ErrClosed) {
			t.Errorf("the context's cause is %v", cause)
		}
		var j job
		wantDo(t, others, "k", &j, false)
		if holder := testkit.Query[string](t, db, "select holder_id from distributed_locks where expires_at > now()"); holder != run.Lock.Holder() {
			t.Errorf("the lease is held by %q", holder)
		}
		return nil
	})
	if !ran || !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("Do: %t, %v", ran, err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestBadInputOfRunsIsNamed(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	local := time.FixedZone("Local", 3600)
	for says, refused := range map[string]struct {
		period time.Duration
		cfg    *once.Config
	}{
		"period is 0s":              {0, nil},
		"period is -1h0m0s":         {-time.Hour, nil},
		"period is 999µs":           {999 * time.Microsecond, nil},
		"period is 1.0000001s":      {time.Second + 100, nil},
		"period is 87624h0m0s":      {age + 24*time.Hour, nil},
		"Offset is -1s":             {time.Hour, &once.Config{Offset: -time.Second}},
		"Offset is 1h0m0s":          {time.Hour, &once.Config{Offset: time.Hour}},
		"Offset is 100ns":           {time.Hour, &once.Config{Offset: 100}},
		"Location is Europe/Berlin": {36 * time.Hour, &once.Config{Location: berlin(t)}},
		"Location \"Local\"":        {24 * time.Hour, &once.Config{Location: local}},
		"Location \"\"":             {24 * time.Hour, &once.Config{Location: time.FixedZone("", 3600)}},
		"Location \"Europe/Rome\"":  {24 * time.Hour, &once.Config{Location: time.FixedZone("Europe/Rome", 3600)}},
		"without Retry":             {time.Hour, &once.Config{TTL: time.Minute}},
		"TTL is 1ms":                {time.Hour, &once.Config{Retry: true, TTL: time.Millisecond}},
		"CatchUp is -1":             {time.Hour, &once.Config{CatchUp: -1}},
		"CatchUp is 1001":           {time.Hour, &once.Config{CatchUp: 1001}},
		"CatchUp is 1000":           {age, &once.Config{CatchUp: 1000}},
		"Keep is 3h0m0s":            {time.Hour, &once.Config{CatchUp: 2, Keep: 3 * time.Hour}},
		"Keep is -1s":               {time.Hour, &once.Config{Keep: -time.Second}},
		"Owner \"*\"":               {time.Hour, &once.Config{Owner: "*"}},
		"Schema \"a\\x00\"":         {time.Hour, &once.Config{Schema: "a\x00"}},
	} {
		_, err := once.New(db.Pool, refused.period, refused.cfg)
		_, inMemory := once.NewMemory(refused.period, refused.cfg)
		for _, err := range []error{err, inMemory} {
			if _, ok := errors.AsType[*pgxlock.Error](err); !ok || !strings.Contains(err.Error(), says) {
				t.Errorf("%v, want that %s", err, says)
			}
		}
	}
	if _, err := once.New(nil, time.Hour, nil); err == nil || !strings.Contains(err.Error(), "the pool is nil") {
		t.Errorf("without a pool: %v", err)
	}
	runners(t, func(t *testing.T, newRunner func(time.Duration, *once.Config) *once.Runner) {
		o := newRunner(time.Hour, nil)
		var j job
		for says, err := range map[string]error{
			"the key is empty":             second(o.Do(t.Context(), "", j.run)),
			"201 characters":               o.Run(t.Context(), strings.Repeat("k", 201), j.run),
			"not valid UTF-8":              second(o.DoAt(t.Context(), "\xff", time.Now().Round(time.Second), j.run)),
			"zero byte":                    second(o.Do(t.Context(), "a\x00", j.run)),
			"a RawKey names an advisory":   second(o.Do(t.Context(), pgxlock.RawKey(1), j.run)),
			"fn is nil":                    second(o.Do(t.Context(), "k", nil)),
			"fn is nil; pass the function": o.Run(t.Context(), "k", nil),
			"tick is the zero time; pass":  second(o.DoAt(t.Context(), "k", time.Time{}, j.run)),
		} {
			if e, ok := errors.AsType[*pgxlock.Error](err); !ok || e.Op != "once" || !strings.Contains(err.Error(), says) {
				t.Errorf("%v, want that %s", err, says)
			}
		}
		if len(j.runs) != 0 {
			t.Error("it ran all the same")
		}
		if ran, err := o.Do(t.Context(), strings.Repeat("ü", 200), j.run); !ran || err != nil {
			t.Errorf("the longest key: %t, %v", ran, err)
		}
	})
}

func berlin(t *testing.T) *time.Location {
	t.Helper()
	return zone(t, "Europe/Berlin")
}

func zone(t *testing.T, name string) *time.Location {
	t.Helper()
	location, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return location
}
