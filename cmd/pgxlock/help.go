package main

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Groups of commands, in the order in which the help lists them.
const (
	groupLock    = "lock"
	groupInspect = "inspect"
	groupOperate = "operate"
)

var commandGroups = []*cobra.Group{
	{ID: groupLock, Title: "Lock:"},
	{ID: groupInspect, Title: "Inspect:"},
	{ID: groupOperate, Title: "Operate:"},
}

// addGrouped adds commands to a group of the program.
func addGrouped(root *cobra.Command, id string, commands ...*cobra.Command) {
	for _, cmd := range commands {
		cmd.GroupID = id
	}
	root.AddCommand(commands...)
}

// topics returns the pages of help that belong to no command: commands that do nothing.
func topics() []*cobra.Command {
	return []*cobra.Command{
		{Use: "exit-codes", Short: "What the exit codes mean", Long: "The exit codes of pgxlock:\n\n" + listExitCodes()},
		{Use: "environment", Short: "Which environment variables count", Long: `The database is that of --database-url, or else of the first of these that is set:

  PGXLOCK_DATABASE_URL   a connection string
  DATABASE_URL           a connection string
  PGHOST, PGPORT, ...    the variables that psql reads, with ~/.pgpass and
                         service files, read again for each connection

A connection string looks like postgres://user@host:5432/database. Other users
of this machine can read a command line: keep a password in a variable or in
~/.pgpass. Without a connect_timeout of its own it has one of 10 seconds.

The token of pgxlock serve, unless --token-file names a file:

  PGXLOCK_SERVE_TOKEN    at least 32 characters

Colors:

  NO_COLOR               if set, no colors, as with --no-color
  TERM                   dumb: no colors, and watch does not redraw

The command that pgxlock run, lead or once starts gets:

  PGXLOCK_KEY            the key; with --permits the permit's, such as jobs#2;
                         of once --retry that of the lease, run:KEY@SLOT
  PGXLOCK_HOLDER         the holder id; of once only with --retry
  PGXLOCK_TOKEN          the fencing token; 0 with --kind advisory; of once
                         only with --retry
  PGXLOCK_SLOT           of once: when the period began, in RFC 3339
  PGXLOCK_ATTEMPT        of once: how often the run was started`},
		{Use: "json", Short: "What the fields of -o json have in common", Long: `With -o json every command uses the same names: key, kind, mode, state, holder, token,
acquired_at, expires_at. A field that is not known is left out or null. Times are in
RFC 3339.

A lock that is held also has suspect, metadata and eviction_reason with evicted_by; an
advisory lock pid, application, role, client and label, and internal if it is one of
pgxlock's own; token and the times are of leases. ls adds held_seconds and
remaining_seconds, null where they are not known; evictions has evicted_at, runs and once
have slot, attempts, retry, started_at, finished_at, error and period_seconds. reap and
claims purge print the number as removed, with --dry-run as would_remove.

A token is a 64-bit integer. JavaScript, and jq before 1.7, round integers greater
than 2^53.`},
	}
}

// newHelp is cobra's command help, but that a topic which does not exist is an error.
func newHelp() *cobra.Command {
	return &cobra.Command{
		Use:     "help [COMMAND or TOPIC]",
		Short:   "Show the help of a command or a topic",
		Long:    "Show the help of a command or a topic. pgxlock help without either lists both.",
		Example: "  pgxlock help run\n  pgxlock help migrate up\n  pgxlock help exit-codes",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begin string) (names []string, _ cobra.ShellCompDirective) {
			if about, rest, err := cmd.Root().Find(args); err == nil && len(rest) == 0 {
				for _, below := range about.Commands() {
					if !below.Hidden && strings.HasPrefix(below.Name(), begin) {
						names = append(names, cobra.CompletionWithDesc(below.Name(), below.Short))
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		Args: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) == 0 {
				return err
			}
			return fmt.Errorf("no help for %q%s", strings.Join(rest, " "), meant(about, rest[0]))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			about, _, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			about.InitDefaultHelpFlag()
			about.InitDefaultVersionFlag()
			return about.Help()
		},
	}
}

const (
	helpColumns     = 78 // of help that is not written to a terminal
	mostHelpColumns = 100
)

// entry is the beginning of a line of a list: its indentation, and what is explained behind it.
var entry = regexp.MustCompile(`^ *(?:\S.*? {2,})?`)

// helpText is the help of a command in lines of so many columns. Examples are not broken: a
// shell reads them.
func helpText(cmd *cobra.Command, columns int) string {
	text := strings.TrimSpace(cmp.Or(cmd.Long, cmd.Short)) + "\n"
	if cmd.Runnable() || cmd.HasSubCommands() {
		text += "\n" + cmd.UsageString()
	}
	var b strings.Builder
	paragraph := ""
	for line := range strings.Lines(text + "\n") {
		line = strings.TrimRight(line, " \n")
		if line != "" && strings.TrimLeft(line, " \t") == line {
			paragraph += line + " "
			continue
		}
		if paragraph != "" {
			b.WriteString(hang("", paragraph, 0, columns))
			paragraph = ""
		}
		if runewidth.StringWidth(line) <= columns || strings.Contains(cmd.Example, line) {
			b.WriteString(line + "\n")
			continue
		}
		begin := entry.FindString(line)
		b.WriteString(hang(begin, line[len(begin):], len(begin), columns))
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// noArguments refuses arguments.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	suggested := ""
	if key := cmd.Flags().Lookup("key"); key != nil {
		suggested = "; did you mean --" + key.Name + " " + shellQuote(args[0]) + "?"
	}
	return fmt.Errorf("unexpected argument %q: %s takes none%s", args[0], cmd.CommandPath(), suggested)
}

// oneKey wants the name of one lock.
func oneKey(cmd *cobra.Command, args []string) error {
	switch len(args) {
	case 1:
		if !utf8.ValidString(args[0]) {
			return errors.New("the key is not valid UTF-8; encode binary names, for example in hexadecimal")
		}
		return nil
	case 0:
		return fmt.Errorf("the key is missing: %s", strings.TrimSuffix(cmd.UseLine(), " [flags]"))
	}
	return fmt.Errorf("one key is expected, and not %d; quote a key that has spaces", len(args))
}

// refuseBinary refuses flags with texts that PostgreSQL would refuse, and say of less clearly.
func refuseBinary(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(flag *pflag.Flag) {
		if !utf8.ValidString(flag.Value.String()) {
			err = usageError{fmt.Errorf("--%s is not valid UTF-8", flag.Name)}
		}
	})
	return err
}

// listExitCodes is the list of exit codes as help shows it.
func listExitCodes() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	for _, c := range exitCodes {
		label := c.code
		for _, line := range fold(c.meaning, helpColumns-len("  128+n   ")) {
			_, _ = fmt.Fprintf(w, "  %s\t%s\n", label, line) // a Builder takes everything
			label = ""
		}
	}
	_ = w.Flush()
	return strings.TrimSuffix(b.String(), "\n")
}
