//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// apart puts a worker into a process group of its own. Ctrl-C then reaches us
// alone, who end the workers; and when we are killed, the system lets a frozen
// worker go on (a stopped process in an orphaned group gets SIGHUP and SIGCONT).
func apart(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// freeze stops the process in its tracks, and thaw lets it go on.
func (p *workerProcess) freeze() error { return p.cmd.Process.Signal(syscall.SIGSTOP) }
func (p *workerProcess) thaw() error   { return p.cmd.Process.Signal(syscall.SIGCONT) }
