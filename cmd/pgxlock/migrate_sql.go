package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/internal/formats"
)

func newMigrateSQL() *cobra.Command {
	var o formats.Options
	var dir string
	format := sqlFormat(formats.Plain)
	cmd := &cobra.Command{
		Use:   "sql",
		Short: "Print the migrations, or write them for another migration tool",
		Long: `Print the migrations as SQL, or write them as the files of another migration
tool into its directory: golang-migrate ("migrate"), goose, Flyway, tern.

They install into --schema, which is created; without it into the schema that the
search_path names first, which must exist. A directory that holds migrations of
your own needs numbers that are free there: --number is that of the first file.
After an upgrade of pgxlock write what is new: --from is the first version.

No file is changed: one that is there and differs makes the command fail before
it writes anything. It prints the paths of what it wrote.`,
		Example: `  pgxlock migrate sql | psql -1 -v ON_ERROR_STOP=1 -f -
  pgxlock migrate sql --down | psql -1 -v ON_ERROR_STOP=1 -f -
  pgxlock migrate sql --format goose --dir db/migrations --number 20261121120000
  pgxlock migrate sql --format flyway --dir src/main/resources/db/migration --number 42 --schema locks`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd.Flags(), "the default", "schema", "dir"); err != nil {
				return err
			}
			files, err := formats.Files(formats.Format(format), o)
			if err != nil {
				return usageError{err}
			}
			if dir != "" {
				return writeFiles(cmd, dir, files)
			}
			if format != sqlFormat(formats.Plain) {
				return usageError{fmt.Errorf("--format %s makes files: name the directory for them with --dir", format)}
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), files[0].Text)
			return err
		},
	}
	flags := cmd.Flags()
	flags.Var(&format, "format", format.list())
	flags.StringVar(&dir, "dir", "", "`directory` to write files into; it must exist")
	flags.StringVar(&o.Schema, "schema", "", "`schema` to install into (default: the first of the search_path)")
	flags.UintVar(&o.From, "from", 0, "the first `version` of pgxlock's migrations (default: all)")
	flags.Uint64Var(&o.Number, "number", 0, "`number` of the first file (default: its version)")
	flags.BoolVar(&o.Down, "down", false, "print what removes pgxlock (only --format plain)")
	err := errors.Join(
		cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions(format.names(), cobra.ShellCompDirectiveNoFileComp)),
		cmd.MarkFlagDirname("dir"),
	)
	if err != nil {
		panic("pgxlock: " + err.Error()) // the flags were added above
	}
	return cmd
}

// writeFiles writes them, and says which are new.
func writeFiles(cmd *cobra.Command, dir string, files []formats.File) error {
	written, err := formats.Write(dir, files)
	for _, path := range written {
		if _, err := fmt.Fprintln(cmd.OutOrStdout(), path); err != nil {
			return err
		}
	}
	switch {
	case errors.Is(err, os.ErrNotExist):
		return usageError{fmt.Errorf("there is no directory %s; make it first", dir)}
	case errors.Is(err, formats.ErrInTheWay):
		return usageError{err}
	case err != nil:
		return err
	}
	if len(written) == 0 {
		cmd.PrintErrln("pgxlock: all files are there already")
	}
	return nil
}

// sqlFormat is the value of --format.
type sqlFormat formats.Format

func (f *sqlFormat) String() string { return string(*f) }
func (f *sqlFormat) Type() string   { return "format" }

func (f *sqlFormat) Set(s string) error {
	for _, known := range formats.All {
		if s == string(known) {
			*f = sqlFormat(s)
			return nil
		}
	}
	return errors.New("use " + f.list())
}

func (f *sqlFormat) names() (names []string) {
	for _, format := range formats.All {
		names = append(names, string(format))
	}
	return names
}

// list is "a, b or c".
func (f *sqlFormat) list() string {
	names := f.names()
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}
