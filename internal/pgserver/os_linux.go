// Only on Linux does a server die with its parent, and can it be kept in memory.

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

// memory returns a directory whose files are in memory, if one is there that has
// room for the servers of a test run; a container's is often too small.
func memory() string {
	const (
		dir  = "/dev/shm"
		room = 4 << 30
	)
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		return ""
	}
	const tmpfs = 0x01021994 // TMPFS_MAGIC of linux/magic.h
	if fs.Type != tmpfs || fs.Bavail*uint64(fs.Bsize) < room {
		return ""
	}
	return dir
}
