package formats

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
)

// Write puts the files into a directory, which may be that of a project's own migrations.

// ErrInTheWay means that a file of somebody's keeps ours from being written.
var ErrInTheWay = errors.New("nothing was written")

// Write writes the files into the directory and returns the paths of those that
// were not there. It changes no file, and writes nothing if there is one in the
// way: of the same name with another content, or of another name with the same
// number, which a tool would refuse.
func Write(dir string, files []File) (written []string, err error) {
	there, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	taken := make(map[string]string) // numbers, by files that are not ours
	for _, entry := range there {
		if n := number(entry.Name()); n != "" && !slices.ContainsFunc(files, func(f File) bool { return f.Name == entry.Name() }) {
			taken[n] = entry.Name()
		}
	}
	var missing []File
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name))
		switch {
		case err == nil && string(text) == f.Text:
			continue
		case err == nil:
			return nil, fmt.Errorf("%w: %s is there and differs", ErrInTheWay, filepath.Join(dir, f.Name))
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		case slices.ContainsFunc(there, func(e fs.DirEntry) bool { return e.Name() == f.Name }):
			return nil, fmt.Errorf("%w: %s is a link that leads nowhere", ErrInTheWay, filepath.Join(dir, f.Name))
		}
		if other := taken[number(f.Name)]; other != "" {
			return nil, fmt.Errorf("%w: %s has the number of %s; choose another one (--number), or a directory of its own",
				ErrInTheWay, filepath.Join(dir, other), f.Name)
		}
		missing = append(missing, f)
	}
	for _, f := range missing {
		path := filepath.Join(dir, f.Name)
		if err := write(path, f.Text); err != nil {
			return written, err
		}
		written = append(written, path)
	}
	return written, nil
}

// write makes a new file; never does it replace one.
func write(path, text string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) //nolint:gosec // as others may read the rest of a project
	if err != nil {
		return err
	}
	_, err = file.WriteString(text)
	if err = errors.Join(err, file.Close()); err != nil {
		err = errors.Join(err, os.Remove(path)) // half of it would be in the way of the next attempt
	}
	return err
}

var numbered = regexp.MustCompile(`^[VU]?0*(\d+)_.*\.(sql|go)$`)

// number is that of a migration's file, "" for any other file.
func number(name string) string {
	if m := numbered.FindStringSubmatch(name); m != nil {
		return m[1]
	}
	return ""
}
