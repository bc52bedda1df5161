package main

import (
	"cmp"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
)

// A table is what a list shows of each row, and what of that a narrow screen can do without.
type table struct {
	titles  []string
	holders []string // are holder ids, of which the random part is shortened before all else, and the rest before keys
	keys    []string // are shortened in the middle
	prose   string   // is broken between words
	extra   []string // are left out, in this order, before a name in a holder id is shortened; prose is made narrower first
	last    []string // are left out before a key is shortened to less than ample, or a holder id to less than shortest
}

const (
	gap      = 2  // between two columns
	shortest = 20 // of an id with which people can do something
	ample    = 40 // of a key
	fewest   = 4  // characters of the random part of a holder id
	narrow   = 24 // of prose that is pleasant to read
)

// cell is a field of a table.
type cell struct{ text, color string }

// A sheet is what a table is printed on.
type sheet struct {
	columns int    // 0: as many as it needs, a pipe for example
	more    string // says how to see what there was no room for; "": nothing is left out, rows have several lines
	clips   bool   // what is wider is not seen; otherwise the terminal wraps it, and copies it as a whole
	briefed bool   // texts of the prose are shortened already
}

// brief reports whether there is no room for long texts.
func (s sheet) brief() bool { return s.columns > 0 && s.more != "" }

// addWideFlag adds the flag of commands that print tables.
func addWideFlag(cmd *cobra.Command) {
	cmd.Flags().Bool("wide", false, "on a narrow terminal leave out and shorten nothing: each row may have several lines")
}

func isWide(cmd *cobra.Command) bool {
	wide, err := cmd.Flags().GetBool("wide")
	return err == nil && wide
}

// sheetOf is what a command prints tables on.
func sheetOf(cmd *cobra.Command) sheet {
	s := sheet{columns: columns(cmd.OutOrStdout()), more: "--wide"}
	if isWide(cmd) {
		s.more = ""
	}
	return s
}

// columns is how wide the terminal is to which something is written; 0: it is none.
func columns(w io.Writer) int {
	if file, ok := w.(*os.File); ok && os.Getenv("TERM") != "dumb" {
		width, _, _ := window(file)
		return width
	}
	return 0
}

// print prints rows in columns as wide as they need to be. On a screen it leaves out what is
// empty in all rows. What does not fit there is left out or shortened, or is in the next line. It
// measures before it paints, which text/tabwriter cannot.
func (t table) print(w io.Writer, p palette, s sheet, rows [][]cell) error {
	head := make([]cell, len(t.titles))
	for i, title := range t.titles {
		head[i] = cell{title, bold}
	}
	rows = append([][]cell{head}, rows...)
	var shown []int
	widths := make([]int, len(t.titles))
	for i := range t.titles {
		empty := true
		for n, row := range rows {
			widths[i] = max(widths[i], runewidth.StringWidth(row[i].text))
			empty = empty && (n == 0 || row[i].text == "")
		}
		if s.columns == 0 || !empty || len(rows) == 1 {
			shown = append(shown, i)
		}
	}
	note := ""
	lines := [][]int{shown} // of each row, the columns
	switch {
	case s.columns == 0:
	case s.more == "":
		lines = broken(shown, widths, s)
	default:
		natural := slices.Clone(widths)
		if t.over(shown, widths, s) > 0 {
			t.abbreviate(rows, widths)
		}
		lines[0], note = t.fit(shown, natural, widths, s)
	}
	var b strings.Builder
	for _, row := range rows {
		for n, columns := range lines {
			if n > 0 && !slices.ContainsFunc(columns, func(i int) bool { return row[i].text != "" }) {
				continue
			}
			t.write(&b, p, s, row, columns, widths, strings.Repeat(" ", indentation*min(n, 1)))
		}
	}
	if note != "" {
		b.WriteString(p.paint(faint, wrap(note, s.columns)) + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// indentation is that of the second line of a row.
const indentation = 4

// write writes some columns of a row.
func (t table) write(b *strings.Builder, p palette, s sheet, row []cell, columns, widths []int, indent string) {
	texts, height := make([][]string, len(columns)), 1
	for n, i := range columns {
		texts[n] = strings.Split(t.cut(s, i, row[i].text, widths[i]), "\n")
		height = max(height, len(texts[n]))
	}
	for y := range height {
		line := indent
		for n, i := range columns {
			text := ""
			if y < len(texts[n]) {
				text = texts[n][y]
			}
			line += p.paint(row[i].color, text) + strings.Repeat(" ", max(0, widths[i]-runewidth.StringWidth(text))+gap)
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}

// broken distributes columns over as many lines as they need.
func broken(shown, widths []int, s sheet) (lines [][]int) {
	var line []int
	used := -gap
	for _, i := range shown {
		if s.clips {
			widths[i] = min(widths[i], max(1, s.columns-indentation))
		}
		if len(line) > 0 && used+gap+widths[i] > s.columns {
			lines, line, used = append(lines, line), nil, indentation-gap
		}
		line = append(line, i)
		used += gap + widths[i]
	}
	return append(lines, line)
}

// abbreviate leaves of the random part of each holder id what tells it from all others, at the
// end: evict finds the holder by that.
func (t table) abbreviate(rows [][]cell, widths []int) {
	short := make(map[string]string) // by the text
	for kept, unique := fewest, false; !unique; kept++ {
		whole := make(map[string]string) // by the short one
		unique = true
		for _, row := range rows[1:] {
			for i, title := range t.titles {
				if text := row[i].text; slices.Contains(t.holders, title) {
					short[text] = abbreviated(text, kept)
					unique = unique && cmp.Or(whole[short[text]], text) == text
					whole[short[text]] = text
				}
			}
		}
	}
	for i, title := range t.titles {
		if !slices.Contains(t.holders, title) {
			continue
		}
		widths[i] = runewidth.StringWidth(title)
		for _, row := range rows[1:] {
			row[i].text = short[row[i].text]
			widths[i] = max(widths[i], runewidth.StringWidth(row[i].text))
		}
	}
}

// over is by how many columns those that are shown are too wide.
func (t table) over(shown, widths []int, s sheet) int {
	total := -gap - s.columns
	for _, i := range shown {
		total += gap + widths[i]
	}
	return total
}

// fit returns the columns for which there is room, with a note of what is missing then.
func (t table) fit(shown, natural, widths []int, s sheet) (fitting []int, note string) {
	is := func(titles []string, i int) bool { return slices.Contains(titles, t.titles[i]) }
	// over is by how much the columns are too wide, if ids are shortened or not.
	over := func(shortened bool) int {
		total := t.over(shown, widths, s)
		for _, i := range shown {
			switch {
			case shortened && is(t.holders, i):
				total -= max(0, widths[i]-shortest)
			case shortened && is(t.keys, i):
				total -= max(0, widths[i]-ample)
			}
		}
		return total
	}
	var out []string
	narrowed := false
	leaveOut := func(titles []string, shortened bool) {
		for _, title := range titles {
			i, excess := slices.Index(t.titles, title), over(shortened)
			switch n := slices.Index(shown, i); {
			case n < 0 || excess <= 0:
			case title == t.prose && !narrowed:
				widths[i] = min(widths[i], max(narrow, widths[i]-excess))
				narrowed = true
			default:
				shown, out = slices.Delete(slices.Clone(shown), n, n+1), append(out, title)
			}
		}
	}
	leaveOut(t.extra, false)
	leaveOut(t.last, true)
	for _, title := range slices.Backward(out) { // one that was left out before a wider one may have room
		if i := slices.Index(t.titles, title); over(is(t.last, i))+gap+widths[i] <= 0 {
			shown, out = append(shown, i), slices.DeleteFunc(out, func(one string) bool { return one == title })
			slices.Sort(shown)
		}
	}
	for _, able := range []func(int) bool{
		func(i int) bool { return is(t.holders, i) && widths[i] > shortest },
		func(i int) bool { return is(t.keys, i) && widths[i] > shortest },
		func(i int) bool { return widths[i] > 2 }, // one wide character
	} {
		for over(false) > 0 {
			widest := -1
			for _, i := range shown {
				if able(i) && (widest < 0 || widths[i] > widths[widest]) {
					widest = i
				}
			}
			if widest < 0 {
				break
			}
			widths[widest]--
		}
	}
	var short []string
	for _, i := range shown {
		if t.titles[i] == t.prose {
			widths[i] = min(natural[i], widths[i]-over(false))
		}
		if t.titles[i] == t.prose && s.briefed || t.titles[i] != t.prose && widths[i] < natural[i] {
			short = append(short, t.titles[i])
		}
	}
	var notes []string
	for _, part := range []struct {
		what   string
		titles []string
	}{{"left out: ", out}, {"shortened: ", short}} {
		if len(part.titles) > 0 {
			notes = append(notes, part.what+strings.Join(part.titles, ", "))
		}
	}
	if len(notes) > 0 {
		note = strings.Join(notes, "; ") + " (" + s.more + " shows all)"
	}
	return shown, note
}

// cut makes a text of a column fit into so many columns of the screen.
func (t table) cut(s sheet, column int, text string, columns int) string {
	switch {
	case runewidth.StringWidth(text) <= columns:
		return text
	case t.titles[column] == t.prose, s.more == "":
		return wrap(text, columns)
	case slices.Contains(t.keys, t.titles[column]), slices.Contains(t.holders, t.titles[column]):
		return readable.Shortened(text, columns)
	}
	return runewidth.Truncate(text, columns, "…")
}

// random is the part of a holder id that only tells one acquisition from another.
var random = regexp.MustCompile(`:[A-Z2-7]{26}\b`)

// abbreviated leaves so many characters of the random part of a holder id, at the end.
func abbreviated(id string, kept int) string {
	return random.ReplaceAllStringFunc(id, func(part string) string { return ":…" + part[len(part)-kept:] })
}

// wrap breaks a text into lines of so many columns, between words where it can; 0: as many as it
// needs.
func wrap(text string, columns int) string {
	if columns == 0 || runewidth.StringWidth(text) <= columns {
		return text
	}
	return runewidth.Wrap(strings.Join(fold(text, columns), "\n"), columns)
}

// painted is what a palette adds to a text.
var painted = regexp.MustCompile("\x1b\\[[0-9]*m")

// fold breaks a text, which may be painted, between words into lines of so many columns. A longer
// word is a line of its own.
func fold(text string, columns int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && runewidth.StringWidth(painted.ReplaceAllString(line+" "+word, "")) > columns {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(lines, line)
}

// hang writes a text behind its beginning. On a screen of so many columns (0: it is none) it is
// broken between words, and its other lines are indented, by no less than the beginning has.
func hang(begin, text string, indent, columns int) string {
	if columns > 0 {
		text = strings.Join(fold(text, max(1, columns-indent)), "\n"+strings.Repeat(" ", indent))
	}
	return begin + text + "\n"
}
