package main

import "syscall"

// endWithUs makes the system kill a worker when we are killed. An orphaned
// group's SIGCONT is not enough: a worker that is about to stop just then does
// not get it, nor does one whose new parent is of our session, as the first
// process of a container is.
func endWithUs(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
