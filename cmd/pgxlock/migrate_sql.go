package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/internal/formats"
)

func newMigrateSQL() *cobra.Command {
	var o formats.Options
	var dir string
	format := formats.Plain
	cmd := &cobra.Command{
		Use:   "sql",
		Short: "Print the migrations, or write them for another migration tool",
		Long: `Print the migrations as SQL, or write them as the files of another migration
tool into its directory: golang-migrate ("migrate"), goose, Flyway, tern.

The SQL installs into --schema, which it creates; without --schema, into the first
schema of the search_path, which must exist. Where the directory holds migrations of
your own, --number sets the number of the first file. After an upgrade of pgxlock,
write what is new: --from is the first version to write.

sql changes no file: if one exists and differs, it fails before it writes anything. It
prints the paths of the files that it wrote.`,
		Example: `  pgxlock migrate sql | psql -1 -v ON_ERROR_STOP=1 -f -
  pgxlock migrate sql --down | psql -1 -v ON_ERROR_STOP=1 -f -
  pgxlock migrate sql --format goose --dir db/migrations --number 20261121120000
  pgxlock migrate sql --format flyway --dir db/migration --number 42`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd.Flags(), "the default", "schema", "dir"); err != nil {
				return err
			}
			switch {
			case format == formats.Plain && cmd.Flags().Changed("number"):
				return usageError{errors.New("--number is for files, and --format plain makes none; leave it out, or choose another --format")}
			case format != formats.Plain && o.Down:
				return usageError{fmt.Errorf("--down is for --format plain; the files of %s have both ways, up and down; leave it out", format)}
			}
			files, err := formats.Files(format, o)
			if err != nil {
				return usageError{err}
			}
			if dir != "" {
				return writeFiles(cmd, dir, files)
			}
			if format != formats.Plain {
				return usageError{fmt.Errorf("--format %s makes files; name their directory with --dir", format)}
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), files[0].Text)
			return err
		},
	}
	flags := cmd.Flags()
	choiceVar(cmd, &format, "format", "", "format", anyOf(formats.All), formats.All...)
	flags.StringVar(&dir, "dir", "", "`directory` to write files into; it must exist")
	flags.StringVar(&o.Schema, "schema", "", "`schema` to install into (default: the first of the search_path)")
	flags.UintVar(&o.From, "from", 0, "begin with this `version` of pgxlock's migrations (default: all)")
	flags.Uint64Var(&o.Number, "number", 0, "`number` of the first file (default: its version)")
	flags.BoolVar(&o.Down, "down", false, "print the SQL that removes pgxlock (only --format plain)")
	if err := cmd.MarkFlagDirname("dir"); err != nil {
		panic("pgxlock: " + err.Error()) // the flag was added above
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
		return usageError{fmt.Errorf("there is no directory %s; create it first", dir)}
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
