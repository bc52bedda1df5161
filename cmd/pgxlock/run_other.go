//go:build !unix

package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
)

// There are no process groups on these systems, without which a command cannot be
// ended with all that it started: passedOn says so before anything is locked.

func newRunInner() []*cobra.Command { return nil }

func passedOn() (chan os.Signal, error) {
	return nil, fmt.Errorf("run does not work on %s, which has no process groups; use acquire, extend and release: %w", runtime.GOOS, errors.ErrUnsupported)
}

func ends(os.Signal) bool                                     { return true }
func signalNumber(os.Signal) syscall.Signal                   { return syscall.SIGTERM }
func (*errand) supervise(*pgxlock.Lock, chan os.Signal) error { return errors.ErrUnsupported }
