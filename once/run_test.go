package once

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// watchedRuns are the runs of a memory. They note when due is called, and return the errors
// that a test gives them.
type watchedRuns struct {
	runs
	began    time.Time
	asked    []time.Duration // when
	dueFails []error         // the next answers; nil: it is answered
	starts   []error
	finishes []error
}

func (w *watchedRuns) due(wait context.Context, key string, missed int, first First) ([]dueSlot, time.Duration, error) {
	w.asked = append(w.asked, time.Since(w.began))
	if len(w.dueFails) > 0 {
		err := w.dueFails[0]
		if w.dueFails = w.dueFails[1:]; err != nil {
			return nil, 0, err
		}
	}
	return w.runs.due(wait, key, missed, first)
}

func (w *watchedRuns) start(wait context.Context, key string, which which, holder, lease string) (startedRun, bool, error) {
	if len(w.starts) > 0 {
		err := w.starts[0]
		w.starts = w.starts[1:]
		return startedRun{}, false, err
	}
	return w.runs.start(wait, key, which, holder, lease)
}

func (w *watchedRuns) finish(key string, slot time.Time, holder, state, text string) (bool, error) {
	if len(w.finishes) > 0 {
		err := w.finishes[0]
		if len(w.finishes) > 1 {
			w.finishes = w.finishes[1:]
		}
		if err != nil {
			return false, err
		}
	}
	return w.runs.finish(key, slot, holder, state, text)
}

// watch gives a test a Runner in a bubble, at the beginning of a period.
func watch(t *testing.T, period time.Duration, cfg *Config, test func(t *testing.T, r *Runner, w *watchedRuns)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, err := NewMemory(period, cfg)
		if err != nil {
			t.Fatal(err)
		}
		w := &watchedRuns{runs: r.runs, began: time.Now()}
		r.runs = w
		test(t, r, w)
		if err := r.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// Clocks may be set and machines may sleep while Run sleeps.
func TestRunLooksAboutOnceAMinuteWhatIsDue(t *testing.T) {
	watch(t, time.Hour, &Config{First: FirstNow}, func(t *testing.T, r *Runner, w *watchedRuns) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour+30*time.Minute)
		defer cancel()
		var late []time.Duration
		err := r.Run(ctx, "k", func(_ context.Context, run Run) error {
			late = append(late, time.Since(run.Slot))
			return nil
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Run: %v, want %v", err, context.DeadlineExceeded)
		}
		if n := len(w.asked); n < 200 || n > 220 {
			t.Errorf("it looked %d times in 210 minutes", n)
		}
		// Processes do not all ask in the moment when a period begins.
		if len(late) != 4 || late[0] != 0 || slices.Min(late[1:]) == 0 || slices.Max(late) > 100*time.Millisecond {
			t.Errorf("it began %v after the periods", late)
		}
	})
}

// A run of another process may fail, or its process may die.
func TestRunLooksEachTTLAtWhatMayBeTriedAgain(t *testing.T) {
	for what, test := range map[string]struct {
		elsewhere, fails bool
		least, most      int // looks in ten minutes and the periods' beginnings
	}{
		"runs here":      {false, false, 10, 12},
		"fails here":     {false, true, 10 * 60 / 10 * 4 / 5, 10 * 60 / 10 * 4 / 3},
		"runs elsewhere": {true, false, 10 * 60 / 10 * 4 / 5, 10 * 60 / 10 * 4 / 3},
	} {
		t.Run(what, func(t *testing.T) {
			watch(t, time.Hour, &Config{First: FirstNow, Retry: true, TTL: 10 * time.Second}, func(t *testing.T, r *Runner, w *watchedRuns) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
				defer cancel()
				if test.elsewhere {
					go func() {
						_, _ = r.Do(ctx, "k", func(ctx context.Context, _ Run) error { <-ctx.Done(); return ctx.Err() })
					}()
					synctest.Wait()
				}
				w.asked = nil
				_ = r.Run(ctx, "k", func(context.Context, Run) error {
					if test.elsewhere {
						t.Error("it runs twice")
					}
					if test.fails {
						return errors.New("failed")
					}
					return nil
				})
				if n := len(w.asked); n < test.least || n > test.most {
					t.Errorf("it looked %d times, want %d to %d", n, test.least, test.most)
				}
			})
		})
	}
}

func TestRunWaitsForAServerThatIsAwayLongerAndLonger(t *testing.T) {
	backoff := func(attempt int) time.Duration { return time.Duration(attempt+1) * time.Second }
	watch(t, time.Hour, &Config{First: FirstNow, Backoff: backoff}, func(t *testing.T, r *Runner, w *watchedRuns) {
		away := errors.New("away")
		w.dueFails = []error{away, away, away, nil, away, away, pgxlock.ErrSchema}
		ran := 0
		err := r.Run(t.Context(), "k", func(context.Context, Run) error { ran++; return nil })
		if !errors.Is(err, pgxlock.ErrSchema) {
			t.Errorf("Run: %v, want %v", err, pgxlock.ErrSchema)
		}
		var pauses []time.Duration
		for i := 1; i < len(w.asked); i++ {
			pauses = append(pauses, (w.asked[i] - w.asked[i-1]).Truncate(time.Second))
		}
		if want := []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, lookAgain, time.Second, 2 * time.Second}; !slices.Equal(pauses, want) || ran != 1 {
			t.Errorf("it waited %v, want %v, and ran %d times", pauses, want, ran)
		}
	})
}

// A process that was frozen before it starts a run has lost the lease that the start needs.
func TestRunGoesOnWhenALeaseWasLostBeforeTheStart(t *testing.T) {
	watch(t, time.Hour, &Config{Retry: true}, func(t *testing.T, r *Runner, w *watchedRuns) {
		w.starts = []error{&pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: lockerr.StateNotHeld}}
		done := errors.New("done")
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		err := r.Run(ctx, "k", func(context.Context, Run) error { cancel(done); return nil })
		if !errors.Is(err, done) {
			t.Errorf("Run: %v, want %v", err, done)
		}
	})
}

func TestEndOfARunIsRecordedWithinAFewSecondsOrNot(t *testing.T) {
	away := errors.New("away")
	for _, retry := range []bool{false, true} {
		for what, test := range map[string]struct {
			finishes    []error
			least, most time.Duration
			recorded    bool
		}{
			"at once":               {nil, 0, 0, true},
			"soon":                  {[]error{away, away, nil}, 15 * time.Millisecond, 30 * time.Millisecond, true},
			"the server stays away": {[]error{away}, recordPatience, recordPatience + time.Second, false},
			"what does not pass":    {[]error{pgxlock.ErrSchema}, 0, 0, false},
		} {
			t.Run(what+map[bool]string{true: ", Retry"}[retry], func(t *testing.T) {
				watch(t, time.Hour, &Config{Retry: retry}, func(t *testing.T, r *Runner, w *watchedRuns) {
					w.finishes = test.finishes
					ran, err := r.Do(t.Context(), "k", func(context.Context, Run) error { return nil })
					if took := time.Since(w.began); !ran || took < test.least || took > test.most {
						t.Errorf("%t after %s, want %s to %s", ran, took, test.least, test.most)
					}
					if want := test.recorded || !retry; (err == nil) != want { // else nothing depends on it
						t.Errorf("Do: %v", err)
					}
				})
			})
		}
	}
}

func TestMemoryRemembersATickForKeepAndThenForgetsIt(t *testing.T) {
	const keep = 2 * time.Hour
	watch(t, time.Minute, &Config{Keep: keep}, func(t *testing.T, r *Runner, w *watchedRuns) {
		ran := 0
		doAt := func(tick time.Time) {
			t.Helper()
			if _, err := r.DoAt(t.Context(), "k", tick, func(context.Context, Run) error { ran++; return nil }); err != nil {
				t.Error(err)
			}
		}
		ahead := time.Now().Add(keep - time.Minute) // by another clock
		doAt(ahead)
		for range 600 {
			if doAt(time.Now()); !time.Now().After(ahead.Add(keep)) {
				doAt(ahead)
			}
			time.Sleep(time.Minute)
		}
		if n := len(w.runs.(*memoryRuns).known["k"]); ran != 600 || n > 122 { // the one that was ahead is among them
			t.Errorf("600 ticks ran %d times, and %d are remembered", ran, n)
		}
	})
}
