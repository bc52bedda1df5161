package main

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestPercentilesAreTheTimesWithinWhichSoManyOperationsEnded(t *testing.T) {
	l := newLatencies(10)
	for i := range 1000 { // 1 to 1000 ms, of all workers
		l.note(i%10, 1, time.Duration(i+1)*time.Millisecond)
	}
	if err := l.gather(); err != nil {
		t.Fatal(err)
	}
	if err := l.gather(); err != nil { // nothing counts twice
		t.Fatal(err)
	}
	if n := l.all.TotalCount(); n != 1000 {
		t.Errorf("%d operations", n)
	}
	p := l.percentiles()
	for _, c := range []struct{ got, want time.Duration }{
		{p.p50, 500 * time.Millisecond}, {p.p99, 990 * time.Millisecond}, {p.p999, 999 * time.Millisecond},
	} {
		if off := c.got - c.want; off < -c.want/500 || off > c.want/500 {
			t.Errorf("%s instead of %s", c.got, c.want)
		}
	}
}

func TestSeveralOperationsInARowCountEach(t *testing.T) {
	l := newLatencies(1)
	l.note(0, 32, 32*time.Millisecond)
	if err := l.gather(); err != nil {
		t.Fatal(err)
	}
	if n, p := l.all.TotalCount(), l.percentiles(); n != 32 || p.p99.Round(10*time.Microsecond) != time.Millisecond {
		t.Errorf("%d operations of %s", n, p.p99)
	}
}

func TestWayHasThePercentilesOfItsOwnOperations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := contest{stage: newStage(nil, 3), span: time.Second, ways: []way{
			{name: "slow", op: sleeping(30 * time.Millisecond)}, {name: "fast", op: sleeping(10 * time.Millisecond)},
		}}
		o, err := c.hold(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range []time.Duration{30 * time.Millisecond, 10 * time.Millisecond} {
			w := c.ways[i]
			if p := w.took.percentiles(); p.p50.Round(time.Millisecond) != want || p.p999.Round(time.Millisecond) != want {
				t.Errorf("%s: %+v", w.name, p)
			}
			n := 0
			for _, s := range o[w.name] {
				n += s.n
			}
			if int64(n) != w.took.all.TotalCount() {
				t.Errorf("%s: %d operations count, and %d have a time", w.name, n, w.took.all.TotalCount())
			}
		}
	})
}
