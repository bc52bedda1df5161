// Package readable writes what anybody may have chosen, and durations, for people: in a
// terminal and in a page.
package readable

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// Text quotes control characters, and those that change the direction of a text: any caller
// may choose a name.
func Text(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0 {
		return s
	}
	quoted := strconv.Quote(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
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
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
}
