package pgxlock

import "time"

// A clock tells how much time has passed since some moment before the program's
// first reading. It never goes back. Deadlines are readings of it: how long we
// may believe in a lock must be judged by a clock that also runs while the
// machine sleeps, or we would wake up believing.
//
// systemClock is that clock: CLOCK_BOOTTIME on Linux; elsewhere whichever of the
// monotonic and the wall clock has advanced more.
type clock func() time.Duration
