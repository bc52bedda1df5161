//go:build !unix

package main

import "os"

// window reports whether a file looks like a terminal. How many rows it shows is not
// known.
func window(file *os.File) (rows int, terminal bool) {
	info, err := file.Stat()
	return 0, err == nil && info.Mode()&os.ModeCharDevice != 0
}
