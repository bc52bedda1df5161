// Command pictures draws the pictures of the documents, and writes them to docs/pictures:
//
//	go run -C tools ./pictures ..              # those of what the source says, which a test compares
//	go run -C tools ./pictures -terminal ..    # those of real runs of bin/pgxlock, in a terminal of tmux
//
// Its argument is the project's root directory.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

// folder is where the pictures are, below the root directory.
const folder = "docs/pictures"

func main() {
	terminal := flag.Bool("terminal", false, "draw what commands show in a terminal, on a throw-away server")
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: pictures [-terminal] DIRECTORY")
		os.Exit(2)
	}
	draw := drawn
	if *terminal {
		draw = captured
	}
	if err := write(flag.Arg(0), draw); err != nil {
		fmt.Fprintln(os.Stderr, "pictures:", err)
		os.Exit(1)
	}
}

// drawn returns the pictures of what the source of the project says, by their file names.
func drawn(root string) (map[string]*canvas, error) {
	rooms, err := packages(root)
	if err != nil {
		return nil, err
	}
	return map[string]*canvas{
		"timeline.svg":     timeline(),
		"which-lock.svg":   whichLock(),
		"architecture.svg": architecture(rooms),
	}, nil
}

func write(root string, draw func(root string) (map[string]*canvas, error)) error {
	pictures, err := draw(root)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
		return err
	}
	for name, picture := range pictures {
		if err := os.WriteFile(filepath.Join(root, folder, name), []byte(picture.String()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
