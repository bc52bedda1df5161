//go:build unix

package main

import (
	"os/exec"
	"syscall"
)

// apart puts a worker into a process group of its own, so that Ctrl-C reaches us
// alone, who end the workers. One that cannot hear of our end ends with us.
func apart(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	endWithUs(cmd.SysProcAttr)
}

// freeze stops the process in its tracks, and thaw lets it go on.
func (p *workerProcess) freeze() error { return p.cmd.Process.Signal(syscall.SIGSTOP) }
func (p *workerProcess) thaw() error   { return p.cmd.Process.Signal(syscall.SIGCONT) }
