package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// An image from scratch has no users, no C library and no settings.
func TestProgramOfTheDockerfileRunsInAnEmptyRootDirectory(t *testing.T) {
	t.Parallel()
	pgtest.Builds(t)
	if os.Geteuid() != 0 {
		pgtest.Missing(t, "root", "only root can change the root directory of a program")
	}
	dockerfile, err := os.ReadFile("../../deploy/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	build := regexp.MustCompile(`(?m)^RUN (CGO_ENABLED=0 go build .* )-o /pgxlock (\.)$`).FindSubmatch(dockerfile)
	if build == nil || !strings.Contains(string(dockerfile), "FROM scratch\n") {
		t.Fatalf("it builds no program for an image from scratch:\n%s", dockerfile)
	}
	root, err := os.MkdirTemp("", "pgxlock")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(root, 0o755); err != nil { // the program has another user
		t.Fatal(err)
	}
	//nolint:gosec // our own Dockerfile says how
	compile := exec.CommandContext(t.Context(), "sh", "-c", string(build[1])+"-o "+filepath.Join(root, "pgxlock")+" "+string(build[2]))
	compile.Dir = "../.."
	if out, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	cmd := exec.CommandContext(t.Context(), "/pgxlock", "serve", "--listen", "127.0.0.1:0")
	cmd.Env, cmd.Dir = []string{"PGXLOCK_DATABASE_URL=postgres://alice@127.0.0.1:1/shop"}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	address := servedBy(t, cmd)
	if code, body := fetch(t, address); code != 200 || !strings.Contains(body, "cannot connect as user") {
		t.Errorf("%d: %s", code, body)
	}
}
