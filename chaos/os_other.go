//go:build unix && !linux

package main

import "syscall"

// dieWithParent makes a process one that no Ctrl-C reaches. It ends with its parent when it reads the end of its input.
func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
