package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A screen is a terminal on which somebody types to a shell with job control. It hangs
// up when the test is over, or killed, and all that it controls with it.
type screen struct {
	keys *os.File

	mu   sync.Mutex
	text strings.Builder
}

func newScreen(t *testing.T, env ...string) *screen {
	t.Helper()
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip(err)
	}
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Skip(err)
	}
	keys := os.NewFile(uintptr(fd), "ptmx") // whose Close ends a Read
	s := &screen{keys: keys}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err := os.OpenFile(fmt.Sprint("/dev/pts/", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	bash := program(t, append(env, "PS1=$ ", "TERM=dumb"))
	bash.Path, bash.Args = "/bin/bash", []string{"bash", "--norc", "--noprofile", "--noediting", "-i"}
	bash.Stdin, bash.Stdout, bash.Stderr = terminal, terminal, terminal
	bash.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := bash.Start(); err != nil {
		t.Fatal(err)
	}
	var reading sync.WaitGroup
	reading.Go(func() {
		buffer := make([]byte, 4096)
		for {
			n, err := keys.Read(buffer)
			s.mu.Lock()
			s.text.Write(buffer[:n])
			s.mu.Unlock()
			if err != nil {
				return // it has hung up
			}
		}
	})
	t.Cleanup(func() {
		_ = keys.Close() // it hangs up
		_ = bash.Process.Kill()
		_ = bash.Wait() // it was killed
		reading.Wait()
		if t.Failed() {
			t.Logf("the screen:\n%s", s.text.String())
		}
	})
	return s
}

// enters types a line.
func (s *screen) enters(t *testing.T, line string) { s.types(t, line+"\r") }

func (s *screen) types(t *testing.T, keys string) {
	t.Helper()
	if _, err := s.keys.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// shows waits for a text, and forgets all up to it. What is typed is echoed, so that it
// must not contain the text.
func (s *screen) shows(t *testing.T, text string) {
	t.Helper()
	until(t, "the screen shows "+text, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		_, rest, found := strings.Cut(s.text.String(), text)
		if found {
			s.text.Reset()
			s.text.WriteString(rest)
		}
		return found
	})
}

// screenOn returns a screen whose shell knows run as $RUN, for a database.
func screenOn(t *testing.T, url string) *screen {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return newScreen(t, "DATABASE_URL="+url, "RUN="+self+" run")
}

func TestCtrlCEndsTheCommandAndTheTerminalIsGivenBack(t *testing.T) {
	t.Parallel()
	s := screenOn(t, migrated(t).URL)
	// The group that has the terminal is the command's.
	s.enters(t, `$RUN k -- sh -c 'ps -o pgid=,tpgid= -p $$ | (read a b; [ $a = $b ] && echo fore"ground"); cat'`)
	s.shows(t, "foreground")
	s.enters(t, "typed for it")
	s.shows(t, "typed for it\r\ntyped for it") // the echo, and what it wrote
	s.types(t, "\x03")
	s.shows(t, "$ ") // what is typed earlier may go to the command
	s.enters(t, "echo code $?; read x; echo 'read' $x")
	s.shows(t, "code 130")
	s.enters(t, "by the shell")
	s.shows(t, "read by the shell")
}

func TestCtrlZStopsTheJobAndItGoesOn(t *testing.T) {
	t.Parallel()
	s := screenOn(t, migrated(t).URL)
	for _, start := range []string{
		"$RUN k -- sh -c 'echo re\"ady\"; cat; exit 7'",
		"sh -c '$RUN k -- sh -c \"echo re\\\"\\\"ady; cat; exit 7\"; exit $?'", // in a script, which stops with it
		"$RUN k -- sh -c 'echo re\"ady\"; cat; exit 7' | cat",                  // which gives it the terminal when it asks
	} {
		s.enters(t, start)
		s.shows(t, "ready")
		s.enters(t, "before")
		s.shows(t, "before\r\nbefore")
		s.types(t, "\x1a")
		s.shows(t, "Stopped")
		s.shows(t, "$ ")
		s.enters(t, "echo by the \"shell\"")
		s.shows(t, "by the shell")
		s.enters(t, "fg >/dev/null")
		s.enters(t, "after")
		s.shows(t, "after\r\nafter")
		s.types(t, "\x04")
		if !strings.Contains(start, "|") { // fg returns the code of the last in the pipeline
			s.enters(t, "echo code $?")
			s.shows(t, "code 7")
		}
	}
}

func TestWhoWaitsAtATerminalSeesForWhom(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'first', 3600)")
	s := screenOn(t, db.URL)
	s.enters(t, "$RUN k -- echo ra\"n\"")
	s.shows(t, `waiting for "k", held by first since 20`)
	db.Exec(t, "update distributed_locks set holder_id = 'second'")
	s.shows(t, `waiting for "k", held by second since 20`)
	s.types(t, "\x03")
	s.shows(t, "$ ") // what is typed earlier may go to the command
	s.enters(t, "echo code $?")
	s.shows(t, "code 130")

	other := db.Connect(t)
	if _, err := other.Exec(t.Context(), "set application_name = 'somebody'; select pg_advisory_lock(advisory_lock_key('k'))"); err != nil {
		t.Fatal(err)
	}
	s.enters(t, "$RUN k --kind session -- echo ra\"n\"")
	s.shows(t, fmt.Sprintf(`waiting for "k", held by somebody:%d`, other.PgConn().PID()))
	s.types(t, "\x03")
	s.shows(t, "$ ") // what is typed earlier may go to the command
	s.enters(t, "echo code $?")
	s.shows(t, "code 130")
}
