package main

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// tick is the unit of the times in /proc/PID/stat (USER_HZ, the same on all
// architectures that Go runs on).
const tick = 10 * time.Millisecond

// A process is what /proc/PID/stat tells of one.
type process struct {
	parent int
	reaped time.Duration // used by its children that have ended, and theirs
}

// familyTime returns the processor time that a process and its descendants have used
// so far, those that have ended included; 0 for no process. A descendant that ends while
// this reads would count twice or not at all, so it reads again until none did.
func familyTime(root int) (time.Duration, error) {
	if root == 0 {
		return 0, nil
	}
	before, err := family(root)
	for err == nil {
		var sum time.Duration
		for pid, p := range before {
			used, errPid := processTime(pid)
			if errPid != nil && !errors.Is(errPid, unix.EINVAL) { // EINVAL: it has ended, and the next look differs
				return 0, errPid
			}
			sum += used + p.reaped
		}
		var after map[int]process
		if after, err = family(root); err == nil && maps.Equal(before, after) {
			return sum, nil
		}
		before = after
	}
	return 0, err
}

// family finds a process and its descendants.
func family(root int) (map[int]process, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	all := make(map[int]process)
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		pid, p, err := parseStat(stat)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all[pid] = p
	}
	if _, ok := all[root]; !ok {
		return nil, fmt.Errorf("process %d: %w", root, os.ErrProcessDone)
	}
	found := map[int]process{root: all[root]}
	for grown := true; grown; {
		grown = false
		for pid, p := range all {
			if _, ok := found[p.parent]; ok && pid != root {
				found[pid] = p
				delete(all, pid)
				grown = true
			}
		}
	}
	return found, nil
}

// parseStat reads a line of /proc/PID/stat:
//
//	4711 (name, which may hold anything) state parent ... utime stime cutime cstime ...
func parseStat(stat []byte) (pid int, p process, err error) {
	number, _, _ := bytes.Cut(stat, []byte(" "))
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 15 {
		return 0, p, fmt.Errorf("no line of a process: %q", stat)
	}
	var values [3]int
	for i, field := range [][]byte{fields[1], fields[13], fields[14]} {
		if values[i], err = strconv.Atoi(string(field)); err != nil {
			return 0, p, err
		}
	}
	pid, err = strconv.Atoi(string(number))
	return pid, process{parent: values[0], reaped: time.Duration(values[1]+values[2]) * tick}, err
}

// processTime returns what all threads of a process have used, to the nanosecond:
// /proc tells it in ticks, of which a slice has five.
func processTime(pid int) (time.Duration, error) {
	const sched = 2 // CPUCLOCK_SCHED of a whole process, as clock_getcpuclockid(3) makes it
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil {
		return 0, fmt.Errorf("processor time of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// canCountServers says whether the time of other processes can be read here.
const canCountServers = true
