package pgxlock

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A method that is called on a nil pointer, and a call with a nil context, return an
// error that says so before they look at anything else. A nil Lock is not held: its Lost
// is closed, its Context has ended, and the rest is zero.

// missing returns what keeps a method from doing anything: a nil receiver, or a nil
// context.
func missing[T any](ctx context.Context, receiver *T) error {
	if receiver != nil && ctx != nil {
		return nil
	}
	return cmp.Or(missingReceiver(receiver), lockerr.MissingContext(ctx))
}

func missingReceiver[T any](receiver *T) error {
	if receiver != nil {
		return nil
	}
	remedy := "make one with New" // and the name of the type
	name := strings.TrimPrefix(fmt.Sprintf("%T", receiver), "*pgxlock.")
	switch any(receiver).(type) {
	case *Lock:
		remedy = "it is there only if Acquire returned no error"
	case *Locker:
		remedy = "make one with NewLeaseLocker, NewAdvisoryLocker or NewMemoryLocker"
	case *Semaphore:
		remedy = "make one with Locker.Semaphore"
	default:
		remedy += name
	}
	return fmt.Errorf("the %s is nil; %s", name, remedy)
}

// endedContext returns a context that has ended because of err.
func endedContext(err error) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(err)
	return ctx, func() {}
}
