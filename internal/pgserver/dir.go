// Each server has a directory. The next start removes those that killed runs left.

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

const (
	dirPrefix = "pgxlock-"
	lockName  = "owner.lock"

	// maxSocketPath is what a socket's address holds on the tightest system
	// (macOS: 104 bytes with the final zero; Linux: 108).
	maxSocketPath = 103
)

// directory is where one server lives. It is ours; the parts that the server
// writes belong to its account.
//
//	owner.lock       who we are; locked while we or any process of the server live
//	postgresql.conf  the settings
//	data/            the database cluster
//	s/               the socket, closed to other users
type directory struct {
	path string
	lock *os.File
}

func (d *directory) data() string   { return filepath.Join(d.path, "data") }
func (d *directory) config() string { return filepath.Join(d.path, "postgresql.conf") }
func (d *directory) socket() string { return filepath.Join(d.path, "s") }

// copied is the file with the password of a cluster that processes copy.
func (d *directory) copied() string { return filepath.Join(d.path, "copied") }

// makeDirectory makes a directory that the account can reach, in the usual
// place for temporary files if that will do. root's TMPDIR is often closed to
// others, and a path can be too long for a socket.
//
// The data need not survive the machine, so they are kept in its memory, unless
// somebody measures what a disk costs or says where temporary files belong: every
// database is 300 files, and a disk's file system that has just lost thousands of
// them is slow to make new ones.
func makeDirectory(ctx context.Context, bin Binaries, as *account, onDisk bool) (*directory, error) {
	parents := []string{os.TempDir(), "/tmp", "/var/tmp"}
	if place := memory(); !onDisk && place != "" && os.Getenv("TMPDIR") == "" {
		parents = slices.Insert(parents, 0, place)
	}
	var errs []error
	for i, parent := range parents {
		if slices.Contains(parents[:i], parent) {
			continue
		}
		removeStale(parent)
		d, err := makeDirectoryIn(ctx, parent, bin, as)
		if err == nil {
			return d, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", parent, err))
	}
	return nil, fmt.Errorf("no place for a server's directory: %w", errors.Join(errs...))
}

func makeDirectoryIn(ctx context.Context, parent string, bin Binaries, as *account) (_ *directory, err error) {
	path, err := os.MkdirTemp(parent, dirPrefix)
	if err != nil {
		return nil, err
	}
	d := &directory{path: path}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.remove())
		}
	}()
	if path := filepath.Join(d.socket(), ".s.PGSQL.65535"); len(path) > maxSocketPath {
		return nil, fmt.Errorf("%s is %d bytes long, and a socket's path can have %d", path, len(path), maxSocketPath)
	}
	if d.lock, err = lockDirectory(path); err != nil {
		return nil, err
	}
	if as != nil {
		// The account may pass through, not look around.
		if err := os.Chmod(path, 0o711); err != nil {
			return nil, err
		}
	}
	for _, dir := range []string{d.data(), d.socket()} {
		if err := as.mkdir(dir); err != nil {
			return nil, err
		}
	}
	// Whether the account can get here is the kernel's word, not ours: modes,
	// access lists and mount options all have a say.
	if err := run(ctx, d.socket(), as, bin.tool("postgres"), "--version"); err != nil {
		return nil, fmt.Errorf("not within reach of the server's user: %w", err)
	}
	return d, nil
}

// lockDirectory makes the lock file. It gets its name only once it is locked:
// removeStale, perhaps in another process, takes a file of that name that is
// not locked for that of a dead owner.
func lockDirectory(path string) (*os.File, error) {
	f, err := os.CreateTemp(path, lockName)
	if err != nil {
		return nil, err
	}
	if _, err := tryLock(f); err != nil { // nobody else knows the file
		return nil, errors.Join(err, f.Close())
	}
	if _, err := f.WriteString(strconv.Itoa(os.Getpid()) + "\n"); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := os.Rename(f.Name(), filepath.Join(path, lockName)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// remove removes the directory and gives up its lock. Once more does nothing.
func (d *directory) remove() error {
	err := os.RemoveAll(d.path)
	if d.lock != nil {
		err = errors.Join(err, d.lock.Close())
		d.lock = nil
	}
	return err
}

// removeStale removes the directories of runs that were killed. Every process
// of a server inherits the open lock file, so a lock that we can have means
// that the owner, the postmaster and all its children are gone.
func removeStale(parent string) {
	paths, _ := filepath.Glob(filepath.Join(parent, dirPrefix+"*")) // fails only for a malformed pattern
	for _, path := range paths {
		info, err := os.Lstat(path)
		if err != nil || !info.IsDir() || !ours(info) {
			continue
		}
		lock, err := os.Open(filepath.Join(path, lockName))
		if err != nil {
			continue // not a server's, or one in the making
		}
		if free, _ := tryLock(lock); free {
			_ = os.RemoveAll(path) // what resists, the next run tries again
		}
		_ = lock.Close()
	}
}
