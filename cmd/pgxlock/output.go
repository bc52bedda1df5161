package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
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
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// palette paints text, if whoever reads it sees colors.
type palette bool

// Escape sequences of ECMA-48, "select graphic rendition".
const (
	bold   = "1"
	faint  = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
	cyan   = "36"
)

func (p palette) paint(color, text string) string {
	if !p || color == "" {
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
	_, terminal := window(file)
	return palette(terminal)
}

// cell is a field of a table.
type cell struct{ text, color string }

// printTable prints rows in columns as wide as they need to be. It measures
// before it paints, which text/tabwriter cannot.
func printTable(w io.Writer, p palette, indent string, header []string, rows [][]cell) error {
	head := make([]cell, len(header))
	for i, title := range header {
		head[i] = cell{title, bold}
	}
	rows = append([][]cell{head}, rows...)
	widths := make([]int, len(header))
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(c.text))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		line := indent
		for i, c := range row {
			line += p.paint(c.color, c.text) + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c.text)+2)
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// printable shows what a terminal would obey: names come from whoever locks.
func printable(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	quoted := strconv.Quote(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

// short cuts a text to n characters.
func short(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// brief writes a duration as precisely as people want to know it.
func brief(d time.Duration) string {
	if d < 0 {
		return "-" + brief(-d)
	}
	const day = 24 * time.Hour
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < day:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
}

// shellQuote makes a word for a shell of a text that is shown as part of a
// command.
func shellQuote(text string) string {
	if strings.Trim(text, "abcdefghijklmnopqrstuvwxyz0123456789_") == "" && text != "" {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}
