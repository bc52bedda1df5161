// Pgxlock is the command line tool of the package pgxlock: it installs the
// tables and functions, shows who holds and who waits, and demonstrates on a
// throw-away server that locks keep what they promise.
//
// Data goes to standard output, messages to standard error.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		if !signal.Ignored(sig) { // a shell's job in the background is deaf to Ctrl-C
			signal.Notify(signals, sig)
		}
	}
	go func() {
		got := (<-signals).(syscall.Signal)
		signal.Stop(signals) // a second one ends us at once
		cancel(interrupted{got})
	}()
	os.Exit(run(ctx, newRoot(), os.Args[1:]))
}

// run executes the command line and returns the code to exit with.
func run(ctx context.Context, root *cobra.Command, args []string) int {
	begun := false // until then all that can be wrong is the command line
	root.PersistentPreRun = func(*cobra.Command, []string) { begun = true }
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	if !begun {
		err = usageError{fmt.Errorf("%w (see %s --help)", err, cmd.CommandPath())}
	}
	if _, ran := errors.AsType[outcome](err); !ran && context.Cause(ctx) != nil {
		err = context.Cause(ctx)
	}
	if text := describe(cmd.Flags(), err); text != "" {
		cmd.PrintErrln("pgxlock:", text)
	}
	return exitCode(err)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "pgxlock",
		Short: "Distributed locks in PostgreSQL",
		Long: `Distributed locks in PostgreSQL: install them, look at them, take them, watch them work.

The database is the one of --database-url, else of PGXLOCK_DATABASE_URL, else of
DATABASE_URL, else of the PG* variables that psql reads.

With -o json all commands call the same thing by the same name: key, kind, mode, state,
holder, token, acquired_at, expires_at. A token is a 64-bit integer: JavaScript, and jq
before 1.7, round one that is greater than 2^53.

Exit codes: 0 success, 1 no (migrate status: not the newest; ls --exit-code: no
lease; doctor: an error, with --strict also a warning; evict: nothing was evicted),
64 wrong usage, 69 database unavailable, 70 any other failure, 75 busy (try again
later), 77 user, password, database or right refused, 80 lock lost, 128+n ended by signal n. run exits as its command does, with 126
if that cannot be run and 127 if there is none.`,
		Args:          noCommand,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version(),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(flagError)
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.PersistentFlags().Bool("no-color", false, "no colors, as if NO_COLOR were set")
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp) // no key is the name of a file
	root.AddCommand(newRun(), newMigrate(), newLs(), newTree(), newWatch(), newReap(), newEvict(), newDoctor(), newAcquire(), newExtend(), newRelease(), newDemo(), newVersion())
	root.AddCommand(newRunInner()...)
	return root
}

// version is that of the module, as the go command recorded it.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the version of this program",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), cmd.Root().Name(), cmd.Root().Version)
			return err
		},
	}
}

// noCommand refuses what is no command, and names those that may have been meant.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(), meant(cmd, args[0]))
}

// meant asks whether one of the commands was meant, if one is named nearly like that.
func meant(cmd *cobra.Command, name string) string {
	cmd.SuggestionsMinimumDistance = 2 // or less
	like := cmd.SuggestionsFor(name)
	if len(like) == 0 {
		return ""
	}
	return "; did you mean " + strings.Join(like, " or ") + "?"
}

// group makes a command that only holds others.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return noCommand(cmd, args)
			}
			return fmt.Errorf("%q needs a command", cmd.CommandPath())
		},
		RunE: func(*cobra.Command, []string) error { return nil }, // without it cobra would not look at Args
	}
	cmd.AddCommand(commands...)
	return cmd
}
