package locktesting_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/locktesting"
)

// exampleTB is what the parameter t of a test is in a program: an example has none.
type exampleTB struct {
	testing.TB
	cleanup func()
}

func (t *exampleTB) Helper()          {}
func (t *exampleTB) Cleanup(f func()) { t.cleanup = f }

// work is a program's code, which takes any Locker: it works until its lock is lost.
func work(ctx context.Context, locks *pgxlock.Locker, working chan<- struct{}) error {
	return locks.Do(ctx, "job", func(ctx context.Context, _ *pgxlock.Lock) error {
		close(working)
		select {
		case <-ctx.Done():
			fmt.Println("stopped by a loss:", errors.Is(context.Cause(ctx), pgxlock.ErrLost))
			return context.Cause(ctx)
		case <-time.After(time.Hour):
			return nil
		}
	})
}

// A worker stops when its lock is lost, and the next one begins.
func Example() {
	t := &exampleTB{} // in a test: its *testing.T
	locks, control := locktesting.New(t, nil)
	defer t.cleanup()

	working, stopped := make(chan struct{}), make(chan error)
	go func() { stopped <- work(context.Background(), locks, working) }()
	<-working

	control.Lose("job", fmt.Errorf("%w by an operator", pgxlock.ErrEvicted))
	err := <-stopped
	fmt.Println(err)
	fmt.Println("by an eviction:", errors.Is(err, pgxlock.ErrEvicted))

	lock, err := locks.TryAcquire(context.Background(), "job")
	fmt.Println("the next one has token", lock.Token(), err)
	// Output:
	// stopped by a loss: true
	// pgxlock: hold "job": lock lost: pgxlock: evicted by an operator
	// by an eviction: true
	// the next one has token 2 <nil>
}
