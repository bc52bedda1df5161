//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// listenUnix listens on a socket that its owner and root can open and no other user, and that goes
// when the listener is closed. It removes one on which no program listens any more.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	// Of two programs that begin at once one would find the other's bound, not yet listening, and
	// take it for dead.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("another program begins to listen in %s: %v", dir.Name(), err) //nolint:errorlint // the command shows an errno alone
	}
	if err := removeDead(ctx, path); err != nil {
		return nil, err
	}
	defer syscall.Umask(syscall.Umask(0o177)) // a socket has its permissions from the start
	return new(net.ListenConfig).Listen(ctx, "unix", path)
}

// removeDead removes a socket that refuses connections. Whatever else is there stays, and is an error.
func removeDead(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return errors.New("there is a file that is not a socket")
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(errors.New("a program listens there"), conn.Close())
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("there is a socket, and whether a program listens there is not known: %v", err) //nolint:errorlint // the command shows an errno alone
	}
	return os.Remove(path)
}
