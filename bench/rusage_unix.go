//go:build unix

package main

import (
	"syscall"
	"time"
)

// ownTime returns the processor time that this process has used so far.
func ownTime() (time.Duration, error) {
	var u syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), err
}
