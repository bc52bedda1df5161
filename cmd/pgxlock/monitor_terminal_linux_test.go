package main

import (
	"os"
	"testing"
)

func terminalOn(t *testing.T, url string) *screen {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return newScreen(t, "DATABASE_URL="+url, "PGXLOCK="+self)
}

func TestEvictAsksFirstOnATerminal(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	s := terminalOn(t, db.URL)
	for _, step := range []struct{ answer, code string }{
		{"\r", "code 1"},
		{"no\r", "code 1"},
		{"\x03", "code 130"}, // Ctrl-C
		{"y\r", "code 0"},
		{"", "code 1"}, // nobody has it now
	} {
		s.enters(t, `$PGXLOCK evict k --reason why; echo co"d"e $?`)
		if step.answer != "" {
			s.shows(t, `Take the lease "k" from somebody, token`)
			s.shows(t, "[y/N] ")
			s.types(t, step.answer)
		}
		s.shows(t, step.code+"\r\n")
	}
}

func TestWatchRedrawsOnATerminal(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "select acquire_lock('k', 'somebody', 3600)")
	s := terminalOn(t, db.URL)
	s.enters(t, "TERM=xterm NO_COLOR= $PGXLOCK watch --every 1s")
	for range 2 {
		s.shows(t, home+cutLines+"\x1b[1m20")
		s.shows(t, "1 hold, 0 wait, 0 left behind"+restOfRow)
		s.shows(t, "\x1b[32mlive\x1b[0m")
		s.shows(t, restOfAll)
	}
	s.types(t, "\x03")
	s.shows(t, "$ ")
	s.enters(t, "echo code $?; TERM=xterm NO_COLOR=1 $PGXLOCK watch")
	s.shows(t, "code 130")
	s.shows(t, home+cutLines+"20") // without colors
	s.types(t, "\x03")
}
