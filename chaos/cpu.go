package main

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// processorTime returns what this process used of the processors, and what the children that have ended used, with all
// that they had started.
func processorTime() time.Duration {
	var total time.Duration
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var used syscall.Rusage
		if err := syscall.Getrusage(who, &used); err == nil {
			total += time.Duration(used.Utime.Nano() + used.Stime.Nano())
		}
	}
	return total
}

// stopAtCPU calls stop when this process and all that descend from it, which still run, have used so much more of the
// processors than began. It needs Linux; elsewhere a round ends by the clock.
func stopAtCPU(ctx context.Context, stop context.CancelFunc, began, most time.Duration) {
	for most > 0 && sleep(ctx, 100*time.Millisecond) {
		used := processorTime() - began
		for _, running := range descendants(os.Getpid()) {
			used += running
		}
		if used > most {
			stop()
		}
	}
}

// descendants returns the processes that descend from one, and what each of them, with its children that have ended, used
// of the processors.
func descendants(ancestor int) map[int]time.Duration {
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux
	parents, used := map[int]int{}, map[int]time.Duration{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat") // fails only for a malformed pattern
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // gone
		}
		// 4711 (name, which may hold anything) state parent ...
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if len(fields) < 15 {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		parents[pid], _ = strconv.Atoi(fields[1])
		for _, field := range fields[11:15] {
			n, _ := strconv.Atoi(field)
			used[pid] += time.Duration(n) * tick
		}
	}
	for pid := range used {
		p := parents[pid]
		for p > 1 && p != ancestor {
			p = parents[p]
		}
		if p != ancestor {
			delete(used, pid)
		}
	}
	return used
}
