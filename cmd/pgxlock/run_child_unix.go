//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// The command that run starts leads a process group of its own, and the group ends with it.

// passed are the signals that are passed on.
var passed = []os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// passedOn returns a channel on which these signals arrive, but for those that we were
// told to ignore, as by nohup.
func passedOn() (chan os.Signal, error) {
	signals := make(chan os.Signal, 16)
	hear(signals, passed...)
	return signals, nil
}

// hear makes signals arrive that are not ignored.
func hear(to chan<- os.Signal, signals ...os.Signal) {
	for _, sig := range signals {
		if !signal.Ignored(sig) {
			signal.Notify(to, sig)
		}
	}
}

// ends reports whether a signal is one that ends a program.
func ends(sig os.Signal) bool {
	return slices.Contains([]os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}, sig)
}

func signalNumber(sig os.Signal) syscall.Signal { return sig.(syscall.Signal) }

// A processGroup is that of a command, which leads it.
type processGroup struct{ pid int }

func (g processGroup) signal(sig syscall.Signal) error { return syscall.Kill(-g.pid, sig) }

// end tells all of the group to end; what is stopped must go on for that.
func (g processGroup) end() {
	_ = g.signal(syscall.SIGTERM)
	_ = g.signal(syscall.SIGCONT)
}

// gateCommand is what this program is run as to become the command.
const gateCommand = "run-gate"

// start makes the process that becomes the command when one byte is written to the
// gate. If the gate is closed before, as by our end, it ends.
func (s *supervision) start() (gate *os.File, err error) {
	r, gate, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = r.Close() }()
	// It keeps its number, so that no file that the command inherits gives way.
	fd := int(r.Fd())
	if _, err = unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err == nil {
		args := append([]string{"pgxlock", gateCommand, strconv.Itoa(fd), s.program}, s.command...)
		s.group.pid, err = syscall.ForkExec(ourselves(), args, &syscall.ProcAttr{
			Env:   environment(s.env),
			Files: []uintptr{0, 1, 2},
			Sys:   &syscall.SysProcAttr{Setpgid: true},
		})
	}
	if err != nil {
		_ = gate.Close()
		return nil, fmt.Errorf("start the command: %w", err)
	}
	return gate, nil
}

// variables are those that a command gets of us. What another pgxlock, that runs us, has set
// is about its own lock.
var variables = []string{"PGXLOCK_KEY", "PGXLOCK_HOLDER", "PGXLOCK_TOKEN", "PGXLOCK_SLOT", "PGXLOCK_ATTEMPT"}

// environment returns this process's environment, with what the command may know of its lock
// or its run.
func environment(own []string) []string {
	env := slices.DeleteFunc(os.Environ(), func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return slices.Contains(variables, name)
	})
	return append(env, own...)
}

// newRunGate is the process that becomes the command.
func newRunGate() *cobra.Command {
	return &cobra.Command{
		Use:                gateCommand + " FD FILE NAME [ARG...]",
		Short:              "Become a command when told to",
		Hidden:             true,
		DisableFlagParsing: true,
		Args:               cobra.MinimumNArgs(3),
		RunE: func(cmd *cobra.Command, args []string) error {
			fd, err := strconv.Atoi(args[0])
			if err != nil {
				return err
			}
			return becomeCommand(cmd.Context(), os.NewFile(uintptr(fd), "gate"), args[1], args[2:])
		},
	}
}

func becomeCommand(ctx context.Context, gate *os.File, file string, args []string) error {
	signals, err := passedOn() // a signal for the command; exec makes its effect the usual one
	if err != nil {
		return err
	}
	letGo := make(chan error, 1)
	go func() {
		_, err := gate.Read(make([]byte, 1))
		letGo <- err
	}()
	select {
	case err = <-letGo:
	case sig := <-signals:
		err = interrupted{signalNumber(sig)}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	syscall.CloseOnExec(int(gate.Fd()))
	return outcome{exitNotRunnable, fmt.Errorf("%s: %w", file, explained(syscall.Exec(file, args, os.Environ())))}
}

// explained says what the system's error about a file that was found means.
func explained(err error) error {
	switch {
	case errors.Is(err, syscall.ENOEXEC): // a shell would run it
		return fmt.Errorf("%w: it is no program of this machine; a script begins with #! and its interpreter, such as #!/bin/sh", err)
	case errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("%w: the file is there, its interpreter or loader is not; a first line that ends with a carriage return names another one", err)
	}
	return err
}

// A change is that a process of ours has stopped or ended.
type change struct {
	pid    int
	status syscall.WaitStatus
}

// A reaper waits for all our processes, also those that became ours as orphans. Nothing else
// in this program may wait for one.
type reaper struct {
	changes chan change
	born    chan struct{} // holds one if there may be processes again
}

func newReaper() *reaper {
	r := &reaper{make(chan change), make(chan struct{}, 1)}
	go func() {
		for range r.born {
			r.reap()
		}
	}()
	return r
}

// started says that there is a process to wait for.
func (r *reaper) started() {
	select {
	case r.born <- struct{}{}:
	default:
	}
}

// reap waits until there are none left.
func (r *reaper) reap() {
	for {
		var c change
		var err error
		if c.pid, err = syscall.Wait4(-1, &c.status, syscall.WUNTRACED, nil); err == nil {
			r.changes <- c
		} else if !errors.Is(err, syscall.EINTR) {
			return
		}
	}
}
