// Package readable is how a terminal and a page alike show times and numbers to people.
package readable

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/mattn/go-runewidth"
)

// Exact writes a duration as flags take it, without the units of which there are none.
func Exact(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// Duration writes a duration as precisely as people want to know it.
func Duration(d time.Duration) string {
	if d < 0 {
		return "-" + Duration(-d)
	}
	const day = 24 * time.Hour
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < day:
		return Exact(d.Round(time.Minute))
	}
	return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
}

// Age writes how long something lasts at a moment; "" if its begin is not known.
func Age(at, since time.Time) string {
	if since.IsZero() {
		return ""
	}
	return Duration(max(0, at.Sub(since)))
}

// Number writes a number; "" for 0, which is one that is not known.
func Number[N int | int32 | int64](n N) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(int64(n), 10)
}

// Earlier compares two times, of which one that is not known comes last.
func Earlier(a, b time.Time) int {
	switch {
	case a.IsZero() == b.IsZero():
		return a.Compare(b)
	case a.IsZero():
		return 1
	}
	return -1
}

// Shortened shortens a name to so many columns, in the middle: names of pods differ at their end. What is
// left of the random part of a holder id stays.
func Shortened(name string, columns int) string {
	const least = 10 // of the name before it
	width := runewidth.StringWidth(name)
	if width <= columns {
		return name
	}
	if before, rest, ok := strings.Cut(name, ":…"); ok {
		if room := columns - runewidth.StringWidth(":…"+rest); room >= least {
			return Shortened(before, room) + ":…" + rest
		}
	}
	begin := (columns - 1) / 3
	return runewidth.Truncate(name, begin, "") + "…" + runewidth.TruncateLeft(name, width-(columns-1-begin), "")
}
