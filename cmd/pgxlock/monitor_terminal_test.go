//go:build unix

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestEvictAsksFirstOnATerminal(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	s := newScreen(t, db.URL)
	held := func() int { return count(t, db, "select count(*) from distributed_locks where holder_id = 'somebody'") }
	for _, step := range []struct {
		answer string
		code   int
	}{
		{"Enter", 1}, {"n", 1}, {"C-c", 130}, {"C-d", 1}, {"y", 0},
	} {
		s.clears(t)
		s.runs(t, `pgxlock evict k --reason why`)
		s.shows(t, `Take the lease "k" from somebody, token`)
		s.shows(t, "[y/N]")
		if held() != 1 {
			t.Error("it was taken before the answer")
		}
		if s.presses(t, step.answer); len(step.answer) == 1 {
			s.presses(t, "Enter")
		}
		s.prompts(t, step.code)
		if taken := held() == 0; taken != (step.answer == "y") {
			t.Errorf("after %s taken: %v", step.answer, taken)
		}
	}
	s.runs(t, `pgxlock evict k --reason why`)
	s.shows(t, `nobody holds "k"; nothing was evicted`)
	s.prompts(t, 1)
}

func TestWatchRedrawsInPlaceOnATerminal(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k' || n, 'host:4711:ABCDEFGHIJKLMNOPQRSTUVWXYZ', 3600) from generate_series(10, 19) n")
	s := newScreen(t, db.URL)
	s.resizes(t, 100, 24)
	s.runs(t, "seq -f row%g 100") // a screen that is full
	s.prompts(t, 0)
	s.runs(t, "pgxlock watch --every 1s")
	s.shows(t, "10 held, 0 waiting, 0 expired")
	first := stamp(s.looks(t))
	until(t, "it is drawn again, over the last", func() bool {
		seen := s.looks(t)
		now := stamp(seen)
		return now != first && now != "" && strings.Count(seen, " held, ") == 1 && !strings.Contains(seen, "row")
	})
	if before := s.looks(t, "-S", "-"); !strings.Contains(before, "row99\nrow100\n") {
		t.Errorf("what was on the screen cannot be scrolled back to:\n%s", before)
	}
	if !strings.Contains(s.last, "TOKEN") {
		t.Errorf("100 columns do not show the token:\n%s", s.last)
	}
	// A screen that is too small says how much it leaves out, one that is larger again shows
	// all, and neither has anything left of the other.
	s.resizes(t, 92, 8)
	s.shows(t, "... 8 more lines")
	db.Exec(t, "delete from distributed_locks where lock_name in ('k18', 'k19')")
	s.shows(t, "... 6 more lines")
	s.resizes(t, 100, 20)
	until(t, "all is shown again", func() bool {
		seen := s.looks(t)
		return strings.Contains(seen, "\nk17 ") && strings.Contains(seen, "REMAINING") && !strings.Contains(seen, "more lines") &&
			strings.Count(seen, " held, ") == 1 && strings.Count(seen, "\n") == 11
	})
	s.presses(t, "C-c")
	s.prompts(t, 130)

	db.Exec(t, "delete from distributed_locks where lock_name <> 'k17'") // two have room
	s.clears(t)
	s.runs(t, "pgxlock watch --every 1s | cat -A")
	until(t, "there are two, without a command for the terminal", func() bool {
		seen := s.looks(t)
		return strings.Count(seen, " held, ") > 1 && !strings.Contains(seen, "^[")
	})
	s.presses(t, "C-c")
	s.prompts(t, 130)
}

// stamp is the time in the first row.
func stamp(seen string) string {
	row, _, _ := strings.Cut(seen, "\n")
	at, _, _ := strings.Cut(row, "  ")
	return at
}

func TestColorsAreForTerminalsWhereNobodyAskedForNone(t *testing.T) {
	t.Parallel()
	s := newScreen(t, withLeases(t).URL)
	const green, plain = "\x1b[32mlive\x1b[39m", " live "
	for _, test := range []struct{ line, want string }{
		{"pgxlock ls", green},
		{"NO_COLOR= pgxlock ls", green},
		{"NO_COLOR=1 pgxlock ls", plain},
		{"pgxlock ls --no-color", plain},
		{"TERM=dumb pgxlock ls", plain},
		{"pgxlock ls | cat", plain},
	} {
		s.clears(t)
		s.runs(t, test.line)
		s.prompts(t, 0)
		if seen := s.looks(t, "-e"); !strings.Contains(seen, test.want) || test.want == plain && strings.Contains(seen, "\x1b") {
			t.Errorf("%s: %q", test.line, seen)
		}
	}
	for _, test := range []struct{ line, want string }{
		{"pgxlock watch", green},
		{"pgxlock watch --no-color", plain},
	} {
		s.clears(t)
		s.runs(t, test.line)
		var seen string
		until(t, "it is drawn", func() bool {
			seen = s.looks(t, "-e")
			return strings.Contains(seen, test.want)
		})
		if test.want == plain && strings.Contains(seen, "\x1b") {
			t.Errorf("%s: %q", test.line, seen)
		}
		s.presses(t, "C-c")
		s.prompts(t, 130)
	}
}

// bashCompletion is the package that the script for bash needs.
const bashCompletion = "/usr/share/bash-completion/bash_completion"

func TestBashCompletesCommandsAndFlags(t *testing.T) {
	t.Parallel()
	s := newScreen(t, "postgres://nobody@127.0.0.1:1/nowhere")
	helpers := bashCompletion
	if _, err := os.Stat(helpers); err != nil { // what the script uses of it
		helpers = filepath.Join(s.home, "helpers")
		const stand = `_get_comp_words_by_ref() { words=("${COMP_WORDS[@]}") cword=$COMP_CWORD cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}; }`
		if err := os.WriteFile(helpers, []byte(stand), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(s.home, "file.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s.runs(t, "set -o emacs") // which makes it edit lines
	s.prompts(t, 0)
	s.runs(t, ". "+helpers+"; . <(pgxlock completion bash)")
	s.prompts(t, 0)
	for _, test := range []struct{ typed, want string }{
		{"pgxlock tr", "pgxlock tree |"},
		{"pgxlock ls --sort ex", "pgxlock ls --sort expiry |"},
		{"pgxlock run k --kind a", "pgxlock run k --kind advisory |"},
		{"pgxlock evict k --term", "pgxlock evict k --terminate |"},
		{"pgxlock run k -- cat fi", "pgxlock run k -- cat file.txt |"},
		{"pgxlock run fi", "pgxlock run fi|"}, // no key is the name of a file
		{"pgxlock ls fi", "pgxlock ls fi|"},
	} {
		s.types(t, test.typed)
		s.presses(t, "Tab", "|")
		until(t, "it is completed", func() bool { return strings.HasSuffix(s.looks(t), "|") })
		if !strings.HasSuffix(s.last, "> "+test.want) {
			t.Errorf("%s: %s", test.typed, s.last)
		}
		s.presses(t, "C-u")
		s.prompts(t, 0)
	}
}
