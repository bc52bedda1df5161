package main

import (
	"fmt"
	"strings"
)

// A wish is what somebody wants, and either the wishes that it divides into or what to use.
type wish struct {
	text   string
	wishes []wish
	use    []string // names in code: the first is the larger one
	needs  string   // the migrations, or when they are needed; empty: never
}

// choices says what the table "Which lock for what" of README.md says, as a tree.
var choices = []wish{
	{text: "do it in one transaction", wishes: []wish{
		{text: "protect what it writes", use: []string{"LockTx", "LockAllTx"}},
		{text: "do a thing once, however often it is asked for", use: []string{"ClaimTx"}, needs: "migrations"},
	}},
	{text: "hold a lock longer than a transaction", wishes: []wish{
		{text: "and fence writes", use: []string{"NewLeaseLocker", "Do", "TryDo", "DoTx", "Acquire"}, needs: "migrations"},
		{text: "very often, or free the moment a process dies", use: []string{"NewAdvisoryLocker"}},
		{text: "have one leader", use: []string{"Locker.Lead", "pgxlock lead"}, needs: "migrations, for leases"},
		{text: "let in a few at a time", use: []string{"Locker.Semaphore"}, needs: "migrations"},
	}},
	{text: "run a job once per period or tick", use: []string{"once", "pgxlock once"}, needs: "migrations"},
	{text: "limit a rate over all processes", use: []string{"ratelimit"}, needs: "migrations"},
	{text: "run a command under a lock", use: []string{"pgxlock run"}, needs: "migrations, for leases"},
	{text: "test without a server", use: []string{"NewMemoryLocker", "once.NewMemory", "ratelimit.NewMemory"}},
}

// shared is the option that goes with several of them.
var shared = []string{"Shared", "LockTx", "LockAllTx"}

// whichLock draws the tree of choices, from left to right.
func whichLock() *canvas {
	const (
		trunk                   = 20
		first, firstWidth       = 44, 190
		second, secondWidth     = 274, 222
		leaf, leafWidth         = 536, 348
		rowHeight, gap, between = 46, 8, 10
		top                     = 52
	)
	rows := 0
	for _, w := range choices {
		rows += max(1, len(w.wishes))
	}
	height := top + rows*(rowHeight+gap) + len(choices)*between + 50
	c := newCanvas(900, height, "Which lock for what", "A decision tree. "+said(choices, ""))
	c.text("ink", font{size: 15, bold: true}, trunk, 30, "You want to ...")
	c.text("faint", font{size: 12}, leaf, 30, "use")
	c.text("faint", font{size: 12, fromEnd: true}, leaf+leafWidth, 30, "needs")

	question := func(x, y, width int, text string) {
		f := font{size: 13, centred: true}
		c.box("box", x, y, width, rowHeight)
		lines := wrapped(f, width-12, text)
		for i, line := range lines {
			c.text("ink", f, x+width/2, y+rowHeight/2+5+(2*i-len(lines)+1)*8, line)
		}
	}
	answer := func(y int, w wish) {
		c.box("ours", leaf, y, leafWidth, rowHeight)
		large, small := font{size: 14, bold: true, mono: true}, font{size: 12, mono: true}
		line := y + rowHeight/2 + 5
		if len(w.use) > 1 {
			line -= 8
			c.text("ink", small, leaf+12, line+17, strings.Join(w.use[1:], ", "))
		}
		name := w.use[0]
		if !strings.ContainsAny(name, ". ") && strings.ToLower(name) == name {
			name = "package " + name
		}
		c.text("ink", large, leaf+12, line, name)
		if w.needs != "" {
			c.text("faint", font{size: 11, fromEnd: true}, leaf+leafWidth-10, line, w.needs)
		}
	}
	// elbow leads from a box or the trunk to the box at the right.
	elbow := func(x1, y1, x2, y2 int) {
		if y1 == y2 {
			c.arrow("line", "head", x1, y1, x2, y2)
			return
		}
		middle := x1 + 14
		c.path("line", fmt.Sprintf("M%d %dH%dV%d", x1, y1, middle, y2))
		c.arrow("line", "head", middle, y2, x2, y2)
	}

	y, last := top, 0
	for _, w := range choices {
		n := max(1, len(w.wishes))
		block := n*rowHeight + (n-1)*gap
		at := y + (block-rowHeight)/2
		last = at + rowHeight/2
		c.arrow("line", "head", trunk, last, first, last)
		question(first, at, firstWidth, w.text)
		if len(w.wishes) == 0 {
			elbow(first+firstWidth, last, leaf, last)
			answer(y, w)
		}
		for i, inner := range w.wishes {
			row := y + i*(rowHeight+gap)
			elbow(first+firstWidth, last, second, row+rowHeight/2)
			question(second, row, secondWidth, inner.text)
			elbow(second+secondWidth, row+rowHeight/2, leaf, row+rowHeight/2)
			answer(row, inner)
		}
		y += block + gap + between
	}
	c.line("line", trunk, 38, trunk, last)
	c.text("faint", font{size: 12}, trunk, y+10, "Readers come in together by the option "+shared[0]+", with "+strings.Join(shared[1:], ", ")+", a lease or an advisory lock.")
	c.text("faint", font{size: 12}, trunk, y+28, "A lease and an advisory lock of the same key do not exclude each other.")
	return c
}

// said says a tree in words.
func said(wishes []wish, before string) string {
	var b strings.Builder
	for _, w := range wishes {
		if len(w.wishes) > 0 {
			b.WriteString(said(w.wishes, before+w.text+", "))
			continue
		}
		fmt.Fprintf(&b, "To %s%s: %s. ", before, w.text, strings.Join(w.use, ", "))
	}
	return b.String()
}
