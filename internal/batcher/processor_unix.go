//go:build unix

package batcher

import (
	"syscall"
	"time"
)

// processorTime returns how much processor time this process has used.
func processorTime() time.Duration {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used) // fails for bad arguments only
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
