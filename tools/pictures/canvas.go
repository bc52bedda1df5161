package main

import (
	"encoding/xml"
	"fmt"
	"math"
	"strings"
)

// A look is how a part of a picture is painted in light and in dark mode. Empty: not at all.
type look struct {
	name                               string
	fill, stroke, darkFill, darkStroke string
}

// looks are all that a picture may use.
var looks = []look{
	{name: "paper", fill: "#ffffff", darkFill: "#0d1117"},
	{name: "ink", fill: "#1f2328", darkFill: "#e6edf3"},
	{name: "faint", fill: "#57606a", darkFill: "#9198a1"},
	{name: "good", fill: "#1a7f37", darkFill: "#3fb950"},
	{name: "bad", fill: "#cf222e", darkFill: "#f85149"},
	{name: "yellow", fill: "#8a5a00", darkFill: "#e3b341"},
	{name: "blue", fill: "#0550ae", darkFill: "#79c0ff"},
	{name: "magenta", fill: "#8250df", darkFill: "#d2a8ff"},
	{name: "cyan", fill: "#1b7c83", darkFill: "#56d4dd"},
	{name: "dot", fill: "#d0d7de", darkFill: "#3d444d"},
	{name: "rule", stroke: "#d0d7de", darkStroke: "#3d444d"},
}

const (
	sans = `system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif`
	mono = `ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace`
)

// A canvas is a picture that is being drawn. It is readable where styles are ignored, too:
// each part carries the colours of light mode as attributes.
type canvas struct {
	width, height int
	title, desc   string
	body          strings.Builder
	used          map[string]bool
}

func newCanvas(width, height int, title, desc string) *canvas {
	return &canvas{width: width, height: height, title: title, desc: desc, used: map[string]bool{"paper": true}}
}

func (c *canvas) draw(format string, args ...any) { fmt.Fprintf(&c.body, format+"\n", args...) }

// as returns the attributes of a look.
func (c *canvas) as(name string) string {
	for _, l := range looks {
		if l.name != name {
			continue
		}
		c.used[name] = true
		text := fmt.Sprintf(`class="%s"`, name)
		fill := l.fill
		if fill == "" {
			fill = "none"
		}
		text += fmt.Sprintf(` fill="%s"`, fill)
		if l.stroke != "" {
			text += fmt.Sprintf(` stroke="%s" stroke-width="1.5"`, l.stroke)
		}
		return text
	}
	panic("there is no look " + name)
}

// A font is how large a text is, and of which kind.
type font struct {
	size             float64
	bold, mono       bool
	centred, fromEnd bool // where the text is beside its x, which is its left end otherwise
}

// text writes a line; y is its base line.
func (c *canvas) text(as string, f font, x, y int, text string) {
	more := ""
	if f.bold {
		more += ` font-weight="600"`
	}
	if f.mono {
		more += ` font-family="` + mono + `"`
	}
	if f.centred {
		more += ` text-anchor="middle"`
	}
	if f.fromEnd {
		more += ` text-anchor="end"`
	}
	c.draw(`<text x="%d" y="%d" font-size="%g" %s%s>%s</text>`, x, y, f.size, c.as(as), more, escape(text))
}

// widthOf is about how wide a text is in the widest of the fonts.
func widthOf(f font, text string) int {
	each := 0.6
	if f.bold && !f.mono {
		each = 0.66
	}
	return int(math.Ceil(each * f.size * float64(len([]rune(text)))))
}

// String returns the picture as SVG.
func (c *canvas) String() string {
	var b, dark strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" aria-labelledby="title desc" font-family="%s">`+"\n",
		c.width, c.height, c.width, c.height, sans)
	fmt.Fprintf(&b, "<title id=\"title\">%s</title>\n<desc id=\"desc\">%s</desc>\n", escape(c.title), escape(c.desc))
	for _, l := range looks {
		if !c.used[l.name] {
			continue
		}
		fmt.Fprintf(&dark, ".%s{", l.name)
		if l.darkFill != "" {
			fmt.Fprintf(&dark, "fill:%s;", l.darkFill)
		}
		if l.darkStroke != "" {
			fmt.Fprintf(&dark, "stroke:%s;", l.darkStroke)
		}
		dark.WriteString("}\n")
	}
	fmt.Fprintf(&b, "<style>\n@media (prefers-color-scheme: dark) {\n%s}\n</style>\n", dark.String())
	fmt.Fprintf(&b, "<rect width=\"%d\" height=\"%d\" rx=\"8\" %s/>\n", c.width, c.height, c.as("paper"))
	b.WriteString(c.body.String())
	b.WriteString("</svg>\n")
	return b.String()
}

// escape makes a text one of XML.
func escape(text string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(text)) // a Builder takes everything
	return b.String()
}
