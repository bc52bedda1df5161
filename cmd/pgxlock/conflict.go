package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
)

// What run and acquire do when somebody else holds the lock, and once when the run was started
// already. Their short flags are those of flock(1).

// conflict is what a command does when somebody else was first.
type conflict struct {
	code  int
	quiet bool
}

// addFlags adds the flags; when says what happened.
func (c *conflict) addFlags(cmd *cobra.Command, code int, when string) {
	cmd.Flags().IntVarP(&c.code, "conflict-exit-code", "E", code, "exit `code` if "+when)
	cmd.Flags().BoolVarP(&c.quiet, "quiet", "q", false, "print nothing if "+when)
}

// check says what is wrong with the flags.
func (c *conflict) check() error {
	if c.code < 0 || c.code > 255 {
		return fmt.Errorf("--conflict-exit-code is %d, it must be between 0 and 255", c.code)
	}
	return nil
}

// outcome makes the error of an acquisition the one to exit with.
func (c *conflict) outcome(err error) error {
	if err == nil || exitCode(err) != exitBusy {
		return err
	}
	if c.quiet {
		return outcome{c.code, errSilent}
	}
	return outcome{c.code, &remediedError{err, "try again later, or wait longer with --wait"}}
}

// waiting is how long a command waits for somebody else's lock.
type waiting struct {
	most   time.Duration
	noWait bool
}

func (w *waiting) addFlags(cmd *cobra.Command, usage, noWaitUsage string) {
	durationVar(cmd.Flags(), &w.most, "wait", "w", 0, usage)
	cmd.Flags().BoolVarP(&w.noWait, "no-wait", "n", false, noWaitUsage)
}

// check says what is wrong with the flags.
func (w *waiting) check(flags *pflag.FlagSet) error {
	switch {
	case w.most < 0:
		return fmt.Errorf("--wait is %s, it must be 0, which tries once, or more", readable.Exact(w.most))
	case w.noWait && flags.Changed("wait"):
		return errors.New("--wait and --no-wait exclude each other; leave one out")
	}
	return nil
}
