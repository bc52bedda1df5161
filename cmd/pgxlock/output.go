package main

import (
	"errors"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
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

// cell is a field of a table.
type cell struct{ text, color string }

// printTable prints rows in columns as wide as they need to be. On a screen of so many
// columns (0: there is none) it leaves out what is empty in all rows, and wraps what does
// not fit. It measures before it paints, which text/tabwriter cannot.
func printTable(w io.Writer, p palette, indent string, screen int, header []string, rows [][]cell) error {
	head := make([]cell, len(header))
	for i, title := range header {
		head[i] = cell{title, bold}
	}
	rows = append([][]cell{head}, rows...)
	var shown, titles, widths []int
	for i := range header {
		width, empty := 0, true
		for n, row := range rows {
			width = max(width, runewidth.StringWidth(row[i].text))
			empty = empty && (n == 0 || row[i].text == "")
		}
		if screen == 0 || !empty || len(rows) == 1 {
			shown, titles, widths = append(shown, i), append(titles, runewidth.StringWidth(header[i])), append(widths, width)
		}
	}
	if screen > 0 {
		fit(widths, titles, screen-runewidth.StringWidth(indent)-gap*(len(widths)-1))
	}
	var b strings.Builder
	for _, row := range rows {
		wrapped, height := make([][]string, len(shown)), 1
		for n, i := range shown {
			wrapped[n] = strings.Split(wrap(row[i].text, widths[n]), "\n")
			height = max(height, len(wrapped[n]))
		}
		for y := range height {
			line := indent
			for n, i := range shown {
				text := ""
				if y < len(wrapped[n]) {
					text = wrapped[n][y]
				}
				line += p.paint(row[i].color, text) + strings.Repeat(" ", max(0, widths[n]-runewidth.StringWidth(text))+gap)
			}
			b.WriteString(strings.TrimRight(line, " ") + "\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// gap is the space between two columns of a table.
const gap = 2

// fit makes the widest columns narrower until all fit into the room: none than its title,
// unless that is not enough.
func fit(widths, titles []int, room int) {
	total := 0
	for _, width := range widths {
		total += width
	}
	for _, narrowest := range [][]int{titles, slices.Repeat([]int{2}, len(widths))} { // 2: one wide character
		for total > room {
			widest := -1
			for i, width := range widths {
				if width > narrowest[i] && (widest < 0 || width > widths[widest]) {
					widest = i
				}
			}
			if widest < 0 {
				break
			}
			widths[widest]--
			total--
		}
	}
}

// wrap breaks a text into lines of so many columns; 0: as many as it needs.
func wrap(text string, columns int) string {
	if columns == 0 {
		return text
	}
	return runewidth.Wrap(text, columns)
}

// printable quotes control characters, which a terminal would obey: any caller may choose a
// name.
func printable(s string) string { return oneline.Text(s) }

// short cuts a text to n columns.
func short(s string, n int) string {
	return runewidth.Truncate(s, n, "…")
}

// brief writes a duration as precisely as people want to know it.
func brief(d time.Duration) string { return readable.Duration(d) }

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
