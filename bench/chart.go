package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// Measures of the chart, in pixels.
const (
	labelWidth = 130
	barsWidth  = 480
	valueWidth = 70
	barHeight  = 16
	groupGap   = 34
)

// chart draws how much each way does a second as bars, a group for each number of
// workers. The scale is logarithmic: each line is ten times the one before.
func chart(rows []measured) string {
	least, most := math.Inf(1), math.Inf(-1)
	height := 10
	for _, m := range rows {
		height += groupGap + len(m.ways)*barHeight
		for _, c := range m.ways {
			least, most = min(least, c.perSecond), max(most, c.perSecond)
		}
	}
	from, to := math.Floor(math.Log10(least)), math.Ceil(math.Log10(most))
	at := func(perSecond float64) float64 { return (math.Log10(perSecond) - from) / max(to-from, 1) * barsWidth }

	var svg strings.Builder
	draw := func(format string, args ...any) { fmt.Fprintf(&svg, format+"\n", args...) }
	draw(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`, labelWidth+barsWidth+valueWidth, height+10)
	draw(`<rect width="100%%" height="100%%" fill="#ffffff"/>`)
	for decade := from; decade <= to; decade++ {
		x := labelWidth + at(math.Pow(10, decade))
		draw(`<line x1="%.1f" y1="24" x2="%.1f" y2="%d" stroke="#dddddd"/>`, x, x, height)
		draw(`<text x="%.1f" y="16" text-anchor="middle" fill="#777777">%s/s</text>`, x, rate(math.Pow(10, decade)))
	}
	y := 10
	for _, m := range rows {
		y += groupGap
		draw(`<text x="8" y="%d" font-weight="bold" fill="#222222">%s</text>`, y-8, workers(m.workers))
		for _, c := range m.ways {
			colour := "#b8b8b8"
			if isOurs(c.name) {
				colour = "#336791"
			}
			draw(`<text x="%d" y="%d" text-anchor="end" fill="#222222">%s</text>`, labelWidth-6, y+barHeight-4, html.EscapeString(c.name))
			draw(`<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`, labelWidth, y+2, max(at(c.perSecond), 1), barHeight-4, colour)
			draw(`<text x="%.1f" y="%d" fill="#222222">%s</text>`, labelWidth+at(c.perSecond)+5, y+barHeight-4, rate(c.perSecond))
			y += barHeight
		}
	}
	draw(`</svg>`)
	return svg.String()
}

// isOurs reports whether a way of a table is pgxlock's: those that have peers.
func isOurs(name string) bool {
	for _, t := range tables {
		for _, c := range t.contestants {
			if c.name == name {
				return len(c.against) > 0
			}
		}
	}
	return false
}
