package once

import (
	"fmt"
	"time"
)

// A TickError means that the tick that was passed to [Runner.DoAt] cannot be one, or that
// nobody knows whether it was run. Its text says what to pass instead.
type TickError struct {
	Tick time.Time
	Err  error // what is wrong with it
}

func (e *TickError) Error() string {
	if e.Tick.IsZero() {
		return "tick is the zero time; pass the time that the scheduler calls for"
	}
	return fmt.Sprintf("tick is %s, which cannot be run: %v", e.Tick.Round(0).Format(time.RFC3339Nano), e.Err)
}

func (e *TickError) Unwrap() error { return e.Err }

// checkTick refuses what no schedule says. Whether the tick is too old or too far ahead is the
// server's to say.
func checkTick(tick time.Time) error {
	switch {
	case tick.IsZero():
		return &TickError{Tick: tick}
	case tick.Year() < 1 || tick.Year() > 9999:
		return &TickError{tick, fmt.Errorf("its year is %d; is it in the right unit? Pass the time that the scheduler calls for", tick.Year())}
	case tick != tick.Round(0) && tick.Nanosecond() != 0: // a scheduler that counts from a clock reading gives it whole seconds
		return &TickError{tick, fmt.Errorf("it is a reading of this process's clock, and so another tick in each process; " +
			"pass the time that the scheduler calls for, round time.Now() to the distance between two ticks, or use Do")}
	}
	return nil
}
