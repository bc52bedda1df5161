package serve

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
)

const (
	// span is how far back the plots go. What could not be read is a gap in them.
	span = time.Hour

	// beat is how often a state is read for the plots while nobody looks: as often as they
	// have a step.
	beat = span / plotSteps
)

// A sample is what one state adds to the history. A number that is not known is less than 0.
type sample struct {
	at                     time.Time
	held, waiting, expired int
	longest                time.Duration // of the waits that last
}

// remember adds what this state knows to what the one before it knew.
func (now *state) remember(before *state) {
	if before != nil {
		now.history, now.renewals = before.history, before.renewals
	}
	old := slices.IndexFunc(now.history, func(s sample) bool { return now.at.Sub(s.at) < span })
	if old < 0 {
		old = len(now.history)
	}
	now.history = now.history[old:]
	if now.cannot != "" {
		return
	}
	if before != nil {
		var found []Loss
		if now.shot.Unread.Leases == nil { // else a lease that cannot be seen is not gone
			found = now.lost(before)
		}
		found = append(found, before.losses...)
		found = slices.DeleteFunc(found, func(l Loss) bool { return now.shot.At.Sub(l.Holder.Expires) >= span })
		now.losses = found[:min(len(found), mostLosses)]
	}
	s := sample{at: now.at, held: len(now.shot.Holders), waiting: len(now.shot.Waiters), expired: len(now.shot.Expired)}
	if now.shot.Unread.Leases != nil && !now.partly() {
		s.expired = -1
	}
	for _, w := range now.shot.Waiters {
		if !w.Since.IsZero() {
			s.longest = max(s.longest, now.shot.At.Sub(w.Since))
		}
	}
	// A state that is shown has the beginning of the same array, and never looks behind its end.
	now.history = append(now.history, s)

	now.renewals = now.renewals.With(&now.shot)
}

// usual are times to live that people choose.
var usual = []time.Duration{
	time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, 20 * time.Second, 30 * time.Second, 45 * time.Second,
	time.Minute, 90 * time.Second, 2 * time.Minute, 3 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
	time.Hour, 2 * time.Hour, 4 * time.Hour, 6 * time.Hour, 12 * time.Hour, 24 * time.Hour,
}

// ttl returns about how long a lease lasts after a renewal, which the server does not record:
// the least usual time that is no less than what was seen to remain.
func (now *state) ttl(h *pgxlock.Holder) time.Duration {
	longest := now.renewals.Longest(h)
	for _, d := range usual {
		if longest <= d {
			return d
		}
	}
	return longest
}

// A plot is a number over the last hour.
type plot struct {
	Title, Now, Most string
	Class            string
	Area, Line       string // paths in a box of plotWidth by plotHeight
}

const (
	plotWidth  = 240
	plotHeight = 44
	plotSteps  = 120 // of 30 s each; of several samples in a step the greatest counts
)

// plots returns the plots of a state.
func (now *state) plots() []plot {
	number := func(value func(sample) int) func(sample) float64 {
		return func(s sample) float64 { return float64(value(s)) }
	}
	count := func(v float64) string { return grouped(int(v)) }
	unread := now.shot.Unread
	return []plot{
		now.plot("held", "held", number(func(s sample) int { return s.held }), count, cmp.Or(unread.Leases, unread.Advisory)),
		now.plot("waiting", "waiting", number(func(s sample) int { return s.waiting }), count, unread.Queues),
		now.plot("longest wait", "waiting", func(s sample) float64 { return s.longest.Seconds() }, func(v float64) string {
			return readable.Duration(time.Duration(v * float64(time.Second)).Round(100 * time.Millisecond))
		}, unread.Queues),
		now.plot("left behind", "expired", number(func(s sample) int { return s.expired }), count, unread.Leases),
	}
}

// plot returns the plot of a number, which is the least that it may be where something is unread.
func (now *state) plot(title, class string, value func(sample) float64, text func(float64) string, unread error) plot {
	const none = -1
	steps := slices.Repeat([]float64{none}, plotSteps)
	most := 0.0
	for _, s := range now.history {
		step := plotSteps - 1 - int(now.at.Sub(s.at)*plotSteps/span)
		if step >= 0 {
			steps[step] = max(steps[step], value(s))
			most = max(most, value(s))
		}
	}
	p := plot{Title: title, Class: class, Now: "–"}
	if slices.Max(steps) > none {
		p.Most = text(most)
		if last := value(now.history[len(now.history)-1]); last >= 0 {
			p.Now = text(last)
		}
		if unread != nil && p.Now != "–" {
			p.Now = "≥ " + p.Now
		}
	}
	var line, area strings.Builder
	const width = float64(plotWidth) / plotSteps
	y := func(v float64) float64 { return plotHeight - 1 - v/max(most, 1)*(plotHeight-3) }
	for i := 0; i < plotSteps; i++ {
		if steps[i] == none {
			continue
		}
		begin := i
		for ; i < plotSteps && steps[i] != none; i++ {
			x, verb := float64(i)*width, "L"
			if i == begin {
				verb = "M"
			}
			fmt.Fprintf(&line, "%s%.1f %.1fH%.1f", verb, x, y(steps[i]), x+width)
		}
		fmt.Fprintf(&area, "M%.1f %d", float64(begin)*width, plotHeight)
		for j := begin; j < i; j++ {
			fmt.Fprintf(&area, "V%.1fH%.1f", y(steps[j]), float64(j+1)*width)
		}
		fmt.Fprintf(&area, "V%dZ", plotHeight)
	}
	p.Line, p.Area = line.String(), area.String()
	return p
}

// grouped writes a number with a space between thousands.
func grouped(n int) string {
	text := fmt.Sprint(n)
	for at := len(text) - 3; at > 0; at -= 3 {
		text = text[:at] + " " + text[at:]
	}
	return text
}
