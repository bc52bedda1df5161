package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A style is how a terminal shows a character.
type style struct {
	bold, faint bool
	colour      int // 30 to 37; 0: none
}

// look returns the name of the look that paints it.
func (s style) look() string {
	names := map[int]string{31: "bad", 32: "good", 33: "yellow", 34: "blue", 35: "magenta", 36: "cyan"}
	switch {
	case names[s.colour] != "":
		return names[s.colour]
	case s.faint:
		return "faint"
	}
	return "ink"
}

// A stretch is characters of one style beside each other.
type stretch struct {
	style
	column int
	text   string
}

var escapes = regexp.MustCompile(`\x1b\[([0-9;]*)m`)

// stretches reads a screen as tmux captures it. It fails where the screen has a style or a
// control character that terminal cannot draw.
func stretches(screen string) (lines [][]stretch, err error) {
	var now style
	for line := range strings.Lines(strings.TrimRight(screen, " \n")) {
		line = strings.TrimRight(line, "\n")
		var parts []stretch
		column := 0
		add := func(text string) {
			begin := column
			column += utf8.RuneCountInString(text)
			if trimmed := strings.TrimLeft(text, " "); trimmed != "" {
				begin += len(text) - len(trimmed)
				parts = append(parts, stretch{now, begin, strings.TrimRight(trimmed, " ")})
			}
		}
		for {
			at := escapes.FindStringSubmatchIndex(line)
			if at == nil {
				break
			}
			add(line[:at[0]])
			for code := range strings.SplitSeq(line[at[2]:at[3]], ";") {
				n, _ := strconv.Atoi(code) // none is 0
				switch {
				case n == 0:
					now = style{}
				case n == 1:
					now.bold = true
				case n == 2:
					now.faint = true
				case n == 22:
					now.bold, now.faint = false, false
				case n >= 31 && n <= 36:
					now.colour = n
				case n == 39:
					now.colour = 0
				case n == 49: // the ground is never coloured
				default:
					return nil, fmt.Errorf("%q: the terminal shows a style that pictures do not know", line)
				}
			}
			line = line[at[1]:]
		}
		if strings.ContainsFunc(line, func(r rune) bool { return r < ' ' }) {
			return nil, fmt.Errorf("%q: the terminal shows a control character", line)
		}
		add(line)
		lines = append(lines, parts)
	}
	return lines, nil
}

// terminal draws a screen of so many columns in a frame.
func terminal(screen string, columns int, title, desc string) (*canvas, error) {
	lines, err := stretches(screen)
	if err != nil {
		return nil, err
	}
	const side, head, width = 18, 34, 900
	cell := float64(width-2*side) / float64(columns)
	size := min(cell/0.6, 14) // a monospaced letter is about 0.6 of its height wide
	cell = size * 0.6
	high := size * 1.35
	whole := 2*side + int(cell*float64(columns)+0.5)
	c := newCanvas(whole, head+int(high*float64(len(lines))+0.5)+side, title, desc)
	c.draw(`<rect x="0.75" y="0.75" width="%g" height="%g" rx="8" %s/>`, float64(whole)-1.5, float64(c.height)-1.5, c.as("rule"))
	for i := range 3 {
		c.draw(`<circle cx="%d" cy="16" r="5" %s/>`, 18+16*i, c.as("dot"))
	}
	called, _, _ := strings.Cut(title, ",")
	c.text("faint", font{size: 12, centred: true}, whole/2, 20, called)
	for i, line := range lines {
		for _, s := range line {
			more := ""
			if s.bold {
				more = ` font-weight="700"`
			}
			c.draw(`<text x="%.1f" y="%.1f" font-size="%.2f" textLength="%.1f" lengthAdjust="spacingAndGlyphs" xml:space="preserve" font-family="%s" %s%s>%s</text>`,
				side+cell*float64(s.column), head+high*(float64(i)+0.75), size, cell*float64(utf8.RuneCountInString(s.text)), mono, c.as(s.look()), more, escape(s.text))
		}
	}
	return c, nil
}
