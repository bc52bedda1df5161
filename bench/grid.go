package main

import (
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
)

// A grid is a table of a page, with the sentences that say what it means.
type grid struct {
	title, means string // empty: it continues the one before
	head         []string
	lines        [][]string
}

// print prints it for people who watch.
func (g grid) print() {
	if len(g.lines) == 0 {
		return
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, line := range append([][]string{g.head}, g.lines...) {
		_, _ = fmt.Fprintf(w, "  %s\n", strings.Join(line, "\t"))
	}
	_ = w.Flush() // as what fmt prints
}

// markdown is how pages show it.
func (g grid) markdown() string {
	var text strings.Builder
	if g.title != "" {
		fmt.Fprintf(&text, "\n## %s\n\n%s\n", g.title, g.means)
	}
	if len(g.lines) == 0 {
		return text.String()
	}
	text.WriteString("\n| " + strings.Join(g.head, " | ") + " |\n|---|" + strings.Repeat("--:|", len(g.head)-1) + "\n")
	for _, line := range g.lines {
		text.WriteString("| " + strings.Join(line, " | ") + " |\n")
	}
	return text.String()
}
