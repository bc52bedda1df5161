//go:build unix

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A screen is a user at a terminal, who types, reads, and types again.

// tmuxEnv names the program tmux.
const tmuxEnv = "PGXLOCK_TEST_TMUX"

// A screen is a tmux of its own, of 80 columns and 24 rows, in which the test types to
// bash. This bash does not edit lines: the terminal stays in a mode in which input that is typed
// early is a line for the program that reads it. It knows the program as pgxlock, and the database by DATABASE_URL.
type screen struct {
	program, socket string
	home            string
	lines           int // that the shell was given
	attached        *exec.Cmd
	keys            io.Closer
	mark            string
	last            string // what was seen
}

func newScreen(t *testing.T, url string, env ...string) *screen {
	t.Helper()
	s := &screen{program: os.Getenv(tmuxEnv), home: t.TempDir(), mark: rand.Text()}
	if s.program == "" {
		s.program = "tmux"
	}
	for _, program := range []string{s.program, "bash"} {
		if _, err := exec.LookPath(program); err != nil {
			pgtest.Missing(t, "tmux", fmt.Sprintf("%v; scripts/tmux-tree gets tmux from Debian's packages, %s names it", err, tmuxEnv))
		}
	}
	if err := os.Symlink(itself(t), filepath.Join(s.home, "pgxlock")); err != nil {
		t.Fatal(err)
	}
	short, err := os.MkdirTemp("", "tmux") // a socket's path must not be long
	if err != nil {
		t.Fatal(err)
	}
	s.socket = filepath.Join(short, "socket")

	// A client in control mode needs no terminal, and the server ends with its last client:
	// also if the test is killed.
	s.attached = exec.Command(s.program, strings.Split("-u -C -f /dev/null -S "+s.socket+
		" start-server ; set -g default-terminal screen ; set -g status off ; set -g escape-time 0 ; set -g destroy-unattached on"+
		" ; new-session -x 80 -y 24 bash --norc --noprofile --noediting", " ")...)
	s.attached.Env = append([]string{
		"PATH=" + s.home + ":" + os.Getenv("PATH"), "HOME=" + s.home, "SHELL=/bin/sh", "LC_ALL=C.UTF-8", `PS1=[$?] \#> `, "HISTFILE=",
		asProgram + "=1", runMark + "=" + s.mark, "DATABASE_URL=" + url,
	}, env...)
	s.attached.Dir = s.home
	if s.keys, err = s.attached.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := s.attached.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the screen was:\n%s", s.last)
		}
		s.hangsUp(t)
		_ = os.RemoveAll(short)
	})
	pgtest.Until(t, "there is a shell", func() bool {
		seen, err := s.tmux("capture-pane", "-pJ")
		return err == nil && strings.HasPrefix(seen, "[0] 1>")
	})
	return s
}

// hangsUp closes the terminal, and waits until all that ran in it is gone.
func (s *screen) hangsUp(t *testing.T) {
	if s.attached.ProcessState != nil {
		return
	}
	_ = s.keys.Close()
	_ = s.attached.Wait()
	allGone(t, s.mark)
}

func (s *screen) tmux(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), pgtest.Patience)
	defer cancel()
	output, err := exec.CommandContext(ctx, s.program, append([]string{"-u", "-S", s.socket}, args...)...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(output))
	}
	return string(output), err
}

// presses presses keys by their names in tmux.
func (s *screen) presses(t *testing.T, keys ...string) {
	t.Helper()
	if _, err := s.tmux(append([]string{"send-keys"}, keys...)...); err != nil {
		t.Fatal(err)
	}
}

// types types a text.
func (s *screen) types(t *testing.T, text string) {
	t.Helper()
	s.presses(t, "-l", "--", text)
}

// enters types a line for whatever runs.
func (s *screen) enters(t *testing.T, line string) {
	t.Helper()
	s.types(t, line)
	s.presses(t, "Enter")
}

// runs types a line for the shell, which must have shown its prompt.
func (s *screen) runs(t *testing.T, line string) {
	t.Helper()
	s.lines++
	s.enters(t, line)
}

// looks returns what is on the screen, with as many escape sequences as tmux is asked for.
func (s *screen) looks(t *testing.T, flags ...string) string {
	t.Helper()
	seen, err := s.tmux(append([]string{"capture-pane", "-pJ"}, flags...)...)
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for row := range strings.Lines(seen) {
		rows = append(rows, strings.TrimRight(row, " \n"))
	}
	s.last = strings.TrimRight(strings.Join(rows, "\n"), "\n")
	return s.last
}

// shows waits until the screen shows a text. What is typed is shown, too: it must not
// contain the text.
func (s *screen) shows(t *testing.T, text string) {
	t.Helper()
	pgtest.Until(t, "the screen shows "+text, func() bool { return strings.Contains(s.looks(t), text) })
}

// prompts waits until the shell asks for its next line, and fails the test unless the last
// one had the exit code.
func (s *screen) prompts(t *testing.T, code int) {
	t.Helper()
	prompt := regexp.MustCompile(fmt.Sprintf(`\[(\d+)\] %d>$`, s.lines+1))
	var got string
	pgtest.Until(t, "the shell asks for a line", func() bool {
		found := prompt.FindStringSubmatch(s.looks(t))
		if found != nil {
			got = found[1]
		}
		return found != nil
	})
	if got != strconv.Itoa(code) {
		t.Errorf("exit code %s, want %d:\n%s", got, code, s.last)
	}
}

// clears empties the screen.
func (s *screen) clears(t *testing.T) {
	t.Helper()
	s.runs(t, `printf '\033[H\033[2J'`)
	pgtest.Until(t, "the screen is empty", func() bool { return strings.HasPrefix(s.looks(t), "[0] ") })
	s.prompts(t, 0)
}

// resizes gives the terminal another size.
func (s *screen) resizes(t *testing.T, columns, rows int) {
	t.Helper()
	if _, err := s.tmux("resize-window", "-x", strconv.Itoa(columns), "-y", strconv.Itoa(rows)); err != nil {
		t.Fatal(err)
	}
}
