package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// A run is quiet if the quartiles of its floor differ by less than this share of the
// median: then nothing else took the machine's time.
const quietSpread = 0.05

// A calm is how quiet a run was: the time of the floor, `SELECT 1` twice by one worker,
// between all rows of the run.
type calm struct {
	slices           int
	low, median, top time.Duration // of the slices: the quartiles
}

func calmOf(floor []time.Duration) calm {
	return calm{len(floor), quantile(floor, 0.25), quantile(floor, 0.5), quantile(floor, 0.75)}
}

// spread is by what share of the median the quartiles differ.
func (c calm) spread() float64 { return float64(c.top-c.low) / float64(c.median) }

func (c calm) quiet() bool { return c.spread() < quietSpread }

// String says how quiet it was, for the output and for pages alike.
func (c calm) String() string {
	word := "The machine was quiet"
	if !c.quiet() {
		word = "**The machine was not quiet**, so take the figures for rough ones"
	}
	return fmt.Sprintf("%s: `SELECT 1` twice, measured %d times between the rows, took %s (median), and the quartiles, %s and %s, differ by %.1f %% of that. Quiet is less than %.0f %%.",
		word, c.slices, brief(c.median), brief(c.low), brief(c.top), 100*c.spread(), 100*quietSpread)
}

// A watch measures the floor from time to time.
type watch struct {
	stage *stage
	way   way
	floor []time.Duration
}

// Each time the watch looks, it takes so many slices of such a length.
const (
	looks    = 4
	lookSpan = 25 * time.Millisecond
)

func newWatch(ctx context.Context, server *pgserver.Server) (*watch, error) {
	w := &watch{stage: newStage(server, 1)}
	floor, err := twoSelects(ctx, w.stage)
	if err != nil {
		return nil, errors.Join(err, w.stage.clear())
	}
	w.way = w.stage.way("floor", floor)
	_, err = w.way.run(ctx, 1, lookSpan) // connects
	return w, err
}

func (w *watch) look(ctx context.Context) error {
	for range looks {
		s, err := w.way.run(ctx, 1, lookSpan)
		if err != nil {
			return fmt.Errorf("measure the floor: %w", err)
		}
		w.floor = append(w.floor, s.cost())
	}
	return nil
}

// end says what the watch saw, and adds what went wrong to err.
func (w *watch) end(c *calm, err *error) {
	*c, *err = calmOf(w.floor), errors.Join(*err, w.stage.clear())
}

// quietest repeats a run until one is quiet, at most so often, and returns the quietest.
func quietest[R interface{ calmness() calm }](most int, run func() (R, error)) (best R, runs int, err error) {
	for runs = 1; ; runs++ {
		r, err := run()
		if err != nil {
			return best, runs, err
		}
		if runs == 1 || r.calmness().spread() < best.calmness().spread() {
			best = r
		}
		fmt.Printf("\nrun %d of %d at most: %s\n", runs, most, r.calmness())
		if best.calmness().quiet() || runs == most {
			return best, runs, nil
		}
	}
}
