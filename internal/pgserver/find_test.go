//go:build !windows

package pgserver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeBinaries makes programs in dir/bin that only know their version.
func fakeBinaries(t *testing.T, dir, version string) string {
	t.Helper()
	bin := filepath.Join(dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"initdb", "postgres"} {
		script := fmt.Sprintf("#!/bin/sh\necho '%s (PostgreSQL) %s (made up)'\n", name, version)
		if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return bin
}

func TestHighestInstalledVersionIsFound(t *testing.T) {
	dir := t.TempDir()
	for _, version := range []string{"9.6.24", "17.11", "17.2", "16.4"} {
		fakeBinaries(t, filepath.Join(dir, version), version)
	}
	b, ok := highestIn([]string{filepath.Join(dir, "nothing", "*"), filepath.Join(dir, "*", "bin")})
	if want := (Binaries{filepath.Join(dir, "17.11", "bin"), "17.11"}); !ok || b != want {
		t.Errorf("found %v %t, want %v", b, ok, want)
	}
}

func TestDirectoryThatIsNamedIsUsedAndNotReplaced(t *testing.T) {
	named, other := fakeBinaries(t, t.TempDir(), "14.2"), fakeBinaries(t, t.TempDir(), "19.1")
	t.Setenv("PATH", other+":"+os.Getenv("PATH"))
	t.Setenv(BinDirEnv, named)
	b, err := Find()
	if want := (Binaries{named, "14.2"}); err != nil || b != want {
		t.Errorf("found %v %v, want %v", b, err, want)
	}
	t.Setenv(BinDirEnv, t.TempDir())
	b, err = Find()
	if err == nil || errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), BinDirEnv) {
		t.Errorf("found %v %v, want an error that names %s", b, err, BinDirEnv)
	}
}

func TestBinariesOnPathComeFirst(t *testing.T) {
	t.Setenv(BinDirEnv, "")
	bin := fakeBinaries(t, t.TempDir(), "19beta1")
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	b, err := Find()
	if want := (Binaries{bin, "19beta1"}); err != nil || b != want {
		t.Errorf("found %v %v, want %v", b, err, want)
	}
}

func TestLinksOnPathLeadToTheBinaries(t *testing.T) {
	t.Setenv(BinDirEnv, "")
	bin, links := fakeBinaries(t, t.TempDir(), "17.11"), t.TempDir()
	if err := os.Symlink(filepath.Join(bin, "postgres"), filepath.Join(links, "postgres")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", links+":"+os.Getenv("PATH"))
	b, err := Find()
	if want := (Binaries{bin, "17.11"}); err != nil || b != want {
		t.Errorf("found %v %v, want %v", b, err, want)
	}
}

func TestWithoutBinariesTheErrorIsTyped(t *testing.T) {
	t.Setenv(BinDirEnv, "")
	t.Setenv("PATH", t.TempDir())
	dirs := packageDirs
	packageDirs = nil
	t.Cleanup(func() { packageDirs = dirs })
	if b, err := Find(); !errors.Is(err, ErrNoBinaries) {
		t.Errorf("found %v %v, want ErrNoBinaries", b, err)
	}
	if s, err := Start(t.Context(), Config{}); !errors.Is(err, ErrNoBinaries) {
		t.Errorf("started %v %v, want ErrNoBinaries", s, err)
	}
}
