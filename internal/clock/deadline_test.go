package clock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pgxlock/pgxlock/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var errTooLate = errors.New("too late")

// tooLate is the cause of the Deadlines of these tests.
func tooLate() context.Context {
	ctx, end := context.WithCancelCause(context.Background())
	end(errTooLate)
	return ctx
}

// A key is that of a value of the parent.
type key struct{}

func started(parent context.Context) *Deadline {
	d := new(Deadline)
	d.Start(context.WithValue(parent, key{}, "value"), tooLate(), time.Minute)
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

func wantEnd(c context.Context, t *testing.T, err, cause error) {
	t.Helper()
	if got := c.Err(); got != err { //nolint:errorlint // a context returns these two errors themselves
		t.Errorf("Err: %v, want %v", got, err)
	}
	if got := context.Cause(c); !errors.Is(got, cause) || cause == nil && got != nil {
		t.Errorf("cause: %v, want %v", got, cause)
	}
	if isDone(c) != (err != nil) {
		t.Errorf("done: %t", err == nil)
	}
}

func TestDeadlineEndsWhenItsTimeIsOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		read, waits := started(t.Context()), started(t.Context())
		child, cancel := context.WithCancel(waits)
		defer cancel()
		time.Sleep(time.Minute - 1)
		wantEnd(waits, t, nil, nil)
		<-waits.Done()
		for _, d := range []context.Context{read, waits} {
			wantEnd(d, t, context.DeadlineExceeded, errTooLate)
			if v := d.Value(key{}); v != "value" {
				t.Errorf("the parent's value: %v", v)
			}
		}
		<-child.Done()
		wantEnd(child, t, context.DeadlineExceeded, errTooLate)
	})
}

func TestDeadlineEndsWithItsParentAndItsCause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		why := errors.New("enough")
		parent, end := context.WithCancelCause(t.Context())
		read, waits := started(parent), started(parent)
		wantEnd(waits, t, nil, nil)
		end(why)
		<-waits.Done()
		wantEnd(read, t, context.Canceled, why)
		wantEnd(waits, t, context.Canceled, why)
		time.Sleep(time.Hour)
		wantEnd(read, t, context.Canceled, why) // what ended it first counts
	})
}

func TestDeadlineKeepsItsErrorWhenTheParentEndsLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		parent, end := context.WithCancel(t.Context())
		d := started(parent)
		time.Sleep(time.Minute)
		wantEnd(d, t, context.DeadlineExceeded, errTooLate)
		end()
		wantEnd(d, t, context.DeadlineExceeded, errTooLate)
	})
}

func TestDeadlineThatIsStoppedHasEnded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		read, waits := started(t.Context()), started(t.Context())
		wantEnd(waits, t, nil, nil)
		for _, d := range []*Deadline{read, waits} {
			d.Stop()
			wantEnd(d, t, context.Canceled, context.Canceled)
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
