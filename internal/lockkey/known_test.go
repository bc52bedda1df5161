package lockkey

import (
	"fmt"
	"math"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestKnownLockIsForgottenWhenItsTimeIsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var k Known[Name]
		want := func(when string, name Name, want bool) {
			t.Helper()
			if got := k.Has(name); got != want {
				t.Errorf("%s: %v is known: %t", when, name, got)
			}
		}
		a, pair, lease := Name{ID: ID{Number: 7}}, Name{ID: ID{Number: 7, Pair: true}}, Name{Key: "7"}
		want("before the first", Name{}, false)
		k.Add(a)
		for _, other := range []Name{{}, pair, lease} {
			want("of another lock", other, false)
		}
		k.Forget(a, time.Second)
		want("after Forget", a, true)
		time.Sleep(time.Second)
		want("a second later", a, false)
		k.Add(a)
		want("added again", a, true)
		k.Add(lease)
		k.Forget(lease, 0)
		want("forgotten at once", lease, false)
		time.Sleep(time.Hour)
		want("that stays", a, true)
	})
}

func TestKnownLocksTakeNoRoomForWhatTheyForgot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var k Known[ID]
		for i := range int64(5) {
			k.Add(ID{Number: -i})
		}
		for i := range int64(10_000) {
			k.Add(ID{Number: i + 1})
			k.Forget(ID{Number: i + 1}, time.Second)
			time.Sleep(100 * time.Millisecond)
		}
		if n := len(k.table.Load().slots); n > 64 {
			t.Errorf("%d slots for the 15 locks that it has at a time", n)
		}
		for i := range int64(5) {
			if !k.Has(ID{Number: -i}) {
				t.Errorf("%d is lost", -i)
			}
		}
	})
}

func TestKnownLocksAreReadWhileTheyChange(t *testing.T) {
	t.Parallel()
	var k Known[Name]
	stays := Name{Key: "stays"}
	k.Add(stays)
	done := make(chan struct{})
	var reading sync.WaitGroup
	for range 2 {
		reading.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				if !k.Has(stays) {
					t.Error("a lock that stays is not known")
					return
				}
				if k.Has(Name{Key: "never", ID: ID{Number: int64(n)}}) {
					t.Error("a lock is known that was never added")
					return
				}
			}
		})
	}
	for i := range 50_000 {
		name := Name{Key: strconv.Itoa(i % 1000)}
		k.Add(name)
		k.Forget(name, time.Duration(i%2)*time.Millisecond)
	}
	close(done)
	reading.Wait()
}

func TestNameIsParsedFromItsKindAndText(t *testing.T) {
	t.Parallel()
	for _, name := range []Name{
		{ID: ID{Number: 0}},
		{ID: ID{Number: math.MaxInt64}},
		{ID: ID{Number: math.MinInt64}},
		{ID: ID{Number: -1, Pair: true}},
		{Key: "k"},
		{Key: "a:b"},
		{Key: "0"},
	} {
		if got, ok := ParseName(fmt.Sprintf("%d:%s", name.Kind(), name.Text())); !ok || got != name {
			t.Errorf("of %v: %v, %t", name, got, ok)
		}
	}
	for _, text := range []string{
		"", ":", "0", "0:", "1", "1:", "1:-", "1:+1", "1: 1", "1:1 ", "1:x", "2:1,2", "3:1", "01:1", "-1:1", "evict", "1:1:1",
		"1:9223372036854775808", "1:-9223372036854775809", "1:99999999999999999999", "1:18446744073709551617",
	} {
		if got, ok := ParseName(text); ok {
			t.Errorf("%q is taken for %v", text, got)
		}
	}
}

// Not parallel: AllocsPerRun counts the allocations of all goroutines.
func TestForgedNameAllocatesNothing(t *testing.T) {
	var names Known[Name]
	var ids Known[ID]
	names.Add(Name{Key: "k"})
	ids.Add(ID{Number: 1})
	for _, text := range []string{"1:2", "0:order", "1:99999999999999999999", "2:x"} {
		if n := testing.AllocsPerRun(1000, func() {
			name, _ := ParseName(text)
			if names.Has(name) || ids.Has(name.ID) {
				t.Error("it is known")
			}
		}); n != 0 {
			t.Errorf("%q costs %v allocations", text, n)
		}
	}
}
