package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
)

// Tests of Runner.Run. Those of its times run in bubbles, where a year takes no time.

// inBubble gives a Runner in memory to a test, and ends its Run calls.
func inBubble(t *testing.T, period time.Duration, cfg *once.Config, test func(t *testing.T, ctx context.Context, o *once.Runner)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		o, err := once.NewMemory(period, cfg)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		test(t, ctx, o)
		cancel()
		if err := o.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

func TestRunRunsOnceInEachPeriodOverAllWhoCallIt(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Hour, &once.Config{First: once.FirstNow}, func(t *testing.T, ctx context.Context, o *once.Runner) {
		time.Sleep(20 * time.Minute) // in the middle of one
		began := time.Now()
		var mu sync.Mutex
		ran := map[time.Time]time.Duration{} // slots, and how late
		var all sync.WaitGroup
		for range 5 {
			all.Go(func() {
				err := o.Run(ctx, "k", func(_ context.Context, run once.Run) error {
					mu.Lock()
					defer mu.Unlock()
					if _, twice := ran[run.Slot]; twice {
						t.Errorf("%s ran twice", run.Slot)
					}
					ran[run.Slot] = time.Since(run.Slot)
					return errors.New("which must not end Run")
				})
				if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
		}
		const hours = 24
		time.Sleep(hours * time.Hour)
		mu.Lock()
		defer mu.Unlock()
		if len(ran) != hours+1 {
			t.Errorf("%d runs in %d hours and one that had begun", len(ran), hours)
		}
		for slot, late := range ran {
			if late < 0 || slot.After(began) && late > 200*time.Millisecond {
				t.Errorf("the run of %s began %s after it", slot, late)
			}
		}
	})
}

func TestRunFollowsTheClocksOfItsLocation(t *testing.T) {
	t.Parallel()
	inBubble(t, 24*time.Hour, &once.Config{First: once.FirstNow, Location: berlin(t), Offset: 150 * time.Minute}, func(t *testing.T, ctx context.Context, o *once.Runner) {
		var slots []string
		for _, from := range []time.Time{time.Date(2000, 3, 24, 12, 0, 0, 0, time.UTC), time.Date(2000, 10, 27, 12, 0, 0, 0, time.UTC)} {
			time.Sleep(time.Until(from))
			days, cancel := context.WithTimeout(ctx, 3*24*time.Hour)
			_ = o.Run(days, "k", func(_ context.Context, run once.Run) error {
				slots = append(slots, run.Slot.Format("Jan 02 15:04 MST"))
				return nil
			})
			cancel()
		}
		if got, want := strings.Join(slots, ", "), "Mar 24 02:30 CET, Mar 25 02:30 CET, Mar 26 03:30 CEST, Mar 27 02:30 CEST, "+
			"Oct 27 02:30 CEST, Oct 28 02:30 CEST, Oct 29 02:30 CET, Oct 30 02:30 CET"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

// The work takes as long as three periods and a half.
func TestMissedPeriodsAreSkippedOrRunLate(t *testing.T) {
	t.Parallel()
	for catchUp, want := range []string{"0 +0, 3 +30, 4 +0, 5 +0", "0 +0, 2 +90, 3 +30, 4 +0, 5 +0", "0 +0, 1 +150, 2 +90, 3 +30, 4 +0, 5 +0", "0 +0, 1 +150, 2 +90, 3 +30, 4 +0, 5 +0"} {
		t.Run(fmt.Sprint("CatchUp ", catchUp), func(t *testing.T) {
			inBubble(t, time.Hour, &once.Config{First: once.FirstNow, CatchUp: catchUp}, func(t *testing.T, ctx context.Context, o *once.Runner) {
				began := time.Now() // 2000-01-01 00:00 UTC
				var mu sync.Mutex
				var runs []string
				go func() {
					_ = o.Run(ctx, "k", func(_ context.Context, run once.Run) error {
						mu.Lock()
						runs = append(runs, fmt.Sprintf("%.0f +%.0f", run.Slot.Sub(began).Hours(), time.Since(run.Slot).Minutes()))
						first := len(runs) == 1
						mu.Unlock()
						if first {
							time.Sleep(210 * time.Minute)
						}
						return nil
					})
				}()
				time.Sleep(5*time.Hour + 30*time.Minute)
				mu.Lock()
				defer mu.Unlock()
				if got := strings.Join(runs, ", "); got != want {
					t.Errorf("got %s, want %s", got, want)
				}
			})
		})
	}
}

func TestRunTriesAgainWhatFailedOnlyWithRetry(t *testing.T) {
	t.Parallel()
	for _, retry := range []bool{false, true} {
		cfg := &once.Config{First: once.FirstNow, Retry: retry}
		if retry {
			cfg.TTL = time.Minute
		}
		inBubble(t, time.Hour, cfg, func(t *testing.T, ctx context.Context, o *once.Runner) {
			var mu sync.Mutex
			tries := map[time.Time][]time.Duration{}
			for range 2 {
				go func() {
					_ = o.Run(ctx, "k", func(_ context.Context, run once.Run) error {
						mu.Lock()
						defer mu.Unlock()
						tries[run.Slot] = append(tries[run.Slot], time.Since(run.Slot))
						if len(tries[run.Slot]) < 3 {
							return errors.New("not yet")
						}
						return nil
					})
				}()
			}
			time.Sleep(3*time.Hour - time.Minute)
			mu.Lock()
			defer mu.Unlock()
			want := 1
			if retry {
				want = 3
			}
			for slot, at := range tries {
				if len(at) != want || at[len(at)-1] > 4*time.Minute {
					t.Errorf("Retry %t: %s was tried %v after it began, want %d times", retry, slot, at, want)
				}
			}
			if len(tries) != 3 {
				t.Errorf("Retry %t: %d periods", retry, len(tries))
			}
		})
	}
}

func TestPanicEndsRun(t *testing.T) {
	t.Parallel()
	inBubble(t, time.Hour, &once.Config{First: once.FirstNow}, func(t *testing.T, ctx context.Context, o *once.Runner) {
		defer func() {
			if why := recover(); why != "why" {
				t.Errorf("recovered %v", why)
			}
		}()
		_ = o.Run(ctx, "k", func(context.Context, once.Run) error { panic("why") })
	})
}

// Rows that a server has from earlier, and what is due after them.
func TestOnlyWhatWasMissedSinceTheFirstRunIsRunLate(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	slot := testkit.Query[time.Time](t, db, "select pgxlock_slot(now(), '10 days', '0', 'UTC', 0)")
	type row struct {
		ago          int
		state, lease string
	}
	runners := map[bool]*once.Runner{}
	for _, retry := range []bool{false, true} {
		runners[retry] = runnerOn(t, db, 240*time.Hour, &once.Config{First: once.FirstNow, CatchUp: 5, Retry: retry})
	}
	for key, test := range map[string]struct {
		rows           []row
		once, retrying string // how many periods ago
	}{
		"new":                   {nil, "0", "0"},
		"gaps":                  {[]row{{7, "succeeded", ""}, {3, "running", ""}}, "5 4 2 1 0", "5 4 2 1 0"},
		"failed":                {[]row{{2, "succeeded", ""}, {1, "failed", ""}}, "0", "1 0"},
		"crashed":               {[]row{{1, "running", ""}}, "0", "0"},
		"crashed under a lease": {[]row{{1, "running", "its own"}}, "0", "1 0"},
		"withdrawn":             {[]row{{1, "withdrawn", ""}}, "1 0", "1 0"},
	} {
		for _, retry := range []bool{false, true} {
			key, want := fmt.Sprint(key, retry), test.once
			if retry {
				want = test.retrying
			}
			for _, r := range test.rows {
				began := slot.Add(-240 * time.Hour * time.Duration(r.ago))
				if r.lease != "" {
					r.lease = "run:" + key + "@" + began.UTC().Format(time.RFC3339)
				}
				db.Exec(t, `insert into pgxlock_runs (run_key, slot, state, attempt, holder, lease, started_at, keep_until)
					values ($1, $2, $3, 1, 'x', nullif($4, ''), now(), 'infinity')`, key, began, r.state, r.lease)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var got []string
			err := runners[retry].Run(ctx, key, func(_ context.Context, run once.Run) error {
				ago := int(slot.Sub(run.Slot) / (240 * time.Hour))
				if got = append(got, fmt.Sprint(ago)); ago == 0 {
					cancel()
				}
				return nil
			})
			if !errors.Is(err, context.Canceled) || strings.Join(got, " ") != want {
				t.Errorf("%s: ran %v periods ago, want %s; %v", key, got, want, err)
			}
			cancel()
		}
	}
}

// collect starts Run, and sends what it runs.
func collect(t *testing.T, o *once.Runner, key string) <-chan once.Run {
	t.Helper()
	runs := make(chan once.Run, 1000)
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		ended <- o.Run(ctx, key, func(_ context.Context, run once.Run) error {
			runs <- run
			return nil
		})
		close(runs)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return runs
}

// The server's clock says when.
func TestRunIsNeverEarlyByTheServersClock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	const period = 200 * time.Millisecond
	runs := collect(t, runnerOn(t, db, period, nil), "k")
	for range 6 {
		<-runs
	}
	if early := testkit.Query[int](t, db, "select count(*) from pgxlock_runs where started_at < slot"); early != 0 {
		t.Errorf("%d runs began before their period", early)
	}
}

func TestRunOutlivesTheServersRestartAndCrash(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	runs := collect(t, runnerOn(t, db, 100*time.Millisecond, nil), "k")
	last := time.Time{}
	for name, stop := range map[string]func() error{"restart": func() error { return nil }, "crash": server.Crash} {
		<-runs
		if err := errors.Join(stop(), server.Restart(t.Context())); err != nil {
			t.Fatal(err)
		}
		db.Pool.Reset()
		back := testkit.Query[time.Time](t, db, "select clock_timestamp()")
		for run := range runs {
			if !run.Slot.After(last) {
				t.Errorf("%s ran after %s", run.Slot, last)
			}
			if last = run.Slot; last.After(back) {
				break
			}
		}
		if !last.After(back) {
			t.Fatalf("it did not go on after a %s", name)
		}
	}
}

func TestRunEndsWithWhatDoesNotPass(t *testing.T) {
	t.Parallel()
	var j job
	if err := runnerOn(t, pgtest.New(t), time.Hour, nil).Run(t.Context(), "k", j.run); !errors.Is(err, pgxlock.ErrSchema) {
		t.Errorf("without the migrations: %v", err)
	}
	db := testkit.Migrated(t)
	_, app := login(t, db)
	err := runnerOn(t, app, time.Hour, nil).Run(t.Context(), "k", j.run)
	if err == nil || !strings.Contains(err.Error(), "42501") {
		t.Errorf("without rights: %v", err)
	}
}
