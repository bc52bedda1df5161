//go:build !unix

package batcher

import "time"

var started = time.Now()

// processorTime returns the time that has passed where that of the processors is not known: a call
// of the scheduler that took long then counts as goroutines that compute.
func processorTime() time.Duration { return time.Since(started) }
