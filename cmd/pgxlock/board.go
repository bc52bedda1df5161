package main

import (
	"fmt"
	"io"
	"math"
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
	grant   func(text string) string // [granting]

	mu        sync.Mutex
	selection selection
	wide      bool
	top       int    // the first line that is shown
	page      int    // how many lines are shown
	typing    bool   // a filter
	part      []byte // of a key that is typed
	before    string // lines that scroll what was there away, so that it is not lost
	shot      monitor.Snapshot
}

// show draws a snapshot.
func (b *board) show(shot monitor.Snapshot) error {
	for i, text := range shot.Missing {
		shot.Missing[i] = b.grant(inFlags(b.cmd.Flags(), advices, text))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
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
	columns, rows, _ := window(b.out)                              // it may have changed
	s := sheet{columns: max(0, columns-1), more: "w", clips: true} // in the last column a terminal may wrap
	if b.wide {
		s.more = ""
	}
	text, err := frame(b.palette, b.selection.of(b.shot), true, s)
	if err == nil {
		text, b.top = redrawn(text, rows, b.top, b.palette.paint(faint, b.statusLocked()))
		b.page = max(1, rows-4)
		_, err = io.WriteString(b.out, b.before+text)
		b.before = ""
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
	if b.wide {
		shown += "  wide"
	}
	if b.keys {
		shown += "  (s sort, k kind, / key, w wide, ↑↓, q quit)"
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
			b.scrollLocked(string(b.part[2:size]))
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

// scrollLocked does what an arrow means, or a key next to it, of which the terminal makes an
// escape sequence that ends so.
func (b *board) scrollLocked(key string) {
	switch key {
	case "A":
		b.top--
	case "B":
		b.top++
	case "5~": // PgUp
		b.top -= b.page
	case "6~": // PgDn
		b.top += b.page
	case "H", "1~", "7~": // Home
		b.top = 0
	case "F", "4~", "8~": // End
		b.top = math.MaxInt32
	}
	b.top = max(0, b.top)
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
	b.selection.key, b.top = string(key), 0
}

func (b *board) commandLocked(r rune) {
	switch s := &b.selection; r {
	case 's':
		b.top, s.order = 0, orders[(slices.Index(orders, s.order)+1)%len(orders)]
	case 'k':
		b.top = 0
		if i := slices.Index(kinds, strings.Join(s.kinds, ",")) + 1; i < len(kinds) {
			s.kinds = kinds[i : i+1]
		} else {
			s.kinds = nil
		}
	case '/':
		b.typing = true
	case 'w':
		b.wide = !b.wide
	case escape:
		s.key = ""
	case 'q':
		b.quit()
	}
}
