//go:build unix && !linux

package main

import "syscall"

// endWithUs has nothing to ask of these systems: when we are killed, a frozen
// worker goes on because a stopped process in an orphaned group gets SIGHUP and
// SIGCONT, and then its orders have ended.
func endWithUs(*syscall.SysProcAttr) {}
