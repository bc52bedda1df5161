package once

import (
	"context"
	"time"
)

// runs is the backend of a Runner: it records runs.
type runs interface {
	// find makes sure that the schema of the table is known.
	find(wait context.Context) error

	// due returns the slots that were missed, oldest first, of the last so many before the
	// current slot, then the current slot, and how long that lasts from now.
	due(wait context.Context, key string, missed int, first First) (found []dueSlot, lasts time.Duration, err error)

	// start starts a run. Attempt 0 means that the run may not be started. lease is the
	// lease that the holder has; "" means that the run may not be started again. unsure means that the outcome is unknown:
	// the run may have been started although err is not nil. The same holder finds out
	// by starting it once more.
	start(wait context.Context, key string, w which, holder, lease string) (started startedRun, unsure bool, err error)

	// finish records how an attempt ended. It reports whether that was the latest attempt.
	finish(key string, slot time.Time, holder, state, text string) (bool, error)

	// close closes the connection. Nothing is recorded afterwards.
	close()
}

type dueSlot struct {
	slot  time.Time
	due   bool      // it may be started
	other *Schedule // of another program that has started a run near it; nil: none
}

// which names the run that a call is for.
type which struct {
	slot  time.Time // zero: the current one
	tick  bool      // slot is a tick, not the beginning of a period
	first First     // FirstNow or FirstNext
}

type startedRun struct {
	slot    time.Time
	attempt int
	other   *Schedule // of another program that has started a run near this one; nil: none
}

// The states that are recorded.
const (
	runRunning   = string(StateRunning)
	runSucceeded = string(StateSucceeded)
	runFailed    = string(StateFailed)
	runSkipped   = string(StateSkipped)
	runWithdrawn = "withdrawn" // may be started as if it never had been
)
