package once

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// "Each night at 3", deployed for the first time at 18:55.
func TestRunBeginsWithTheNextPeriodUnlessFirstIsNow(t *testing.T) {
	t.Parallel()
	for first, want := range map[First]string{"": "Jan 02 03:00, Jan 03 03:00", FirstNext: "Jan 02 03:00, Jan 03 03:00", FirstNow: "Jan 01 18:55, Jan 02 03:00, Jan 03 03:00"} {
		for _, retry := range []bool{false, true} {
			t.Run(string(first)+map[bool]string{true: " with Retry"}[retry], func(t *testing.T) {
				watch(t, day, &Config{Offset: 3 * time.Hour, First: first, Retry: retry, CatchUp: 3}, func(t *testing.T, r *Runner, _ *watchedRuns) {
					time.Sleep(18*time.Hour + 55*time.Minute)
					ctx, cancel := context.WithTimeout(t.Context(), 48*time.Hour)
					defer cancel()
					var ran []string
					for range 3 { // restarts do not make it new again
						inner, cancel := context.WithTimeout(ctx, 16*time.Hour)
						_ = r.Run(inner, "k", func(context.Context, Run) error {
							ran = append(ran, time.Now().UTC().Truncate(time.Minute).Format("Jan 02 15:04"))
							return nil
						})
						cancel()
					}
					if got := strings.Join(ran, ", "); got != want {
						t.Errorf("it ran %s, want %s", got, want)
					}
				})
			})
		}
	}
}

// A call of Do says that the job is to run now.
func TestDoRunsAtItsFirstCallUnlessFirstIsNext(t *testing.T) {
	t.Parallel()
	for _, retry := range []bool{false, true} {
		for first, want := range map[First]string{"": "true false", FirstNow: "true false", FirstNext: "false true"} {
			t.Run(string(first)+map[bool]string{true: " with Retry"}[retry], func(t *testing.T) {
				watch(t, day, &Config{First: first, Retry: retry}, func(t *testing.T, r *Runner, _ *watchedRuns) {
					do := func() string {
						ran, err := r.Do(t.Context(), "k", func(context.Context, Run) error { return nil })
						if err != nil {
							t.Error(err)
						}
						return map[bool]string{true: "true", false: "false"}[ran]
					}
					got := do()
					if first != FirstNext {
						got += " " + do()
					} else if again := do(); again != "false" {
						t.Errorf("again in the period that was under way: %s", again)
					} else {
						time.Sleep(day)
						got += " " + do()
					}
					if got != want {
						t.Errorf("it ran %s, want %s", got, want)
					}
				})
			})
		}
	}
}

func TestDoRunsInAPeriodThatRunHasSkipped(t *testing.T) {
	watch(t, day, nil, func(t *testing.T, r *Runner, _ *watchedRuns) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_ = r.Run(ctx, "k", func(context.Context, Run) error { t.Error("Run runs at its first start"); return nil })
		if ran, err := r.Do(t.Context(), "k", func(_ context.Context, run Run) error {
			if run.Attempt != 1 {
				t.Errorf("attempt %d", run.Attempt)
			}
			return nil
		}); !ran || err != nil {
			t.Errorf("Do in a period that Run has skipped: %t, %v", ran, err)
		}
	})
}

func TestUnknownFirstIsRefused(t *testing.T) {
	t.Parallel()
	if _, err := NewMemory(day, &Config{First: "later"}); err == nil || !strings.Contains(err.Error(), `once.Config.First is "later"; use once.FirstNow or once.FirstNext`) {
		t.Error(err)
	}
}

func TestTicksThatNoScheduleSaysAreRefused(t *testing.T) {
	t.Parallel()
	r, err := NewMemory(time.Minute, nil)
	if err != nil {
		t.Fatal(err)
	}
	clock := time.Now()
	for clock.Nanosecond() == 0 {
		clock = time.Now()
	}
	for says, tick := range map[string]time.Time{
		"tick is the zero time; pass the time that the scheduler calls for": {},
		"its year is 57000; is it in the right unit?":                       time.Date(57000, 1, 1, 0, 0, 0, 0, time.UTC),
		"its year is -1; is it in the right unit?":                          time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC),
		"round time.Now() to the distance between two ticks, or use Do":     clock,
		"another tick in each process":                                      clock.Add(time.Hour),
		"older than what is kept, 168h0m0s":                                 time.Unix(0, 0),
		"further ahead than runs are kept, 168h0m0s":                        time.Now().Round(time.Hour).AddDate(0, 0, 8),
	} {
		ran, err := r.DoAt(t.Context(), "k", tick, func(context.Context, Run) error { return nil })
		refused, typed := errors.AsType[*TickError](err)
		if ran || !typed || !refused.Tick.Equal(tick) || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "tick is ") {
			t.Errorf("%s: %t, %v; want that %s", tick, ran, err, says)
		}
	}
	// What schedulers name: a whole second, although it comes of a clock reading, in any zone.
	whole := clock.Add(-time.Duration(clock.Nanosecond()))
	for i, tick := range []time.Time{clock.Round(0), clock.Round(time.Minute), whole, whole.In(time.FixedZone("", 3600)), clock.UTC().Truncate(time.Millisecond)} {
		if _, err := r.DoAt(t.Context(), string(rune('a'+i)), tick, func(context.Context, Run) error { return nil }); err != nil {
			t.Errorf("%s: %v", tick, err)
		}
	}
}
