//go:build !unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock"
)

// There are no process groups on these systems, without which a command cannot be
// ended with all that it started: passedOn says so before anything is locked.

func newRunInner() []*cobra.Command { return nil }

func passedOn() (chan os.Signal, error) {
	return nil, fmt.Errorf("this does not work on %s, which has no process groups; use acquire, extend and release: %w", runtime.GOOS, errors.ErrUnsupported)
}

func (*task) conduct(context.Context, chan os.Signal, func(context.Context, func(tenure) error) error) error {
	return errors.ErrUnsupported
}

type healthFile struct{}

func newHealthFile(string) (*healthFile, error) { return nil, errors.ErrUnsupported }
func (*healthFile) show(*pgxlock.Lock) error    { return nil }
func (*healthFile) remove()                     {}
