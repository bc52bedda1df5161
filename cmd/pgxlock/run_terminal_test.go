//go:build unix

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// isFree waits until nobody has a lease.
func isFree(t *testing.T, db *pgtest.DB) {
	t.Helper()
	pgtest.Until(t, "no lease is left", func() bool { return count(t, db, "select count(*) from distributed_locks") == 0 })
}

func count(t *testing.T, db *pgtest.DB, query string) (n int) {
	t.Helper()
	if err := db.Pool.QueryRow(t.Context(), query).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestCtrlCEndsTheCommandAndTheTerminalIsGivenBack(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	s := newScreen(t, db.URL)
	// The group that has the terminal is the command's.
	s.runs(t, `pgxlock run k -- sh -c 'ps -o pgid=,tpgid= -p $$ | (read a b; [ $a = $b ] && echo fore"ground"); cat'`)
	s.shows(t, "foreground")
	s.enters(t, "typed for it")
	s.shows(t, "typed for it\ntyped for it") // the echo, and what it wrote
	if held := count(t, db, "select count(*) from distributed_locks where lock_name = 'k'"); held != 1 {
		t.Errorf("%d leases", held)
	}
	s.presses(t, "C-c")
	s.prompts(t, 130)
	tryNow(t, db.URL, "k").want(t, exitOK, "ran\n", "")
	s.runs(t, "read x; echo read$x")
	s.enters(t, "bytheshell")
	s.shows(t, "readbytheshell")
	s.prompts(t, 0)
	// A script takes nothing back by itself.
	s.runs(t, "sh -c 'pgxlock run k -- true; read x; echo read$x'")
	s.enters(t, "byascript")
	s.shows(t, "readbyascript")
	s.prompts(t, 0)
}

func TestCtrlZStopsTheJobAndItGoesOn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	s := newScreen(t, migrated(t).URL)
	for _, start := range []string{
		`pgxlock run k -- sh -c 'echo re"ady"; cat; exit 7'`,
		`sh -c 'pgxlock run k -- sh -c "echo re\"\"ady; cat; exit 7"; exit $?'`, // in a script, which stops with it
		`pgxlock run k -- sh -c 'echo re"ady"; cat; exit 7' | cat`,              // which gives it the terminal when it asks
	} {
		s.clears(t)
		s.runs(t, start)
		s.shows(t, "\nready")
		s.enters(t, "before")
		s.shows(t, "before\nbefore")
		s.presses(t, "C-z")
		s.shows(t, "Stopped")
		s.prompts(t, exitSignal+int(syscall.SIGSTOP))
		s.runs(t, `echo by the "shell"`)
		s.shows(t, "\nby the shell")
		s.prompts(t, 0)
		s.runs(t, "fg >/dev/null")
		s.enters(t, "after")
		s.shows(t, "after\nafter")
		s.presses(t, "C-d")
		if strings.Contains(start, "|") { // fg returns the code of the last in the pipeline
			s.prompts(t, 0)
		} else {
			s.prompts(t, 7)
		}
	}
}

func TestClosedTerminalEndsTheCommand(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, stopped := range []bool{false, true} {
		t.Run(fmt.Sprint("stopped ", stopped), func(t *testing.T) {
			t.Parallel()
			db := migrated(t)
			s := newScreen(t, db.URL)
			s.runs(t, `pgxlock run --ttl 1h k -- sh -c 'echo re"ady"; cat'`)
			s.shows(t, "\nready")
			s.enters(t, "typed")
			s.shows(t, "typed\ntyped") // a shell that is just starting a command cannot be stopped
			if stopped {
				s.presses(t, "C-z")
				s.shows(t, "Stopped")
			}
			s.hangsUp(t)
			isFree(t, db)
		})
	}
}

func TestFullScreenProgramsWorkAndAreResized(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	s := newScreen(t, migrated(t).URL)
	s.runs(t, `pgxlock run k -- bash -c 'trap "stty size" WINCH; stty size; while ! read -t 1 line; do :; done; echo "got $line"'`)
	s.shows(t, "\n24 80")
	s.resizes(t, 70, 20)
	s.shows(t, "\n20 70")
	s.enters(t, "a line")
	s.shows(t, "\ngot a line")
	s.prompts(t, 0)

	rows := func(begin string) (n int) {
		for row := range strings.Lines(s.looks(t)) {
			if strings.HasPrefix(row, begin) {
				n++
			}
		}
		return n
	}
	fills := func(begin string, want int) {
		t.Helper()
		pgtest.Until(t, fmt.Sprintf("%d rows begin with %s", want, begin), func() bool { return rows(begin) == want })
	}
	file := filepath.Join(s.home, "file")
	if _, err := exec.LookPath("vi"); err == nil {
		s.clears(t)
		s.runs(t, "pgxlock run k -- vi file")
		fills("~", 20-2) // a line, and that for commands
		s.types(t, "itext")
		s.shows(t, "text")
		s.presses(t, "Escape")
		s.resizes(t, 60, 15)
		fills("~", 15-2)
		s.enters(t, ":wq")
		s.prompts(t, 0)
		if text, err := os.ReadFile(file); err != nil || string(text) != "text\n" {
			t.Errorf("it wrote %q, %v", text, err)
		}
	}
	if _, err := exec.LookPath("less"); err == nil {
		var lines strings.Builder
		for n := range 100 {
			fmt.Fprintf(&lines, "line %d.\n", n)
		}
		if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
			t.Fatal(err)
		}
		s.clears(t)
		s.resizes(t, 80, 24)
		s.runs(t, "pgxlock run k -- less file")
		fills("line", 24-1)
		s.resizes(t, 60, 12)
		pgtest.Until(t, "less shows its first line", func() bool { // the terminal alone would keep the last lines
			if strings.Contains(s.looks(t), "line 0.") {
				return true
			}
			s.types(t, "r") // less may hear of the new size just before it waits for a key, and draws anew after the next
			return false
		})
		fills("line", 12-1)
		s.types(t, "q")
		s.prompts(t, 0)
	}
}

func TestWaitingRunNamesTheHolderAtATerminal(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'first', 3600)")
	s := newScreen(t, db.URL)
	s.runs(t, `pgxlock run k -- echo ra"n"`)
	s.shows(t, `waiting for "k", held by first since 20`)
	pgtest.Until(t, "who waits has one ticket", func() bool { return count(t, db, "select count(*) from pgxlock_waiters") == 1 })
	db.Exec(t, "update distributed_locks set holder_id = 'second'")
	s.shows(t, `waiting for "k", held by second since 20`)
	s.presses(t, "C-c")
	s.prompts(t, 130)
	pgtest.Until(t, "no ticket is left", func() bool { return count(t, db, "select count(*) from pgxlock_waiters") == 0 })
	db.Exec(t, "delete from distributed_locks")
	tryNow(t, db.URL, "k").want(t, exitOK, "ran\n", "")

	other := db.Connect(t)
	if _, err := other.Exec(t.Context(), "set application_name = 'somebody'; select pg_advisory_lock(advisory_lock_key('k'))"); err != nil {
		t.Fatal(err)
	}
	s.runs(t, `pgxlock run k --kind advisory -- echo ra"n"`)
	s.shows(t, fmt.Sprintf(`waiting for "k", held by somebody:%d`, other.PgConn().PID()))
	s.presses(t, "C-c")
	s.prompts(t, 130)
	if strings.Contains(s.looks(t), "ran") {
		t.Error("the command ran")
	}
}

func TestRunInAPipeline(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	s := newScreen(t, db.URL)
	s.runs(t, `pgxlock run k -- sh -c 'echo o"ut"; read x </dev/tty; echo got$x; exit 5' | cat; echo ${PIPESTATUS[*]}`)
	s.shows(t, "\nout")
	s.enters(t, "it")
	s.shows(t, "\ngotit\n5 0\n")
	s.prompts(t, 0)

	s.runs(t, `pgxlock run k -- sh -c 'echo aga"in"; exec cat /dev/tty' | cat`)
	s.shows(t, "\nagain")
	s.enters(t, "it has it")
	s.shows(t, "it has it\nit has it") // so that what is typed now is for the command alone
	s.presses(t, "C-c")
	s.prompts(t, 0) // that of cat
	isFree(t, db)
	s.runs(t, "read x; echo read$x")
	s.enters(t, "bytheshell")
	s.shows(t, "readbytheshell")
}
