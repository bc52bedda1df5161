package main

import (
	"os"

	"golang.org/x/term"
)

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
