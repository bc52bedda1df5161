package testkit

import (
	"context"
	"slices"
	"sync"

	"github.com/pgxlock/pgxlock"
)

// Saturate makes callers acquire the key all the time until ctx ends, and calls turn while
// one has it.
func Saturate(ctx context.Context, locks *pgxlock.Locker, key string, callers int, turn func()) error {
	var all sync.WaitGroup
	failed := make(chan error, callers)
	for range callers {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := locks.Do(context.WithoutCancel(ctx), key, func(context.Context, *pgxlock.Lock) error {
					turn()
					return nil
				}); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(failed)
	return <-failed
}

// Starved is less than any gets beside all other tests, where notifications are late: until one
// arrives a Locker hands the lock over among its callers for 100 ms, which is a thousand turns.
// Starved for good, one had a 190th of an equal share.
const Starved = 1. / 100

// Share returns which part of an equal share the one had that had the fewest turns.
func Share(turns []int) float64 {
	all := 0
	for _, n := range turns {
		all += n
	}
	return float64(slices.Min(turns)*len(turns)) / float64(all)
}
