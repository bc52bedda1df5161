//go:build unix

package main

import (
	"bufio"
	"context"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// onSocketAt starts pgxlock serve on a socket, and waits until it listens.
func onSocketAt(t *testing.T, path string) *exec.Cmd {
	t.Helper()
	cmd := program(t, []string{"DATABASE_URL=postgres://alice@" + closed + "/shop"}, "serve", "--listen", "unix:"+path)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	if said, want := line(bufio.NewReader(stderr)), "pgxlock: serving unix:"+path+" (read-only)"; strings.TrimSpace(said) != want {
		t.Fatalf("%q, want %q", said, want)
	}
	return cmd
}

// livesAt reports whether a server answers on a socket.
func livesAt(t *testing.T, path string) bool {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost/livez", nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := client.Do(r)
	if err != nil {
		return false
	}
	got.Body.Close()
	return got.StatusCode == http.StatusOK
}

func TestServeOnASocketOfItsUserAlone(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	first := onSocketAt(t, path)
	if info, err := os.Stat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	execute(t, nil, "serve", "--listen", "unix:"+path).want(t, exitUsage, "", "pgxlock: --listen unix:"+path+": a program listens there; choose another address\n")
	if !livesAt(t, path) {
		t.Error("the first one answers no more")
	}

	// A killed one leaves its socket, which the next one replaces and removes.
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait() // it was killed
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
	next := onSocketAt(t, path)
	if !livesAt(t, path) {
		t.Error("the next one does not answer")
	}
	if err := next.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = next.Wait() // by the signal
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("it left its socket: %v", err)
	}
}

func TestServeRemovesNothingButADeadSocket(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "nothing"), link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link} {
		execute(t, nil, "serve", "--listen", "unix:"+path).want(t, exitUsage, "", "there is a file that is not a socket; choose another address\n")
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	locked, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer locked.Close()
	if err := syscall.Flock(int(locked.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	execute(t, nil, "serve", "--listen", "unix:"+filepath.Join(dir, "s")).want(t, exitUsage, "", "another program begins to listen in "+dir)
}
