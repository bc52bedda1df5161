package main

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// spreadBy is the calm of a floor whose quartiles differ by this share.
func spreadBy(percent time.Duration) calm {
	var floor []time.Duration
	for _, d := range []time.Duration{100 - percent, 100 - percent/2, 100, 100 + percent/2, 100 + 10*percent} {
		floor = append(floor, d*time.Microsecond)
	}
	return calmOf(floor)
}

func TestRunIsQuietIfTheFloorsQuartilesDifferByLessThanFivePercent(t *testing.T) {
	for percent, want := range map[time.Duration]bool{0: true, 2: true, 4: true, 6: false, 50: false} {
		c := spreadBy(percent)
		if c.quiet() != want {
			t.Errorf("a difference of %d %% is quiet: %t", percent, c.quiet())
		}
		if said := !strings.Contains(c.String(), "not quiet"); said != want {
			t.Errorf("a difference of %d %% is called %s", percent, c)
		}
	}
	if c := spreadBy(20); c.low != 90*time.Microsecond || c.median != 100*time.Microsecond || c.top != 110*time.Microsecond {
		t.Errorf("the quartiles are %+v", c)
	}
}

func TestRunsAreRepeatedUntilOneIsQuiet(t *testing.T) {
	for _, test := range []struct {
		percents   []time.Duration
		most       int
		runs, best int
	}{
		{[]time.Duration{2}, 5, 1, 0},
		{[]time.Duration{20, 10, 4, 2}, 5, 3, 2},
		{[]time.Duration{20, 10, 40, 8, 60, 2}, 5, 5, 3},
		{[]time.Duration{20, 2}, 1, 1, 0},
	} {
		done := 0
		r, runs, err := quietest(test.most, func() (report, error) {
			done++
			return report{calm: spreadBy(test.percents[done-1])}, nil
		})
		if err != nil || runs != test.runs || done != runs || r.calm != spreadBy(test.percents[test.best]) {
			t.Errorf("%v: %d runs, the quietest is %v: %v", test, runs, r.calm, err)
		}
	}
	broken := errors.New("broken")
	if _, _, err := quietest(5, func() (report, error) { return report{}, broken }); !errors.Is(err, broken) {
		t.Errorf("the error is %v", err)
	}
}
