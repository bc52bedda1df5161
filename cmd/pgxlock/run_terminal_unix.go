//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// Job control decides which process group has the terminal.

// A terminal is the one that controls our session. The methods of a nil one do nothing.
type terminal struct {
	fd           int
	ours, theirs int // process groups
}

// takeTerminal prepares to share our terminal with the command, and lends it to the
// command at once if both its input and its output are there. Else we may be part of a
// pipeline, another part of which wants to read what is typed: then the command gets
// it when it asks. It returns nil if there is no terminal. From then on signals tell
// when the job is stopped and goes on.
func takeTerminal(g processGroup, signals chan<- os.Signal) *terminal {
	fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil
	}
	t := &terminal{fd: fd, ours: syscall.Getpgrp(), theirs: g.pid}
	hear(signals, syscall.SIGTSTP, syscall.SIGCONT)
	signal.Ignore(syscall.SIGTTOU) // we take the terminal back, and write to it, in the background
	if isOurTerminal(0) && isOurTerminal(1) {
		t.give()
	}
	return t
}

// isOurTerminal reports whether a file is the terminal that controls our session.
func isOurTerminal(fd int) bool {
	_, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	return err == nil
}

// give lends the terminal to the command, if it is ours to lend.
func (t *terminal) give() bool { return t != nil && t.move(t.ours, t.theirs) }

// takeBack takes it back, if the command has it.
func (t *terminal) takeBack() {
	if t != nil {
		t.move(t.theirs, t.ours)
	}
}

// close takes it back for good: from now on Ctrl-Z is for us.
func (t *terminal) close() {
	if t != nil {
		t.takeBack()
		signal.Reset(syscall.SIGTSTP, syscall.SIGCONT)
		_ = unix.Close(t.fd)
	}
}

// given reports whether the command has it.
func (t *terminal) given() bool { return t.foreground() == t.theirs }

func (t *terminal) move(from, to int) bool {
	return t.foreground() == from && unix.IoctlSetPointerInt(t.fd, unix.TIOCSPGRP, to) == nil
}

func (t *terminal) foreground() int {
	group, err := unix.IoctlGetInt(t.fd, unix.TIOCGPGRP)
	if err != nil {
		return -1 // it has hung up
	}
	return group
}

// orphaned reports whether there is no shell that would let us go on if we stopped:
// our group is led by what leads the session, or its parent is of another session.
func orphaned() bool {
	session, err := unix.Getsid(0)
	if err != nil || syscall.Getpgrp() == session {
		return true
	}
	if syscall.Getpgrp() != os.Getpid() {
		return false
	}
	parents, err := unix.Getsid(os.Getppid())
	return err != nil || parents != session
}
