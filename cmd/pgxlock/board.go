package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/monitor"
)

// A board is a terminal on which watch draws one snapshot over the other, selected and sorted as
// its user says by keys.
type board struct {
	cmd     *cobra.Command
	out     *os.File
	palette palette
	keys    bool // there are any
	quit    func()

	mu        sync.Mutex
	selection selection
	typing    bool   // a filter
	part      []byte // of a key that is typed
	scroll    string // lines that scroll away what was there before
	shot      monitor.Snapshot
}

// show draws a snapshot.
func (b *board) show(shot monitor.Snapshot) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, text := range shot.Missing {
		shot.Missing[i] = inFlags(b.cmd.Flags(), advices, text)
	}
	b.shot = shot
	return b.drawLocked()
}

// again draws the last snapshot once more.
func (b *board) again() {
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = b.drawLocked() // the next snapshot finds out what is wrong
}

func (b *board) drawLocked() error {
	if b.shot.At.IsZero() {
		return nil
	}
	columns, rows, _ := window(b.out)                                              // it may have changed
	text, err := frame(b.palette, b.selection.of(b.shot), true, max(0, columns-1)) // in the last column a terminal may wrap
	if err == nil {
		_, err = io.WriteString(b.out, b.scroll+redrawn(text, rows, b.palette.paint(faint, b.statusLocked())))
		b.scroll = ""
	}
	return err
}

// statusLocked says what is shown, and which keys change it; "" if there is nothing to say.
func (b *board) statusLocked() string {
	s := b.selection
	if !b.keys && len(s.kinds) == 0 && s.key == "" && s.order == orderKind {
		return ""
	}
	shown := "sort: " + s.order + "  kind: all"
	if len(s.kinds) > 0 {
		shown = "sort: " + s.order + "  kind: " + strings.Join(s.kinds, ", ")
	}
	switch {
	case b.typing:
		return fmt.Sprintf("/%s_  (Enter keeps, Esc clears)", printable(s.key))
	case s.key != "":
		shown += "  key: " + printable(s.key)
	}
	if b.keys {
		shown += "  (s sort, k kind, / key, q quit)"
	}
	return shown
}

// Keys that are no characters.
const (
	escape    = 0x1b
	backspace = 0x7f
	ctrlH     = 'h' & 0x1f
	ctrlU     = 'u' & 0x1f
)

// press does what keys mean that were typed at once.
func (b *board) press(typed []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.part = append(b.part, typed...)
	for len(b.part) > 0 {
		if size, whole := sequence(b.part); size > 0 {
			if !whole {
				break
			}
			b.part = b.part[size:]
			continue
		}
		if !utf8.FullRune(b.part) {
			break
		}
		r, size := utf8.DecodeRune(b.part)
		b.part = b.part[size:]
		if b.typing {
			b.typeLocked(r)
		} else {
			b.commandLocked(r)
		}
	}
	_ = b.drawLocked() // the next snapshot finds out what is wrong
}

// sequence returns how many bytes an arrow has, or another key of which a terminal makes several
// characters, and whether it is there as a whole; 0: it is no such key.
func sequence(typed []byte) (size int, whole bool) {
	if len(typed) < 2 || typed[0] != escape || typed[1] != '[' && typed[1] != 'O' {
		return 0, false
	}
	for i, c := range typed[2:] {
		if c >= '@' && c <= '~' { // else a parameter
			return i + 3, true
		}
	}
	return len(typed), false
}

// typeLocked adds a character to the filter, or ends it.
func (b *board) typeLocked(r rune) {
	key := []rune(b.selection.key)
	switch {
	case r == '\r' || r == '\n':
		b.typing = false
	case r == escape:
		b.typing, key = false, nil
	case r == ctrlU:
		key = nil
	case (r == backspace || r == ctrlH) && len(key) > 0:
		key = key[:len(key)-1]
	case unicode.IsPrint(r) && r != utf8.RuneError:
		key = append(key, r)
	}
	b.selection.key = string(key)
}

func (b *board) commandLocked(r rune) {
	switch s := &b.selection; r {
	case 's':
		s.order = orders[(slices.Index(orders, s.order)+1)%len(orders)]
	case 'k':
		if i := slices.Index(kinds, strings.Join(s.kinds, ",")) + 1; i < len(kinds) {
			s.kinds = kinds[i : i+1]
		} else {
			s.kinds = nil
		}
	case '/':
		b.typing = true
	case escape:
		s.key = ""
	case 'q':
		b.quit()
	}
}
