//go:build !linux

package main

import "time"

// sharedClock is the time by a clock that all processes of the machine share.
func sharedClock() time.Duration { return time.Duration(time.Now().UnixNano()) }
