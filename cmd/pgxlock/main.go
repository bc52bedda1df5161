// Pgxlock is the command line tool of the package pgxlock: it installs the
// tables and functions, shows who holds and who waits, and runs commands under locks.
//
// Data goes to standard output, messages to standard error.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
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
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		begun = true
		return refuseBinary(cmd.Flags())
	}
	root.InitDefaultCompletionCmd(args...)
	if completion, _, err := root.Find([]string{"completion"}); err == nil {
		holdsCommands(completion)
		completion.DisableSuggestions = true // tcsh is not a misspelt bash
	}
	completeHeld(root)
	if len(args) > 0 && slices.Contains([]string{cobra.ShellCompRequestCmd, cobra.ShellCompNoDescRequestCmd}, args[0]) {
		plainUsages(root)
	}
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
		complain(cmd.ErrOrStderr(), withGrant(cmd, text))
	}
	return exitCode(err)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "pgxlock",
		Short: "Distributed locks in PostgreSQL",
		Long: `Distributed locks in PostgreSQL.

Begin with pgxlock migrate up. The database is that of --database-url, $DATABASE_URL or
PG*: see pgxlock help environment.`,
		Example: `  pgxlock migrate up                     # install the tables and functions
  pgxlock run -n nightly -- ./backup.sh  # run a command under a lock
  pgxlock ls                             # list who holds which lock
  pgxlock watch                          # watch who holds locks and who waits`,
		Args:          noCommand,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version(),
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(flagError)
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		out := cmd.OutOrStdout()
		_, _ = io.WriteString(out, helpText(cmd, min(cmp.Or(columns(out), helpColumns), mostHelpColumns))) // where that fails nobody reads
	})
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	root.PersistentFlags().Bool("no-color", false, "no colors, as if NO_COLOR were set")
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp) // no key is the name of a file
	root.AddGroup(commandGroups...)
	addGrouped(root, groupLock, newRun(), newOnce(), newLead(), newStepDown(), newAcquire(), newExtend(), newRelease())
	addGrouped(root, groupInspect, newLs(), newTree(), newWatch(), newServe(), newEvictions(), newRuns(), newDoctor())
	addGrouped(root, groupOperate, newMigrate(), newReap(), newEvict(), newClaims())
	root.AddCommand(newVersion())
	root.AddCommand(topics()...)
	root.SetHelpCommand(newHelp())
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
		Use:     "version",
		Short:   "Show the version of this program",
		Long:    "Show the version of this program, which is that of its Go module.",
		Example: "  pgxlock version",
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), cmd.Root().Name(), cmd.Root().Version)
			return err
		},
	}
}

// noCommand refuses an argument that names no command, and suggests similar ones.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(), meant(cmd, args[0]))
}

// meant suggests the commands that have a similar name, if any.
func meant(cmd *cobra.Command, name string) string {
	cmd.SuggestionsMinimumDistance = 2 // or less
	like := cmd.SuggestionsFor(name)
	if len(like) == 0 || cmd.DisableSuggestions {
		return ""
	}
	return "; did you mean " + strings.Join(like, " or ") + "?"
}

// commandNames lists the commands of a command.
func commandNames(cmd *cobra.Command) string {
	var all []string
	for _, below := range cmd.Commands() {
		all = append(all, below.Name())
	}
	return strings.Join(all, ", ")
}

// group makes a command that only holds others.
func group(use, short, long string, commands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Long: long}
	holdsCommands(cmd)
	cmd.AddCommand(commands...)
	return cmd
}

// holdsCommands makes a command one that needs one of those below it.
func holdsCommands(cmd *cobra.Command) {
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			like := cmp.Or(meant(cmd, args[0]), "; use "+commandNames(cmd))
			return fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(), like)
		}
		return fmt.Errorf("%q needs a command: %s", cmd.CommandPath(), commandNames(cmd))
	}
	cmd.RunE = func(*cobra.Command, []string) error { return nil } // without it cobra would not look at Args
}
