package main

import (
	"time"

	"golang.org/x/sys/unix"
)

// sharedClock is the time by a clock that all processes of the machine share, and that
// nobody sets.
func sharedClock() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // Linux always has this clock
	}
	return time.Duration(t.Nano())
}
