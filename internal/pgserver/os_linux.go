// This file holds what Linux alone can do: a server that dies with its parent.

package pgserver

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// sysProcAttr makes a program run as the given account, out of reach of the
// terminal's Ctrl-C (we stop it ourselves), and end when we die.
func sysProcAttr(as *account, orphaned syscall.Signal) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: orphaned}
	if as != nil {
		attr.Credential = &syscall.Credential{Uid: as.uid, Gid: as.gid}
	}
	return attr
}

// children returns the processes whose parent is pid.
func children(pid int) []int {
	var pids []int
	stats, _ := filepath.Glob("/proc/[0-9]*/stat") // fails only for a malformed pattern
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // gone
		}
		// 4711 (name, which may hold anything) state parent ...
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 2 || string(fields[1]) != strconv.Itoa(pid) {
			continue
		}
		if child, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			pids = append(pids, child)
		}
	}
	return pids
}
