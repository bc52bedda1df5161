package clock

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// errTooLate is the cause of the Deadlines of these tests.
var errTooLate = errors.New("too late")

// A key is that of a value of the parent.
type key struct{}

func started(parent context.Context) *Deadline {
	d := new(Deadline)
	d.Start(context.WithValue(parent, key{}, "value"), time.Minute, errTooLate)
	return d
}

func isDone(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return true
	default:
		return false
	}
}

func wantEnd(t *testing.T, err, cause error, ended ...context.Context) {
	t.Helper()
	for _, c := range ended {
		if got := c.Err(); got != err { //nolint:errorlint // a context returns these two errors themselves
			t.Errorf("Err: %v, want %v", got, err)
		}
		if got := context.Cause(c); !errors.Is(got, cause) || cause == nil && got != nil {
			t.Errorf("cause: %v, want %v", got, cause)
		}
		if isDone(c) != (err != nil) {
			t.Errorf("done: %t", err == nil)
		}
		if v := c.Value(key{}); v != "value" {
			t.Errorf("the parent's value: %v", v)
		}
	}
}

func TestDeadlineEndsWhenItsTimeIsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		read, waits := started(t.Context()), started(t.Context())
		child, cancel := context.WithCancel(waits)
		defer cancel()
		time.Sleep(time.Minute - 1)
		wantEnd(t, nil, nil, waits)
		<-waits.Done()
		wantEnd(t, context.DeadlineExceeded, errTooLate, read, waits)
		<-child.Done()
		wantEnd(t, context.DeadlineExceeded, errTooLate, child)
	})
}

func TestDeadlineEndsWithItsParentAndItsCause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		why := errors.New("enough")
		parent, end := context.WithCancelCause(t.Context())
		read, waits := started(parent), started(parent)
		wantEnd(t, nil, nil, waits)
		end(why)
		<-waits.Done()
		wantEnd(t, context.Canceled, why, read)
		wantEnd(t, context.Canceled, why, waits)
		time.Sleep(time.Hour)
		wantEnd(t, context.Canceled, why, read) // what ended it first counts
	})
}

func TestDeadlineKeepsItsErrorWhenTheParentEndsLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		parent, end := context.WithCancel(t.Context())
		d := started(parent)
		time.Sleep(time.Minute)
		wantEnd(t, context.DeadlineExceeded, errTooLate, d)
		end()
		wantEnd(t, context.DeadlineExceeded, errTooLate, d)
	})
}

func TestDeadlineThatIsStoppedHasEnded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		read, waits := started(t.Context()), started(t.Context())
		wantEnd(t, nil, nil, waits)
		for _, d := range []*Deadline{read, waits} {
			d.Stop()
			wantEnd(t, context.Canceled, context.Canceled, d)
		}
		time.Sleep(time.Hour)
		for _, d := range []*Deadline{read, waits} {
			d.Stop()
			wantEnd(t, context.Canceled, context.Canceled, d) // what ended it first counts
		}
	})
}

func TestDeadlineIsTheEarlierOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for bound, want := range map[time.Duration]time.Duration{time.Second: time.Second, time.Hour: time.Minute} {
			parent, cancel := context.WithTimeout(t.Context(), bound)
			defer cancel()
			if until, ok := started(parent).Deadline(); !ok || time.Until(until) != want {
				t.Errorf("in %s: %t, want %s", time.Until(until), ok, want)
			}
		}
	})
}

// A parentOfItsOwn is a context that the package context does not know.
type parentOfItsOwn struct {
	context.Context
	until time.Time
	asked func() // is called by Done
}

func (p parentOfItsOwn) Deadline() (time.Time, bool) { return p.until, !p.until.IsZero() }

func (p parentOfItsOwn) Done() <-chan struct{} {
	if p.asked != nil {
		p.asked()
	}
	return p.Context.Done()
}

func TestDeadlineEndsItsChildrenBeforeItsParentsCancelReturns(t *testing.T) {
	t.Parallel()
	parent, end := context.WithCancelCause(t.Context())
	child, cancel := context.WithCancel(started(parent))
	defer cancel()
	why := errors.New("enough")
	end(why)
	wantEnd(t, context.Canceled, why, child)

	d := started(t.Context())
	child, cancel = context.WithCancel(d)
	defer cancel()
	d.Stop()
	wantEnd(t, context.Canceled, context.Canceled, child)
}

// The parent's caller sees the parent's error even if both times are over before any timer ran.
func TestDeadlineLeavesAnEarlierEndToItsParent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancelCause(t.Context())
		d := started(parentOfItsOwn{Context: ctx, until: time.Now().Add(time.Second)})
		time.Sleep(time.Hour)
		wantEnd(t, nil, nil, d)
		why := errors.New("late timer")
		end(why)
		synctest.Wait()
		wantEnd(t, context.Canceled, why, d)
	})
}

func TestDeadlineAsksItsParentWithoutAMutex(t *testing.T) {
	t.Parallel()
	d := new(Deadline)
	d.Start(parentOfItsOwn{Context: t.Context(), asked: func() { _ = d.Err() }}, time.Hour, errTooLate)
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		d.Done()
	}()
	select {
	case <-asked:
		d.Stop()
	case <-time.After(15 * time.Minute):
		t.Fatal("the parent's Done, which asks for Err, waits for its own caller")
	}
}

func TestDeadlineIsLikeTheContextOfTheStandardLibrary(t *testing.T) {
	t.Parallel()
	for round := range uint64(300) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(round, 0))
			parent, end := context.WithCancelCause(context.WithValue(t.Context(), key{}, "value"))
			defer end(nil)
			parent, cancel := context.WithTimeoutCause(parent, time.Duration(random.Int64N(int64(2*time.Minute))), errors.New("the parent is late"))
			defer cancel()
			d := new(Deadline)
			d.Start(parent, time.Minute, errTooLate)
			model, stop := context.WithTimeoutCause(parent, time.Minute, errTooLate)
			defer stop()
			ours, theirs := []context.Context{d}, []context.Context{model}
			for range 12 {
				switch random.IntN(8) {
				case 0:
					end(errors.New("enough"))
				case 1:
					d.Stop()
					stop()
				case 2:
					mine, cancel := context.WithCancel(d)
					defer cancel()
					other, cancel := context.WithCancel(model)
					defer cancel()
					ours, theirs = append(ours, mine), append(theirs, other)
				default:
					time.Sleep(time.Duration(random.Int64N(int64(30 * time.Second))))
				}
				for i := range ours {
					wantEnd(t, theirs[i].Err(), context.Cause(theirs[i]), ours[i])
					mine, _ := ours[i].Deadline()
					if other, _ := theirs[i].Deadline(); !mine.Equal(other) {
						t.Errorf("Deadline: %s, want %s", mine, other)
					}
				}
			}
		})
	}
}

func TestDeadlineIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	for range 200 {
		parent, end := context.WithCancel(t.Context())
		d := new(Deadline)
		d.Start(parent, time.Millisecond, errTooLate)
		var using sync.WaitGroup
		for _, use := range []func(){
			d.Stop, end, end, func() { <-d.Done() }, func() { <-d.Done() }, func() { _ = context.Cause(d) },
			func() {
				child, cancel := context.WithCancel(d)
				defer cancel()
				<-child.Done()
			},
		} {
			using.Go(use)
		}
		using.Wait()
		if d.Err() == nil || !isDone(d) {
			t.Error("it has not ended")
		}
	}
}
