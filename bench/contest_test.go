package main

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// sleeping is an op that takes this long.
func sleeping(d time.Duration) op {
	return whole(func(context.Context, int) error { time.Sleep(d); return nil })
}

// held holds a contest between ways that take such times.
func held(t *testing.T, span time.Duration, times map[string]time.Duration) outcome {
	t.Helper()
	c := contest{stage: newStage(nil, 3), span: span}
	for name, d := range times {
		c.ways = append(c.ways, way{name: name, op: sleeping(d)})
	}
	o, err := c.hold(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestRatioIsTheCostOfTheFirstOverThatOfTheSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := held(t, time.Second, map[string]time.Duration{"slow": 30 * time.Millisecond, "fast": 10 * time.Millisecond, "other": time.Millisecond})
		ratios := o.ratios("slow", "fast")
		if len(ratios) != rounds {
			t.Fatalf("there are %d rounds, not %d", len(ratios), rounds)
		}
		for _, r := range ratios {
			if math.Abs(r-3) > 1e-9 {
				t.Fatalf("30 ms over 10 ms is %v", r)
			}
		}
	})
}

func TestSlowContestsHaveFewerRoundsAndAllWaysEquallyMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := held(t, time.Millisecond, map[string]time.Duration{"slow": time.Second, "fast": time.Microsecond})
		for name, slices := range o {
			if len(slices) != leastRounds {
				t.Errorf("%s has %d rounds, not %d", name, len(slices), leastRounds)
			}
		}
	})
}

func TestErrorOfOneWayEndsTheContestAndLeavesNoRatio(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var done int
		c := contest{stage: newStage(nil, 1), span: time.Millisecond, ways: []way{
			{name: "good", op: sleeping(time.Millisecond)},
			{name: "bad", op: whole(func(context.Context, int) error {
				time.Sleep(time.Millisecond)
				if done++; done > 20 { // some rounds after the warm-up
					return broken
				}
				return nil
			})},
		}}
		o, err := c.hold(t.Context())
		if !errors.Is(err, broken) || !strings.HasPrefix(err.Error(), "bad: ") {
			t.Errorf("the error is %v", err)
		}
		if len(o.ratios("good", "bad")) > 0 {
			t.Error("there is a ratio")
		}
	})
}

func TestWaysAreNotFavouredByTheirPlace(t *testing.T) {
	for n := 2; n <= 8; n++ {
		ways := make([]way, n)
		for i := range ways {
			ways[i].name = string(rune('a' + i))
		}
		before := make(map[[2]string]int)
		follows := make(map[[2]string]int)
		begins := make(map[string]int)
		for i := range 2 * n {
			turn := inTurn(ways, i)
			begins[turn[0].name]++
			for j, w := range turn {
				for k, other := range turn[:j] {
					before[[2]string{other.name, w.name}]++
					if k == j-1 {
						follows[[2]string{other.name, w.name}]++
					}
				}
			}
		}
		for _, a := range ways {
			if begins[a.name] != 2 {
				t.Errorf("of %d ways, %s begins %d of %d rounds", n, a.name, begins[a.name], 2*n)
			}
			for _, b := range ways {
				there, back := [2]string{a.name, b.name}, [2]string{b.name, a.name}
				if a.name != b.name && (before[there] != n || follows[there] != follows[back]) {
					t.Errorf("of %d ways, %v is the order %d times and follows %d times, %v %d and %d",
						n, there, before[there], follows[there], back, before[back], follows[back])
				}
			}
		}
	}
}
