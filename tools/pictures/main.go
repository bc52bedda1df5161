// Command pictures draws what commands show in a terminal, from real runs of bin/pgxlock and
// bin/demo in a terminal of tmux, and writes it to docs/pictures:
//
//	make pictures
//
// Its argument is the project's root directory. The other pictures there are drawn by hand.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

// folder is where the pictures are, below the root directory.
const folder = "docs/pictures"

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: pictures DIRECTORY")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "pictures:", err)
		os.Exit(1)
	}
}

func write(root string) error {
	pictures, err := captured(root)
	if err != nil {
		return err
	}
	for name, picture := range pictures {
		if err := os.WriteFile(filepath.Join(root, folder, name), []byte(picture.String()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
