//go:build unix

package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestEvictAsksFirstOnATerminal(t *testing.T) {
	pgtest.Long(t)
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
		s.shows(t, "\nat its next renewal, within a third of its TTL")
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
	_, pid := session(t, db, "set application_name = 'psql'; select pg_advisory_lock(n) from generate_series(1, 30) n")
	for _, step := range []struct{ flag, effect, question string }{
		{"", "other programs keep the lock.\n", fmt.Sprintf(`Take the advisory lock "#7" from psql:%d, process %[1]d`, pid)},
		{" --terminate", "  and 10 more\nThe whole session ends", `and 29 more? [y/N]`},
	} {
		s.clears(t)
		s.runs(t, "pgxlock evict '#7' --reason why"+step.flag)
		s.shows(t, step.effect)
		s.shows(t, step.question)
		s.shows(t, `"psql",`)
		s.presses(t, "Enter")
		s.prompts(t, 1)
	}
}

func TestErrorIsBrokenBetweenWordsOnATerminal(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	s := newScreen(t, "postgres://me@"+closed+"/db")
	s.runs(t, "pgxlock watch --every 100ms")
	s.shows(t, "\npgxlock: --every is 100ms, it must be at least 1s: each snapshot stops the\n         server's lock table for a moment\n")
	s.prompts(t, exitUsage)
	s.clears(t)
	s.runs(t, "pgxlock help environment")
	s.shows(t, "of once\n                         only with --retry\n")
	s.prompts(t, exitOK)
}

func TestWarningFitsTheScreen(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	execute(t, as(newRole(t, db), db), "migrate", "up", "--schema", "theirs").want(t, exitOK, "", "installed")
	s := newScreen(t, db.URL)
	s.runs(t, "pgxlock ls --schema theirs")
	s.prompts(t, exitOK)
	if !strings.Contains(s.last, "\npgxlock: warning: this role is a superuser and runs the code in schema \"theirs\",\n         which role \"") {
		t.Errorf("%s", s.last)
	}
}

func TestWatchNamesTheRoleThatLacksARightOnATerminal(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	role := newRole(t, db)
	s := newScreen(t, strings.TrimPrefix(as(role, db)[0], "DATABASE_URL="))
	s.resizes(t, 100, 40)
	s.runs(t, "pgxlock watch --every 1s")
	pgtest.Until(t, "the statement is shown", func() bool {
		seen := strings.ReplaceAll(s.looks(t), "\n", "")
		return strings.Contains(strings.ReplaceAll(seen, " ", ""), "SELECTpublic.grant_locks('"+role+"','monitoring')")
	})
	s.presses(t, "C-c")
	s.prompts(t, 130)
}

func TestWatchRedrawsInPlaceOnATerminal(t *testing.T) {
	pgtest.Long(t)
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
	pgtest.Until(t, "it is drawn again, over the last", func() bool {
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
	s.shows(t, "... 9 more lines")
	db.Exec(t, "delete from distributed_locks where lock_name in ('k18', 'k19')")
	s.shows(t, "... 7 more lines")
	s.resizes(t, 100, 20)
	pgtest.Until(t, "all is shown again", func() bool {
		seen := s.looks(t)
		return strings.Contains(seen, "\nk17 ") && strings.Contains(seen, "REMAINING") && !strings.Contains(seen, "more lines") &&
			strings.Count(seen, " held, ") == 1 && strings.Count(seen, "\n") == 12
	})
	s.presses(t, "C-c")
	s.prompts(t, 130)

	db.Exec(t, "delete from distributed_locks where lock_name <> 'k17'") // two have room
	s.clears(t)
	s.runs(t, "pgxlock watch --every 1s | cat -A")
	pgtest.Until(t, "there are two, without a command for the terminal", func() bool {
		seen := s.looks(t)
		return strings.Count(seen, " held, ") > 1 && !strings.Contains(seen, "^[")
	})
	s.presses(t, "C-c")
	s.prompts(t, 130)
}

func TestWatchSortsAndFiltersByKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-9', 3600), acquire_lock('order:2', 'pod-2', 3600), acquire_lock('mail', 'pod-5', 3600);
		update distributed_locks set acquired_at = now() - interval '2 days' where lock_name = 'order:2'`)
	session(t, db, "select pg_advisory_lock(4711)")
	s := newScreen(t, db.URL)
	s.resizes(t, 110, 20)
	s.runs(t, "stty -a >before; pgxlock watch --every 1s")
	// is waits for a status, and says in which order keys are shown then.
	is := func(status string, keys ...string) {
		t.Helper()
		pgtest.Until(t, "the screen says "+status, func() bool { return strings.HasSuffix(s.looks(t), status) })
		var shown []string
		for row := range strings.Lines(s.last) {
			if key, rest, _ := strings.Cut(row, " "); strings.Contains(rest, " live ") {
				shown = append(shown, key)
			}
		}
		if !slices.Equal(shown, keys) {
			t.Errorf("%s shows %q, want %q", status, shown, keys)
		}
	}
	const hint = "  (s sort, k kind, / key, w wide, ↑↓, q quit)"
	is("sort: kind  kind: all"+hint, "#4711", "mail", "order:1", "order:2")
	s.types(t, "s")
	is("sort: key  kind: all"+hint, "#4711", "mail", "order:1", "order:2")
	s.types(t, "s")
	is("sort: age  kind: all"+hint, "order:2", "order:1", "mail", "#4711")
	s.types(t, "k")
	is("sort: age  kind: lease"+hint, "order:2", "order:1", "mail")
	s.types(t, "k")
	is("sort: age  kind: advisory"+hint, "#4711")
	s.types(t, "kss")
	is("sort: holder  kind: all"+hint, "#4711", "order:2", "mail", "order:1")
	s.presses(t, "Up", "Left") // nothing of them is taken for a key
	s.types(t, "/orq")
	is("/orq_  (Enter keeps, Esc clears)")
	s.presses(t, "BSpace")
	is("/or_  (Enter keeps, Esc clears)", "order:2", "order:1")
	s.presses(t, "Enter")
	is("sort: holder  kind: all  key: or"+hint, "order:2", "order:1")
	s.types(t, "/")
	s.types(t, "d")
	is("/ord_  (Enter keeps, Esc clears)", "order:2", "order:1")
	s.presses(t, "Escape")
	is("sort: holder  kind: all"+hint, "#4711", "order:2", "mail", "order:1")
	s.types(t, "q")
	s.prompts(t, 0)
	s.keepsTerminal(t)

	s.clears(t)
	s.runs(t, "pgxlock watch --every 1s --kind lease --key order --sort age")
	is("sort: age  kind: lease  key: order"+hint, "order:2", "order:1")
	s.types(t, "q")
	s.prompts(t, 0)
	r := execute(t, []string{"DATABASE_URL=" + db.URL}, "watch", "--once", "--kind", "lease", "--key", "order", "--sort", "age")
	if first, second := strings.Index(r.stdout, "order:2"), strings.Index(r.stdout, "order:1"); r.code != exitOK || !strings.Contains(r.stdout, "2 held, ") || first < 0 || second < first || strings.Contains(r.stdout, "sort:") {
		t.Errorf("%+v", r)
	}
}

func TestWatchScrollsToWhatAScreenHasNoRoomFor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	const holder = "billing-worker-deployment-eu-central-production-7c9f8d6b5-x2v4q:4711:ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	db.Exec(t, `select acquire_lock('k', '`+holder+`', 3600);
		insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until) select 0, 'k', n, 'pod-' || n, 1, now(), now() + interval '1 hour' from generate_series(1, 190) n`)
	s := newScreen(t, db.URL)
	s.runs(t, "pgxlock watch --every 1s")
	s.shows(t, "... 178 more lines\n") // of 2, 1 and 191, 1 and 3, and a note for each table
	s.shows(t, " pod-1 ")
	s.presses(t, "Down", "Down", "Up")
	s.shows(t, "... 177 more lines, 1 above\n")
	s.presses(t, "NPage")
	s.shows(t, "... 157 more lines, 21 above\n")
	s.presses(t, "End")
	s.shows(t, "... 0 more lines, 178 above\n")
	for _, want := range []string{" pod-190 ", "-7c9f8d6b5-x2v4q:4711:…", "left out: ", "shortened: HOLDER (w shows all)"} {
		if !strings.Contains(s.last, want) {
			t.Errorf("the end of the list does not show %s:\n%s", want, s.last)
		}
	}
	s.types(t, "w")
	s.presses(t, "End")
	pgtest.Until(t, "all is shown", func() bool {
		seen := strings.ReplaceAll(strings.ReplaceAll(s.looks(t), "\n", ""), " ", "")
		return strings.Contains(seen, holder) && strings.Contains(seen, "1099511627777")
	})
	s.types(t, "w")
	s.presses(t, "Home")
	s.shows(t, "... 178 more lines\n")
	s.presses(t, "NPage")
	s.shows(t, " above\n")
	s.types(t, "/")
	s.types(t, "k") // another list begins at its first line
	s.shows(t, "... 178 more lines\n")
	s.presses(t, "Escape")
	s.types(t, "q")
	s.prompts(t, 0)

	for line, want := range map[string]bool{"pgxlock ls": false, "pgxlock ls --wide": true, "pgxlock ls | cat": true, "pgxlock tree | head -2": true} {
		s.clears(t)
		s.runs(t, line)
		s.prompts(t, 0)
		if whole := strings.Contains(s.last, holder); whole != want {
			t.Errorf("%s shows the holder whole: %t\n%s", line, whole, s.last)
		}
	}
}

func TestEachTerminalsKeysScroll(t *testing.T) {
	t.Parallel()
	for typed, want := range map[string]int{
		"\x1b[A": 49, "\x1bOA": 49, "\x1b[B": 51, "\x1bOB": 51, "\x1b[5~": 30, "\x1b[6~": 70,
		"\x1b[H": 0, "\x1bOH": 0, "\x1b[1~": 0, "\x1b[F": math.MaxInt32, "\x1bOF": math.MaxInt32, "\x1b[4~": math.MaxInt32,
		"\x1b[C": 50, "\x1b[1;5C": 50, "\x1b[3~": 50, "\x1b[A\x1b[5~\x1b[5~\x1b[5~\x1b[B": 1, "s": 0, "k": 0, "/x": 0, "w": 50,
	} {
		b := &board{top: 50, page: 20}
		if b.press([]byte(typed)); b.top != want {
			t.Errorf("%q: line %d, want %d", typed, b.top, want)
		}
	}
}

// A terminal passes on at once what was typed while we were busy.
func TestKeysNextToAnArrowCount(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		typed  []string
		key    string
		typing bool
	}{
		{[]string{"\x1b[A\x1b[D/orq"}, "orq", true},
		{[]string{"\x1b[1;5C/or\x1bOAq"}, "orq", true},
		{[]string{"/orq\x1b[3~"}, "orq", true},
		{[]string{"\x1b[", "A/o", "rq"}, "orq", true},
		{[]string{"/o\xc3", "\xa9"}, "o\u00e9", true},
		{[]string{"/orq\x1b"}, "", false},
		{[]string{"/orq\r\x1b\x1b[A/é"}, "é", true},
	} {
		b := &board{}
		for _, typed := range test.typed {
			b.press([]byte(typed))
		}
		if b.selection.key != test.key || b.typing != test.typing {
			t.Errorf("%q: the filter is %q, typed %t; want %q, %t", test.typed, b.selection.key, b.typing, test.key, test.typing)
		}
	}
}

// keepsTerminal fails the test unless the terminal is set as the file before says.
func (s *screen) keepsTerminal(t *testing.T) {
	t.Helper()
	s.runs(t, "stty -a | cmp - before && echo as it was")
	s.shows(t, "\nas it was\n")
	s.prompts(t, 0)
}

func TestWatchLeavesTheTerminalAsItWas(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	s := newScreen(t, server.URL("postgres"))
	s.resizes(t, 110, 20)
	s.runs(t, "stty -a >before; pgxlock watch --every 1s & sleep 0.1; touch there") // watch draws over what a command prints
	pgtest.Until(t, "it runs in the background", func() bool {
		_, err := os.Stat(filepath.Join(s.home, "there"))
		return err == nil
	})
	s.runs(t, "fg")
	const single = "(s sort, k kind, / key, w wide, ↑↓, q quit)"
	raw := func() {
		t.Helper()
		s.shows(t, single)
		s.types(t, "/again") // which only a terminal without lines passes on
		s.shows(t, "/again_")
		s.presses(t, "Escape")
		s.shows(t, single)
	}
	raw()
	s.presses(t, "C-z")
	s.prompts(t, 128+int(syscall.SIGSTOP))
	s.keepsTerminal(t)
	s.clears(t)
	s.runs(t, "fg")
	raw()
	s.presses(t, "C-c")
	s.prompts(t, 130)
	s.keepsTerminal(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		s.clears(t)
		s.runs(t, `sh -c 'sh -c "echo \$\$ >pid; exec pgxlock watch --every 1s"; echo ended'`) // bash itself would set the terminal back
		raw()
		text, err := os.ReadFile(filepath.Join(s.home, "pid"))
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, sig); err != nil {
			t.Fatal(err)
		}
		s.shows(t, "\nended")
		s.clears(t)
		s.keepsTerminal(t)
	}
	s.clears(t)
	s.runs(t, "pgxlock watch --every 1s 2>said")
	raw()
	if err := server.Crash(); err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "it says that the server is gone", func() bool {
		said, err := os.ReadFile(filepath.Join(s.home, "said"))
		return err == nil && len(said) > 0
	})
	s.types(t, "q") // keys go on
	s.prompts(t, 0)
	s.keepsTerminal(t)
}

// stamp is the time in the first row.
func stamp(seen string) string {
	row, _, _ := strings.Cut(seen, "\n")
	at, _, _ := strings.Cut(row, "  ")
	return at
}

func TestColorsAreForTerminalsWhereNobodyAskedForNone(t *testing.T) {
	pgtest.Long(t)
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
		pgtest.Until(t, "it is drawn", func() bool {
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
	pgtest.Long(t)
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
		pgtest.Until(t, "it is completed", func() bool { return strings.HasSuffix(s.looks(t), "|") })
		if !strings.HasSuffix(s.last, "> "+test.want) {
			t.Errorf("%s: %s", test.typed, s.last)
		}
		s.presses(t, "C-u")
		s.prompts(t, 0)
	}
}
