// Package oneline makes one line of a text, for logs and for terminals.
package oneline

import (
	"slices"
	"strings"
)

// Join joins the lines of a text, whatever a name or the server's message contains, and
// leaves out those that repeat: pgx reports an attempt with and one without TLS alike.
func Join(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.Join(strings.Fields(line), " "); line != "" && !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, " ")
}
