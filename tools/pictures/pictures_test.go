package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// root is the project's root directory, from here.
const root = "../.."

// A label is a text of a picture, and about where it is.
type label struct {
	text                     string
	left, right, top, bottom float64
	code                     bool // in a monospaced font
}

func (l label) overlaps(other label) bool {
	return l.left < other.right && other.left < l.right && l.top < other.bottom && other.top < l.bottom
}

// A svg is what a test knows of a picture.
type svg struct {
	width, height           float64
	title, desc, css, first string // first: the first part that is painted
	labels                  []label
	elements                map[string]int
	addresses               []string // what it refers to
}

func read(t *testing.T, path string) svg {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	s := svg{elements: make(map[string]int)}
	var inside xml.StartElement
	for d := xml.NewDecoder(file); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return s
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		number := func(name string) float64 {
			n, _ := strconv.ParseFloat(attribute(inside, name), 64)
			return n
		}
		switch token := token.(type) {
		case xml.StartElement:
			inside = token
			s.elements[token.Name.Local]++
			for _, a := range token.Attr {
				if strings.Contains(a.Name.Local, "href") || strings.Contains(a.Value, "url(") || strings.HasPrefix(a.Name.Local, "on") {
					s.addresses = append(s.addresses, a.Value)
				}
			}
			if token.Name.Local == "svg" {
				s.width, s.height = number("width"), number("height")
			} else if attribute(token, "fill") != "" && s.first == "" {
				s.first = fmt.Sprint(token.Name.Local, " ", attribute(token, "fill"), " ", number("width") == s.width && number("height") == s.height)
			}
		case xml.CharData:
			switch inside.Name.Local {
			case "title":
				s.title = string(token)
			case "desc":
				s.desc = string(token)
			case "style":
				s.css += string(token)
			case "text":
				f := font{size: number("font-size"), bold: attribute(inside, "font-weight") != "", mono: strings.Contains(attribute(inside, "font-family"), "mono")}
				wide := number("textLength")
				if wide == 0 {
					wide = float64(widthOf(f, string(token)))
				}
				l := label{text: string(token), left: number("x"), top: number("y") - 0.75*f.size, bottom: number("y") + 0.2*f.size, code: f.mono}
				switch attribute(inside, "text-anchor") {
				case "middle":
					l.left -= wide / 2
				case "end":
					l.left -= wide
				}
				l.right = l.left + wide
				s.labels = append(s.labels, l)
			}
		case xml.EndElement:
			inside = xml.StartElement{}
		}
	}
}

func attribute(e xml.StartElement, name string) string {
	for _, a := range e.Attr {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func TestPicturesCanBeReadEverywhere(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join(root, folder, "*.svg"))
	if err != nil || len(files) < 6 {
		t.Fatalf("there are %d pictures: %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			t.Parallel()
			s := read(t, file)
			if s.width < 1 || s.width > 900 || s.height < 1 {
				t.Errorf("it is %g pixels wide and %g high", s.width, s.height)
			}
			if s.title == "" || len(s.desc) < 50 {
				t.Errorf("its title is %q and its description %q", s.title, s.desc)
			}
			if s.first != "rect #ffffff true" {
				t.Errorf("without styles its ground is %q", s.first)
			}
			if !strings.Contains(s.css, "prefers-color-scheme: dark") || !strings.Contains(s.css, ".paper{fill:#0d1117") {
				t.Error("it has no dark mode")
			}
			if s.elements["script"]+s.elements["image"]+s.elements["foreignObject"] > 0 || len(s.addresses) > 0 {
				t.Errorf("it has more than shapes and texts: %v, %q", s.elements, s.addresses)
			}
			if len(s.labels) < 5 {
				t.Errorf("it has %d texts", len(s.labels))
			}
			for i, l := range s.labels {
				if l.left < 0 || l.top < 0 || l.right > s.width || l.bottom > s.height {
					t.Errorf("%q is cut: it is at %g, %g to %g, %g", l.text, l.left, l.top, l.right, l.bottom)
				}
				for _, other := range s.labels[:i] {
					if l.overlaps(other) {
						t.Errorf("%q is over %q", l.text, other.text)
					}
				}
			}
		})
	}
}

// The README's table and the tree of locks, drawn by hand, name the same calls.
func TestTreeOfLocksSaysWhatTheReadmeSays(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "\n## Which lock for what\n")
	table, _, _ = strings.Cut(table, "\n## ")
	inReadme := make(map[string]bool)
	for _, row := range regexp.MustCompile(`(?m)^\| [^|]+ \| ([^|]*) \|`).FindAllStringSubmatch(table, -1) {
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			inReadme[name[1]] = true
		}
	}
	inTree := make(map[string]bool)
	for _, l := range read(t, filepath.Join(root, folder, "which-lock.svg")).labels {
		if l.code {
			for name := range strings.SplitSeq(strings.TrimPrefix(l.text, "package "), ", ") {
				inTree[name] = true
			}
		}
	}
	for name := range inReadme {
		if !inTree[name] && name != "Shared" { // a note below the tree
			t.Errorf("the README has %s, the tree does not", name)
		}
	}
	for name := range inTree {
		if !inReadme[name] {
			t.Errorf("the tree has %s, the README does not", name)
		}
	}
	if len(inReadme) < 15 {
		t.Errorf("the table of README.md names %d calls", len(inReadme))
	}
}

func TestTerminalsStylesBecomeThoseOfAPicture(t *testing.T) {
	t.Parallel()
	lines, err := stretches("\x1b[1mKEY\x1b[0m\x1b[39m\x1b[49m   \x1b[33ma  b\x1b[39m\n\n  plain\x1b[2m\nfaint \n \n")
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(lines); got != "[[{{true false 0} 0 KEY} {{false false 33} 6 a  b}] [] [{{false false 0} 2 plain}] [{{false true 0} 0 faint}]]" {
		t.Error(got)
	}
	for _, bad := range []string{"\x1b[7minverse", "\x1b[44mground", "\x1b[H"} {
		if lines, err := stretches(bad); err == nil {
			t.Errorf("%q became %v", bad, lines)
		}
	}
}
