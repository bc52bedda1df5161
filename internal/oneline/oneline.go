// Package oneline writes what other programs may have chosen, such as a name, a reason or the
// text of an error, for logs and terminals: in one line, without what would change them.
package oneline

import (
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Join joins the lines of a text, whatever a name or the server's message contains, and
// leaves out those that repeat: pgx reports an attempt with and one without TLS alike. It
// escapes the rest as Text does.
func Join(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.Join(strings.Fields(line), " "); line != "" && !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return Text(strings.Join(lines, " "))
}

// Text escapes, as Go does in a string, what cannot be printed: control characters, line
// breaks, bytes that are not UTF-8, and characters that change the direction of a text. It
// returns a text without any of them as it is, and so one that it has escaped.
func Text(s string) string {
	if !slices.ContainsFunc([]byte(s), func(b byte) bool { return b < ' ' || b > '~' }) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && size == 1 || !unicode.IsPrint(r) {
			quoted := strconv.Quote(s[:size])
			b.WriteString(quoted[1 : len(quoted)-1])
		} else {
			b.WriteString(s[:size])
		}
		s = s[size:]
	}
	return b.String()
}

// Cut returns the first characters of a text, and more if there were more.
func Cut(s string, most int, more string) string {
	n := 0
	for i := range s {
		if n == most {
			return s[:i] + more
		}
		n++
	}
	return s
}
