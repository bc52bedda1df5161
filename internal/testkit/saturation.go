package testkit

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Saturate makes callers acquire the key all the time until ctx ends, and calls turn while
// one has it.
func Saturate(ctx context.Context, locks *pgxlock.Locker, key string, callers int, turn func() error) error {
	var all sync.WaitGroup
	failed := make(chan error, callers)
	for range callers {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := locks.Do(context.WithoutCancel(ctx), key, func(context.Context, *pgxlock.Lock) error { return turn() }); err != nil {
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

// FairShare is the part of an equal share of the turns that each process gets at least.
const FairShare = 1. / 4

// Shares are counted in windows, which are over when each process came to the lock so often as it
// does in two seconds if it hears of nothing: until a notification arrives, the other ones hand the
// lock over among their callers for 100 ms, however many turns that is. A process that does not
// come at all would make a window as long as the test: it is over after so many turns.
const (
	visitsOfWindow = 20
	turnsOfWindow  = 50_000
	mostWindows    = 5
)

// Shares returns, for each window of the turns, which part of an equal share the one of n had that
// had the fewest. The turns are in their order, each as the number of who had it.
func Shares(turns []byte, n int) (shares []float64) {
	had, visits := make([]int, n), make([]int, n)
	last, length := -1, 0
	for _, turn := range turns {
		who := int(turn)
		if had[who]++; who != last {
			visits[who]++
		}
		last = who
		if length++; slices.Min(visits) < visitsOfWindow && length < turnsOfWindow {
			continue
		}
		shares = append(shares, float64(slices.Min(had)*n)/float64(length))
		clear(had)
		clear(visits)
		last, length = -1, 0
	}
	return shares
}

// UntilFair waits until each of n has had its share in most of the windows that there were, and
// fails the test if that is not so after many: a machine may let one stand still for a window.
func UntilFair(t *testing.T, what string, n int, turns func() []byte) {
	t.Helper()
	var shares []float64
	fair, seen := 0, 0
	pgtest.Until(t, what+": the turns show whether they are shared", func() bool {
		shares = Shares(turns(), n)
		for ; seen < len(shares) && seen < mostWindows && (seen == 0 || 2*fair <= seen); seen++ {
			if shares[seen] >= FairShare {
				fair++
			}
		}
		return seen == mostWindows || 2*fair > seen
	})
	t.Logf("%s: parts of an equal share: %.3f", what, shares[:seen])
	if 2*fair <= seen {
		t.Errorf("%s: in %d of %d windows one had less than a quarter of an equal share: %.3f", what, seen-fair, seen, shares[:seen])
	}
}
