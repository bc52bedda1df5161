package main

import (
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// printHeader says what the figures were measured on, and how to read them.
func printHeader(server *pgserver.Server, daemons []*daemon, sync, delay time.Duration) {
	fmt.Printf("%d CPUs; %s, fsync and synchronous_commit on", runtime.NumCPU(), server.Description())
	for _, d := range daemons {
		fmt.Printf("; %s", d)
	}
	fmt.Printf(`
one fdatasync of %d bytes beside its data takes %s (median)%s

RATIO <system>/<peer> <workers> <ratio>: the cost of pgxlock's way divided by that of the peer, so that less is better
and below 1 pgxlock is the cheaper one; "N x the throughput" is a ratio of 1/N. The ways take turns in %d rounds of
slices, or %d where they take long: the ratio is the median of the rounds', each time the median of the slices', as one
worker sees it. Allocations are those of this process for an operation, its key and all that runs beside it included.
`, syncBytes, brief(sync), delayed(delay), rounds, leastRounds)
}

// delayed says by what commits are slower than the disk makes them.
func delayed(delay time.Duration) string {
	if delay == 0 {
		return ""
	}
	return fmt.Sprintf("\nto which commit_delay adds %s: these are not the disk's figures", brief(delay))
}

const (
	syncBytes = 8192 // one page of the write-ahead log
	syncTimes = 100
)

// syncTime returns the median time that the file system of dir takes to make a
// small write durable: what a commit waits for.
func syncTime(dir string) (median time.Duration, err error) {
	f, err := os.CreateTemp(dir, "sync")
	if err != nil {
		return 0, err
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name()) // the server's directory goes with all that is in it
	}()
	// As in the log the file has its full size before, so that only data is new.
	if _, err := f.Write(make([]byte, syncBytes*syncTimes)); err != nil {
		return 0, err
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	var times []time.Duration
	page := make([]byte, syncBytes)
	page[0] = 1
	for i := range int64(syncTimes) {
		begun := time.Now()
		if _, err := f.WriteAt(page, i*syncBytes); err != nil {
			return 0, err
		}
		if err := fdatasync(f); err != nil {
			return 0, err
		}
		times = append(times, time.Since(begun))
	}
	return quantile(times, 0.5), nil
}

// brief prints a time with three digits.
func brief(d time.Duration) string {
	switch {
	case d >= time.Second:
		return fmt.Sprintf("%.3g s", d.Seconds())
	case d >= time.Millisecond:
		return fmt.Sprintf("%.3g ms", d.Seconds()*1e3)
	}
	return fmt.Sprintf("%.3g µs", d.Seconds()*1e6)
}
