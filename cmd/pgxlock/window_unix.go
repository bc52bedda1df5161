//go:build unix

package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// window reports whether a file is a terminal, and how many rows it shows; 0: it does
// not say.
func window(file *os.File) (rows int, terminal bool) {
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, false
	}
	return int(size.Row), true
}
