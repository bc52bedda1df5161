package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

// A daemon is a server of some peers', made from Debian's packages, or else the
// one that is installed.
type daemon struct {
	called  string // for people
	keeps   string // how it is run: what it takes to lose a lock
	script  string // in scripts, prints the path of the program
	program string // on PATH

	args  func(dir string) []string
	ready func(ctx context.Context, dir string) error

	path    string // the program; empty if it is not there
	version string
	missing error // why not
}

// String describes it for the header.
func (d *daemon) String() string {
	if d.path == "" {
		return fmt.Sprintf("no %s: %v", d.called, d.missing)
	}
	return fmt.Sprintf("%s %s from %s, %s", d.called, d.version, filepath.Dir(d.path), d.keeps)
}

// find looks for the program. Without it the rows that need it are left out; an
// error is a program that does not run, or the end of ctx.
func (d *daemon) find(ctx context.Context) error {
	var err error
	if d.path, err = unpacked(ctx, d.script); err != nil {
		var errPath error
		if d.path, errPath = exec.LookPath(d.program); errPath != nil {
			d.missing = fmt.Errorf("%w; %w", err, errPath)
			return ctx.Err()
		}
	}
	out, err := exec.CommandContext(ctx, d.path, "--version").Output()
	if err != nil {
		return fmt.Errorf("%s --version: %w", d.path, err)
	}
	d.version = versionPattern.FindString(string(out))
	return nil
}

var versionPattern = regexp.MustCompile(`\d+(\.\d+)+`)

// unpacked runs a script that unpacks a program, and returns the program's path.
// The first time it takes a minute, and says what it does.
func unpacked(ctx context.Context, script string) (string, error) {
	path, err := inProject("scripts", script)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, path)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it removes what it has begun
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		return "", fmt.Errorf("%w: %s", err, lines[len(lines)-1])
	}
	return strings.TrimSpace(string(out)), nil
}

// daemon starts a daemon for this row, unless it runs, and returns its directory.
func (s *stage) daemon(ctx context.Context, d *daemon) (dir string, err error) {
	if dir, ok := s.daemons[d]; ok {
		return dir, nil
	}
	c, err := s.server.Companion(ctx, d.path, func(its string) []string {
		dir = its
		return d.args(its)
	}, d.ready)
	if err != nil {
		return "", err
	}
	s.cleanup(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), stopPatience)
		defer cancel()
		return c.Stop(ctx)
	})
	s.daemons[d], s.pids[d] = dir, c.PID()
	return dir, nil
}

// inProject finds a file of the project from its root directory, or from that of
// this module.
func inProject(elem ...string) (string, error) {
	for _, root := range []string{".", ".."} {
		path := filepath.Join(append([]string{root}, elem...)...)
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return filepath.Abs(path)
		}
	}
	return "", fmt.Errorf("%s is not found: run this in the project's root directory, or in bench", filepath.Join(elem...))
}
