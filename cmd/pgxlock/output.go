package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

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

func (f *format) addFlag(cmd *cobra.Command) {
	*f = formatTable
	choiceVar(cmd, f, "output", "o", "format", "table or json", formatTable, formatJSON)
}

// choice is the value of a flag that takes one of some words.
type choice[T ~string] struct {
	value *T
	what  string // they are, for the help
	words []T
}

func (c choice[T]) String() string { return string(*c.value) }
func (c choice[T]) Type() string   { return c.what }

func (c choice[T]) Set(word string) error {
	if !slices.Contains(c.words, T(word)) {
		return errors.New("use " + anyOf(c.words))
	}
	*c.value = T(word)
	return nil
}

// anyOf is "a, b or c".
func anyOf[T ~string](words []T) string {
	texts, last := texts(words), len(words)-1
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}

func texts[T ~string](words []T) []string {
	return views(words, func(word T) string { return string(word) })
}

// choiceVar adds a flag that takes one of some words. short is its letter, "" for none.
func choiceVar[T ~string](cmd *cobra.Command, value *T, name, short, what, usage string, words ...T) {
	cmd.Flags().VarP(choice[T]{value, what, words}, name, short, usage)
	complete(cmd, name, texts(words))
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

// complain writes a message to standard error.
func complain(stderr io.Writer, text string) {
	const begin = "pgxlock: "
	_, _ = io.WriteString(stderr, hang(begin, text, len(begin), columns(stderr))) // where that fails nobody reads
}

// printable quotes control characters, which a terminal would obey: any caller may choose a
// name.
func printable(s string) string { return oneline.Text(s) }

// timestamp writes a time; "" if it is not known.
func timestamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format(time.RFC3339)
}

// counted writes a number of things.
func counted(n int64, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

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
