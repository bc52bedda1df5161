package main

import (
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// latencies are how long the operations of a way took. Workers note theirs apart from
// each other, and without allocating once the first slices are over; the histogram is
// filled between slices, when nothing is measured.
type latencies struct {
	all      *hdrhistogram.Histogram // in nanoseconds
	ofWorker [][]sample
}

// A sample is n operations in a row, each of which took each on average.
type sample struct {
	n    int
	each time.Duration
}

// The histogram keeps three digits of times up to the longest.
const (
	shortestLatency = 100 * time.Nanosecond
	longestLatency  = 10 * time.Minute
	latencyDigits   = 3
)

func newLatencies(workers int) *latencies {
	return &latencies{
		all:      hdrhistogram.New(int64(shortestLatency), int64(longestLatency), latencyDigits),
		ofWorker: make([][]sample, workers),
	}
}

// note is for one worker at a time of each number.
func (l *latencies) note(worker, n int, took time.Duration) {
	l.ofWorker[worker] = append(l.ofWorker[worker], sample{n, took / time.Duration(n)})
}

// gather moves what the workers noted to the histogram.
func (l *latencies) gather() error {
	for worker, noted := range l.ofWorker {
		for _, s := range noted {
			if err := l.all.RecordValues(int64(s.each), int64(s.n)); err != nil {
				return fmt.Errorf("note that an operation took %s: %w", s.each, err)
			}
		}
		l.ofWorker[worker] = noted[:0]
	}
	return nil
}

// percentiles are the times that so many of the operations took at most.
type percentiles struct{ p50, p99, p999 time.Duration }

func (l *latencies) percentiles() percentiles {
	at := func(percent float64) time.Duration { return time.Duration(l.all.ValueAtPercentile(percent)) }
	return percentiles{at(50), at(99), at(99.9)}
}
