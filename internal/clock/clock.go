// Package clock tells how much time has passed, asleep or awake.
//
// Deadlines of locks are readings of a Clock: how long a lock is believed must be measured
// by a clock that also runs while the machine sleeps. By any other a process would wake up
// believing that it still holds what expired meanwhile.
package clock

import "time"

// A Clock returns the time that has passed since some moment before the program's first
// reading. It never goes back.
//
// [System] is CLOCK_BOOTTIME on Linux; elsewhere whichever of the monotonic and the wall
// clock has advanced more.
type Clock func() time.Duration
