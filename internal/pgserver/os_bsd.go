// On macOS and the BSDs, unlike in os_linux.go, a server outlives a parent that is killed.

//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package pgserver

import (
	"bufio"
	"bytes"
	"fmt"
	"os/exec"
	"syscall"
)

// sysProcAttr makes a program run as the given account, out of reach of the
// terminal's Ctrl-C (we stop it ourselves). These systems have no signal for
// an orphan.
func sysProcAttr(as *account, _ syscall.Signal) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if as != nil {
		attr.Credential = &syscall.Credential{Uid: as.uid, Gid: as.gid}
	}
	return attr
}

// children returns the processes whose parent is pid.
func children(pid int) []int {
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	if err != nil {
		return nil // those of a dead postmaster end by themselves
	}
	var pids []int
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		var child, parent int
		if _, err := fmt.Sscan(lines.Text(), &child, &parent); err == nil && parent == pid {
			pids = append(pids, child)
		}
	}
	return pids
}

// memory returns no directory: files in memory are nothing usual there.
func memory() string { return "" }
