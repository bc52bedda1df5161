// Find looks for the server's binaries on this machine.

package pgserver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// ErrNoBinaries means that this machine has no PostgreSQL server binaries
// where Find looks. Its text says what to do about it.
var ErrNoBinaries = errors.New("no PostgreSQL server binaries found: install your system's PostgreSQL server package, or put the directory that holds initdb and postgres on PATH")

// BinDirEnv is the environment variable that names the directory of the
// binaries to use. Where it is set, no other place will do.
const BinDirEnv = "PGXLOCK_TEST_BINDIR"

// Binaries is a directory that holds initdb and postgres, and their version.
type Binaries struct {
	Dir     string // such as /usr/lib/postgresql/15/bin
	Version string // such as 15.18
}

// String describes the binaries for people.
func (b Binaries) String() string {
	return fmt.Sprintf("PostgreSQL %s from %s", b.Version, b.Dir)
}

func (b Binaries) tool(name string) string { return filepath.Join(b.Dir, name) }

// packageDirs are the places where packages put binaries that are not on PATH.
var packageDirs = []string{
	"/usr/lib/postgresql/*/bin",                                 // Debian, Ubuntu
	"/usr/pgsql-*/bin",                                          // Red Hat, from PostgreSQL's own repository
	"/usr/lib/postgresql*/bin",                                  // SUSE
	"/usr/libexec/postgresql*",                                  // Alpine
	"/opt/homebrew/opt/postgresql@*/bin",                        // macOS, Homebrew on Apple silicon
	"/usr/local/opt/postgresql@*/bin",                           // macOS, Homebrew on Intel
	"/Applications/Postgres.app/Contents/Versions/*/bin",        // macOS, Postgres.app
	"/Library/PostgreSQL/*/bin",                                 // macOS, the EDB installer
	"/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",           // Homebrew on Linux
	"/nix/var/nix/profiles/default/bin", "/usr/local/pgsql/bin", // Nix, PostgreSQL's own make install
}

// Find takes what BinDirEnv names. Else it looks on PATH, then where pg_config
// says, then where packages install PostgreSQL, the highest version first, and
// returns ErrNoBinaries if there are none.
func Find() (Binaries, error) {
	if dir := os.Getenv(BinDirEnv); dir != "" {
		b, err := binariesIn(dir)
		if err != nil {
			return Binaries{}, fmt.Errorf("%s is set, but there is no PostgreSQL server: %w", BinDirEnv, err)
		}
		return b, nil
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		if b, err := binariesIn(filepath.Dir(path)); err == nil {
			return b, nil
		}
	}
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		if b, err := binariesIn(strings.TrimSpace(string(out))); err == nil {
			return b, nil
		}
	}
	if b, ok := highestIn(packageDirs); ok {
		return b, nil
	}
	return Binaries{}, ErrNoBinaries
}

// highestIn returns the binaries of the highest version in the directories
// that match one of the patterns.
func highestIn(patterns []string) (Binaries, bool) {
	var found []Binaries
	for _, pattern := range patterns {
		dirs, _ := filepath.Glob(pattern) // fails only for a malformed pattern, and ours are constants
		for _, dir := range dirs {
			if b, err := binariesIn(dir); err == nil {
				found = append(found, b)
			}
		}
	}
	if len(found) == 0 {
		return Binaries{}, false
	}
	return slices.MaxFunc(found, func(a, b Binaries) int {
		return slices.Compare(versionNumbers(a.Version), versionNumbers(b.Version))
	}), true
}

// binariesIn returns the binaries in one directory. A directory with the client
// programs only, as /usr/bin on Debian, has none. A directory of links, perhaps
// to some of the programs only, stands for the one that they lead to.
func binariesIn(dir string) (Binaries, error) {
	path, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres"))
	if err != nil {
		return Binaries{}, err
	}
	if path, err = filepath.Abs(path); err != nil {
		return Binaries{}, err
	}
	dir = filepath.Dir(path)
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return Binaries{}, err
	}
	out, err := exec.Command(path, "--version").Output()
	if err != nil {
		return Binaries{}, err
	}
	// postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)
	fields := strings.Fields(string(out))
	if len(fields) < 3 {
		return Binaries{}, fmt.Errorf("%s --version says %q", path, out)
	}
	return Binaries{Dir: dir, Version: fields[2]}, nil
}

// versionNumbers turns 15.18 into 15, 18, and 19beta1 into 19.
func versionNumbers(version string) []int {
	var numbers []int
	for part := range strings.SplitSeq(version, ".") {
		digits, _, _ := strings.Cut(part, "beta")
		digits, _, _ = strings.Cut(digits, "rc")
		n, err := strconv.Atoi(digits)
		if err != nil {
			break // such as the "devel" of a server built from its repository
		}
		numbers = append(numbers, n)
	}
	return numbers
}
