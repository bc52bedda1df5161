package main

import (
	"errors"
	"io"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/pgxlock/pgxlock/internal/oneline"
)

// format is the value of -o.
type format string

const (
	formatTable format = "table"
	formatJSON  format = "json"
)

func (f *format) String() string { return string(*f) }
func (f *format) Type() string   { return "format" }

func (f *format) Set(s string) error {
	switch format(s) {
	case formatTable, formatJSON:
		*f = format(s)
		return nil
	}
	return errors.New("use table or json")
}

func (f *format) addFlag(cmd *cobra.Command) {
	*f = formatTable
	cmd.Flags().VarP(f, "output", "o", "table or json")
	if err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json"}, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic("pgxlock: " + err.Error()) // the flag was added a line above
	}
}

func printJSON(w io.Writer, v any) error {
	return oneline.JSON(w, v, "  ")
}

// palette paints text, if the reader sees colors.
type palette bool

// Escape sequences of ECMA-48, "select graphic rendition".
const (
	bold   = "1"
	faint  = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
)

func (p palette) paint(color, text string) string {
	if !p || color == "" || text == "" {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// colors decides whether a command's output gets colors: on a terminal only,
// and not where somebody asked for none (https://no-color.org).
func colors(cmd *cobra.Command) palette {
	if off, err := cmd.Flags().GetBool("no-color"); err == nil && off {
		return false
	}
	file, ok := cmd.OutOrStdout().(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" || runtime.GOOS == "windows" {
		return false
	}
	_, _, terminal := window(file)
	return palette(terminal)
}

// printable quotes control characters, which a terminal would obey: any caller may choose a
// name.
func printable(s string) string { return oneline.Text(s) }

// shellQuote makes a word for a shell of a text that is shown as part of a
// command.
func shellQuote(text string) string {
	if strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789_") == "" && text != "" {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// window reports whether a file is a terminal, and how many columns and rows it shows;
// 0: it does not say.
func window(file *os.File) (columns, rows int, terminal bool) {
	fd := int(file.Fd())
	columns, rows, err := term.GetSize(fd)
	if err != nil {
		return 0, 0, term.IsTerminal(fd)
	}
	return columns, rows, true
}
