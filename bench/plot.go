package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// Measures of a plot, in pixels.
const (
	plotLeft   = 70
	plotTop    = 40
	plotWidth  = 540
	plotHeight = 240
)

var curveColours = []string{"#336791", "#c0561b", "#777777", "#1a7f37"}

// decades are the powers of ten around some values.
func decades(values []float64) (from, to float64) {
	least, most := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if v > 0 {
			least, most = min(least, v), max(most, v)
		}
	}
	if least > most {
		return 0, 1 // none is above 0
	}
	from, to = math.Floor(math.Log10(least)), math.Ceil(math.Log10(most))
	return from, max(to, from+1)
}

// draw draws the curves on logarithmic scales: each line is ten times the one before.
func (p *plot) draw() string {
	var xs, ys []float64
	for _, c := range p.curves {
		for _, at := range c.points {
			xs, ys = append(xs, at.x), append(ys, at.y)
		}
	}
	xFrom, xTo := decades(xs)
	yFrom, yTo := decades(ys)
	x := func(v float64) float64 { return plotLeft + (math.Log10(v)-xFrom)/(xTo-xFrom)*plotWidth }
	y := func(v float64) float64 {
		if v <= 0 {
			return plotTop + plotHeight // such values have no place on a logarithmic scale
		}
		return plotTop + plotHeight - (math.Log10(v)-yFrom)/(yTo-yFrom)*plotHeight
	}
	var svg strings.Builder
	draw := func(format string, args ...any) { fmt.Fprintf(&svg, format+"\n", args...) }
	height := plotTop + plotHeight + 40 + 18*len(p.curves)
	draw(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`, plotLeft+plotWidth+40, height)
	draw(`<rect width="100%%" height="100%%" fill="#ffffff"/>`)
	draw(`<text x="8" y="20" font-weight="bold" fill="#222222">%s</text>`, html.EscapeString(p.title))
	for d := xFrom; d <= xTo; d++ {
		at := x(math.Pow(10, d))
		draw(`<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#dddddd"/>`, at, plotTop, at, plotTop+plotHeight)
		draw(`<text x="%.1f" y="%d" text-anchor="middle" fill="#777777">%s</text>`, at, plotTop+plotHeight+16, rate(math.Pow(10, d)))
	}
	for d := yFrom; d <= yTo; d++ {
		at := y(math.Pow(10, d))
		draw(`<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="#dddddd"/>`, plotLeft, at, plotLeft+plotWidth, at)
		draw(`<text x="%d" y="%.1f" text-anchor="end" fill="#777777">%s</text>`, plotLeft-6, at+4, rate(math.Pow(10, d)))
	}
	for i, c := range p.curves {
		colour := curveColours[i%len(curveColours)]
		var line []string
		for _, at := range c.points {
			line = append(line, fmt.Sprintf("%.1f,%.1f", x(at.x), y(at.y)))
			draw(`<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`, x(at.x), y(at.y), colour)
		}
		draw(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`, strings.Join(line, " "), colour)
		bottom := plotTop + plotHeight + 38 + 18*i
		draw(`<rect x="%d" y="%d" width="12" height="12" fill="%s"/>`, plotLeft, bottom-10, colour)
		draw(`<text x="%d" y="%d" fill="#222222">%s</text>`, plotLeft+18, bottom, html.EscapeString(c.name+", "+p.unit+", by "+p.of))
	}
	draw(`</svg>`)
	return svg.String()
}
