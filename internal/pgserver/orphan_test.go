// A server ends when its owner is killed. The owner is this test program, run once more.

//go:build !windows

package pgserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/leaktest"
)

// ownerEnv makes this program an owner instead of a test.
const ownerEnv = "PGSERVER_TEST_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) != "" {
		own()
	}
	code := m.Run()
	if err := clusters.Remove(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(leaktest.Check(code))
}

// own starts a server with a companion, says where they are, and waits to be
// killed.
func own() {
	var c *Companion
	s, err := Start(context.Background(), Config{Settings: map[string]string{"fsync": "off"}})
	if err == nil {
		c, err = s.Companion(context.Background(), "sleep", sleepLong, readyAtOnce)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(s.PID(), c.process.cmd.Process.Pid, s.dir.path)
	select {}
}

// owner is a process that owns a server.
type owner struct {
	cmd        *exec.Cmd
	postmaster int
	companion  int
	dir        string
}

func startOwner(t *testing.T, tmpdir string) *owner {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), ownerEnv+"=1", "TMPDIR="+tmpdir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	o := &owner{cmd: cmd}
	t.Cleanup(func() {
		o.kill()
		if o.postmaster > 0 && runtime.GOOS == "linux" { // else it would write where all is to be removed
			eventually(t, "its server is gone", func() bool { return !alive(o.postmaster) })
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the owner does not say where its server is: %v", err)
	}
	if _, err := fmt.Sscan(line, &o.postmaster, &o.companion, &o.dir); err != nil {
		t.Fatal(err)
	}
	return o
}

// kill kills the owner, and nothing else.
func (o *owner) kill() {
	_ = o.cmd.Process.Kill() // it may be dead
	_ = o.cmd.Wait()
}

// alive says whether a process is there and not a mere zombie.
func alive(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return false
	}
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	return err != nil || !strings.Contains(string(stat), ") Z ")
}

// openTempDir returns a directory that any user may pass through.
func openTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestServerDiesWithItsParent(t *testing.T) {
	long(t)
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells an orphan that it is one")
	}
	t.Parallel()
	o := startOwner(t, openTempDir(t))
	if !alive(o.postmaster) || !alive(o.companion) {
		t.Fatal("there is no server, or nothing beside it")
	}
	o.kill()
	eventually(t, "the server is gone", func() bool { return !alive(o.postmaster) })
	eventually(t, "what ran beside it is gone", func() bool { return !alive(o.companion) })
}

func TestDirectoryOfAKilledRunIsRemovedByTheNext(t *testing.T) {
	long(t)
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells an orphan that it is one")
	}
	t.Parallel()
	tmpdir := openTempDir(t)
	dead, living := startOwner(t, tmpdir), startOwner(t, tmpdir)
	theirs := filepath.Join(tmpdir, dirPrefix+"something-else")
	if err := os.Mkdir(theirs, 0o755); err != nil {
		t.Fatal(err)
	}
	dead.kill()
	eventually(t, "the killed run's directory is gone", func() bool {
		removeStale(tmpdir)
		return gone(dead.dir)
	})
	if gone(living.dir) {
		t.Error("the directory of a living run was removed")
	}
	if gone(theirs) {
		t.Error("a directory that is not a server's was removed")
	}
}

func TestDirectoryIsKeptWhileItsPostmasterLives(t *testing.T) {
	long(t)
	t.Parallel()
	s := start(t, Config{})
	// As if we were dead: the server alone holds the lock.
	if err := s.dir.lock.Close(); err != nil {
		t.Fatal(err)
	}
	removeStale(filepath.Dir(s.dir.path))
	if gone(s.dir.path) {
		t.Fatal("the directory of a running server was removed")
	}
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	// Somebody else may just have begun to, and a child that is just being started has all
	// files that we had open.
	eventually(t, "the directory is gone", func() bool {
		removeStale(filepath.Dir(s.dir.path))
		return gone(s.dir.path)
	})
	s.dir.lock = nil // given up above
}
