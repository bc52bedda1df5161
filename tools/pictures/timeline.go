package main

import "fmt"

// timeline draws why a lease needs a fence: its holder freezes, another process takes the
// lease over, and what the first one writes when it wakes is refused. It has the default
// times: a TTL of 30 s, a renewal each 10 s, and a holder that gives up 3 s early.
func timeline() *canvas {
	const (
		ttl, margin             = 30, 3
		froze, woke, ends       = 24, 64, 76
		asks, wrote, wroteFirst = 12, 59, 16
		renewed                 = 20
		expires                 = renewed + ttl

		left, right = 108, 888
		laneA       = 54 // the lanes' upper ends
		laneLease   = 150
		laneData    = 234
		laneB       = 300
		high        = 38
		axis        = 394
	)
	at := func(second int) int { return left + second*10 }
	c := newCanvas(900, 430, "A lease, a freeze, a take-over and a refused write",
		"Time runs from left to right. Process A acquires a lease with token 33, writes, and renews every 10 seconds. At 24 seconds A freezes. "+
			"The lease expires at 50 seconds, 30 seconds after the last renewal. Process B, which has waited, takes it over with token 34 and commits a write. "+
			"At 64 seconds A wakes and wants to write: Fence returns ErrLost, and nothing of A's is written.")
	label, note, small := font{size: 14, bold: true}, font{size: 12}, font{size: 12, centred: true}

	c.box("band", 8, laneLease-18, 884, laneData+28-(laneLease-18))
	lane := func(y int, name, below string) {
		c.text("ink", label, 20, y+18, name)
		c.text("faint", font{size: 11}, 20, y+33, below)
	}
	lane(laneA, "process A", "the holder")
	lane(laneLease, "the lease", "in PostgreSQL")
	lane(laneData-20, "the data", "in PostgreSQL")
	lane(laneB, "process B", "a waiter")

	// The end of the lease, through all lanes.
	c.line("ended", at(expires), 34, at(expires), laneB+high+18)
	c.text("bad", font{size: 12, bold: true, centred: true}, at(expires), 24, "the lease expires")

	segment := func(as string, y, from, to int, text string) {
		c.box(as, at(from), y, at(to)-at(from), high)
		if text != "" {
			c.text("ink", font{size: 13, centred: true}, (at(from)+at(to))/2, y+high/2+5, text)
		}
	}
	segment("ours", laneA, 0, froze, "Do: works, and renews")
	segment("frozen", laneA, froze, woke, "")
	c.text("ink", font{size: 13, centred: true}, (at(froze)+at(expires-margin))/2, laneA+high/2+5, "frozen: SIGSTOP, a paused VM")
	segment("ours", laneA, woke, ends, "goes on")
	segment("ours", laneLease, 0, expires, "held by A, token 33")
	segment("other", laneLease, expires, ends, "held by B, token 34")
	segment("waiting", laneB, asks, expires, "Do: waits")
	segment("other", laneB, expires, ends, "works, and renews")

	// What A sends.
	for i, what := range []string{"acquires", "renews", "renews"} {
		x := max(at(10*i), at(0)+4)
		c.arrow("line", "head", x, laneA+high, x, laneLease)
		c.text("faint", note, x+6, laneA+high+22, what)
	}
	c.line("rule", left, laneData, right-20, laneData)
	commit := func(x int, text string) {
		c.draw(`<circle cx="%d" cy="%d" r="6" %s/>`, x, laneData, c.as("good"))
		c.text("good", note, x+12, laneData+18, text)
	}
	c.path("ok", fmt.Sprintf("M%d %dV%d", at(wroteFirst), laneLease+high, laneData-6))
	c.line("ok", at(wroteFirst), laneA+high, at(wroteFirst), laneLease)
	commit(at(wroteFirst), "Fence, write, commit")

	// From the last renewal to the end.
	c.path("line", fmt.Sprintf("M%d %dv8H%dv-8", at(renewed), laneLease+high+6, at(expires)))
	c.text("faint", small, (at(renewed)+at(expires))/2, laneLease+high+28, "30 s (the TTL) without a renewal")
	c.text("faint", note, at(froze), 44, "freezes")
	c.line("line", at(expires-margin), laneA-4, at(expires-margin), laneA+high+4)
	c.text("faint", font{size: 12, fromEnd: true}, at(expires-margin)-6, laneA+high+22, "A's own deadline,")
	c.text("faint", font{size: 12, fromEnd: true}, at(expires-margin)-6, laneA+high+37, "a margin earlier: its context ends")

	// What A wants to write.
	x := at(woke + 2)
	c.line("stop", x, laneA+high, x, laneLease-12)
	c.path("stop", fmt.Sprintf("M%d %dl12 12m0 -12l-12 12", x-6, laneLease-16))
	c.text("faint", note, at(woke), 44, "wakes")
	c.text("bad", font{size: 12, bold: true}, x+12, laneA+high+20, "Fence: ErrLost,")
	c.text("bad", font{size: 12, bold: true}, x+12, laneA+high+35, "no write")

	// What B does.
	c.arrow("line", "head", at(expires)+8, laneB, at(expires)+8, laneLease+high)
	c.text("faint", note, at(expires)+14, laneB-12, "takes over")
	c.arrow("ok", "good", at(wrote), laneB, at(wrote), laneData+6)
	commit(at(wrote), "Fence, write, commit")
	c.text("faint", note, at(asks), laneB+high+17, "asks, and queues")

	c.line("line", left, axis, right, axis)
	for second := 0; second <= 70; second += 10 {
		c.line("line", at(second), axis, at(second), axis+5)
		c.text("faint", small, at(second), axis+20, fmt.Sprint(second, " s"))
	}
	return c
}
