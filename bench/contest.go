package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// An op is one way to do a thing, which each worker, counted from 0, does again
// and again. It returns how many operations it did and how long they took; what
// does not belong to them it leaves out.
type op func(ctx context.Context, worker int) (n int, took time.Duration, err error)

// whole is an op of one operation, all of which counts.
func whole(do func(ctx context.Context, worker int) error) op {
	return func(ctx context.Context, worker int) (int, time.Duration, error) {
		begun := time.Now()
		err := do(ctx, worker)
		return 1, time.Since(begun), err
	}
}

// A slice is what all workers did in one short run of an op.
type slice struct {
	n    int           // operations that count
	took time.Duration // for them, all workers' times together
	all  int           // with those that do not count

	allocs uint64 // by this process meanwhile
	used   usage  // meanwhile
}

// cost is the mean time of an operation, as a worker sees it.
func (s slice) cost() time.Duration { return s.took / time.Duration(s.n) }

// allocsEach is how many allocations an operation makes.
func (s slice) allocsEach() float64 { return float64(s.allocs) / float64(s.all) }

// leastOps is how many operations a slice has for each worker: where they take
// long, a slice of fewer would show how a crowd starts and not how it works.
const leastOps = 4

// run makes a slice that takes span, or longer if that was too short for the
// workers. The first error ends it.
func (w way) run(ctx context.Context, workers int, span time.Duration) (slice, error) {
	if w.took == nil {
		w.took = newLatencies(workers)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		crew     sync.WaitGroup
		counting atomic.Int64 // workers that still count
		done     atomic.Int64
		mu       sync.Mutex
		sum      slice
	)
	counting.Store(int64(workers))
	used, err := countUsage(w.server)
	if err != nil {
		return slice{}, err
	}
	before := allocations()
	begun := time.Now()
	for worker := range workers {
		crew.Go(func() {
			var mine slice
			// Who is through goes on until the last one is: no operation that
			// counts has fewer beside it than the others.
			counts := true
			for ctx.Err() == nil && counting.Load() > 0 {
				n, took, err := w.op(ctx, worker)
				if err != nil {
					cancel(err)
					return
				}
				mine.all += n
				if !counts {
					continue
				}
				mine.n += n
				mine.took += took
				w.took.note(worker, n, took)
				if done.Add(int64(n)) >= int64(workers*leastOps) && time.Since(begun) >= span {
					counts = false
					counting.Add(-1)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			sum.n += mine.n
			sum.took += mine.took
			sum.all += mine.all
		})
	}
	crew.Wait()
	sum.allocs = allocations() - before
	sum.used, err = used()
	return sum, errors.Join(context.Cause(ctx), err, w.took.gather())
}

// allocations is how many objects this process has allocated so far.
func allocations() uint64 {
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.Mallocs
}

const (
	// rounds is how many slices each way has.
	rounds = 32

	// leastRounds is how many it has where they take much longer than they should.
	leastRounds = 8

	// patience is by how much, before that is so.
	patience = 2
)

// A way is one of several to do the same thing.
type way struct {
	name string // as in a ratio
	op
	server int        // the process that it asks, with its children; 0: none is counted
	took   *latencies // of all operations that count
}

// A contest is between ways to do the same thing.
type contest struct {
	stage *stage
	ways  []way
	span  time.Duration // of one slice
}

func (c contest) has(name string) bool {
	return slices.ContainsFunc(c.ways, func(w way) bool { return w.name == name })
}

// An outcome is what each way showed, by its name, in one round after the other.
type outcome map[string][]slice

// hold lets all ways take turns. Whatever disturbs the machine for longer than a
// round hits all of them, and what grows or shrinks meanwhile, or what a way
// leaves behind for the next one, favours each of them equally often, because
// they swap places.
func (c contest) hold(ctx context.Context) (outcome, error) {
	if err := c.warmUp(ctx); err != nil {
		return nil, err
	}
	o := make(outcome)
	longest := patience * rounds * time.Duration(len(c.ways)) * c.span
	for i := range c.ways {
		c.ways[i].took = newLatencies(c.stage.workers) // without the warm-up
	}
	begun := time.Now()
	for i := range rounds {
		if i >= leastRounds && time.Since(begun) > longest {
			break
		}
		if err := c.round(ctx, i, o); err != nil {
			return nil, err
		}
	}
	return o, nil
}

// warmUp fills pools, plans and caches, and does it again for the plans that the
// server makes once it knows what became of the tables.
func (c contest) warmUp(ctx context.Context) error {
	if err := c.round(ctx, 0, make(outcome)); err != nil {
		return err
	}
	if err := c.stage.settle(ctx); err != nil {
		return err
	}
	return c.round(ctx, 1, make(outcome))
}

// round has each way run a slice, and notes it.
func (c contest) round(ctx context.Context, i int, o outcome) error {
	for _, w := range inTurn(c.ways, i) {
		s, err := c.run(ctx, w)
		if err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
		o[w.name] = append(o[w.name], s)
	}
	return nil
}

// inTurn returns the ways in the order of round i: each other round backwards,
// and each pair of rounds begins with another way.
func inTurn[T any](ways []T, i int) []T {
	first := i / 2 % len(ways)
	turn := slices.Concat(ways[first:], ways[:first])
	if i%2 == 1 {
		slices.Reverse(turn)
	}
	return turn
}

func (c contest) run(ctx context.Context, w way) (slice, error) {
	return w.run(ctx, c.stage.workers, c.span)
}

// of returns one figure of all slices of a way.
func of[T any](o outcome, name string, figure func(slice) T) []T {
	var values []T
	for _, s := range o[name] {
		values = append(values, figure(s))
	}
	return values
}

// usedEach is the processor time of an operation, over all slices: a single one is too
// short for the clocks of some systems.
func (o outcome) usedEach(name string) usage {
	var sum usage
	all := 0
	for _, s := range o[name] {
		sum = sum.plus(s.used)
		all += s.all
	}
	return usage{sum.client / time.Duration(all), sum.server / time.Duration(all)}
}

// ratios returns the system's cost over the peer's, of each round.
func (o outcome) ratios(system, peer string) []float64 {
	var ratios []float64
	for i, s := range o[system] {
		ratios = append(ratios, float64(s.cost())/float64(o[peer][i].cost()))
	}
	return ratios
}

// quantile returns the value that a share q of the values is below.
func quantile[T cmp.Ordered](values []T, q float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[int(q*float64(len(sorted)-1)+0.5)]
}
