package main

import "syscall"

// dieWithParent makes a process one that no Ctrl-C reaches and that is killed when its parent ends.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
