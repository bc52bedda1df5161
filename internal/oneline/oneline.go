// Package oneline writes what other programs may have chosen, such as a name, a reason or the
// text of an error, for logs and terminals: in one line, without what would change them.
package oneline

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
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

// Some joins the first five of many names, and says how many more there are.
func Some(names []string) string {
	shown := strings.Join(names[:min(len(names), 5)], ", ")
	if len(names) > 5 {
		shown += fmt.Sprintf(" and %d more", len(names)-5)
	}
	return shown
}

// JSON writes a value as JSON, in lines that begin with indent, or in one if that is empty. A string
// in it has escapes, as JSON has them, for what Text escapes: encoding/json leaves the control
// characters above 0x7e to the terminal.
func JSON(w io.Writer, value any, indent string) error {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetIndent("", indent)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return err
	}
	_, err := w.Write(escaped(text.Bytes()))
	return err
}

// escaped escapes what cannot be printed in JSON. Outside of strings JSON is ASCII.
func escaped(text []byte) []byte {
	unsafe := func(r rune) bool { return r > '~' && !unicode.IsPrint(r) }
	var safe []byte
	for at := bytes.IndexFunc(text, unsafe); at >= 0; at = bytes.IndexFunc(text, unsafe) {
		r, size := utf8.DecodeRune(text[at:])
		safe = append(safe, text[:at]...)
		for _, unit := range utf16.Encode([]rune{r}) {
			safe = fmt.Appendf(safe, `\u%04x`, unit)
		}
		text = text[at+size:]
	}
	if safe == nil {
		return text
	}
	return append(safe, text...)
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
