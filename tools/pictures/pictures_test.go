package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// root is the project's root directory, from here.
const root = "../.."

// lists skips the test, which runs go list, where make lint does not run it and -short is set.
func lists(t *testing.T) {
	t.Helper()
	if testing.Short() && os.Getenv("PGXLOCK_TEST_BUILDS") != "1" {
		t.Skip("make lint and make test-all run it")
	}
}

func TestPicturesShowWhatTheSourceSays(t *testing.T) {
	lists(t)
	t.Parallel()
	for range 2 { // drawn twice, it is the same
		pictures, err := drawn(root)
		if err != nil {
			t.Fatal(err)
		}
		for name, picture := range pictures {
			committed, err := os.ReadFile(filepath.Join(root, folder, name))
			if err != nil {
				t.Error(err)
			}
			if string(committed) != picture.String() {
				t.Errorf("%s/%s is not what would be drawn now: run make pictures, and look at it", folder, name)
			}
		}
	}
}

// A label is a text of a picture, and about where it is.
type label struct {
	text                     string
	left, right, top, bottom float64
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
				l := label{text: string(token), left: number("x"), top: number("y") - 0.75*f.size, bottom: number("y") + 0.2*f.size}
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
	if err != nil || len(files) < 7 {
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

// What the table of README.md offers, and when it needs the migrations.
func TestTheTreeOfLocksSaysWhatTheReadmeSays(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "\n## Which lock for what\n")
	table, _, _ = strings.Cut(table, "\n## ")
	var inReadme, inTree []string
	for _, row := range regexp.MustCompile(`(?m)^\| [^|]+ \| ([^|]*) \| *([^|]*?) *\|$`).FindAllStringSubmatch(table, -1) {
		var names []string
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			names = append(names, name[1])
		}
		switch {
		case len(names) > 0 && names[0] == shared[0]: // a note below the tree
		case len(names) > 0:
			inReadme = append(inReadme, fmt.Sprint(names, " ", row[2]))
		}
	}
	var add func([]wish)
	add = func(wishes []wish) {
		for _, w := range wishes {
			add(w.wishes)
			if needs, known := map[string]string{"": "no", "migrations": "yes", "migrations, for leases": "for leases"}[w.needs]; len(w.use) > 0 && known {
				inTree = append(inTree, fmt.Sprint(w.use, " ", needs))
			}
		}
	}
	add(choices)
	slices.Sort(inReadme)
	slices.Sort(inTree)
	if len(inReadme) < 8 || !slices.Equal(inReadme, inTree) {
		t.Errorf("the README says\n%s\nand the tree\n%s", strings.Join(inReadme, "\n"), strings.Join(inTree, "\n"))
	}
}

func TestTheArchitectureNamesEachPackage(t *testing.T) {
	lists(t)
	t.Parallel()
	rooms, err := packages(root)
	if err != nil {
		t.Fatal(err)
	}
	for name := range rooms {
		if roles[name] == "" {
			t.Errorf("architecture.go has no role of package %s", nameOf(name))
		}
	}
	for name := range roles {
		if _, ok := rooms[name]; !ok {
			t.Errorf("architecture.go has a role of package %s, which programs do not need", nameOf(name))
		}
	}
	below := arrows(rooms)
	layer := layered(rooms, below)
	for name, r := range rooms {
		for _, to := range r.imports {
			if layer[name] >= layer[to] {
				t.Errorf("%s in layer %d imports %s in layer %d", nameOf(name), layer[name], nameOf(to), layer[to])
			}
		}
	}
}

func TestArrowsThatOthersImplyAreNotDrawn(t *testing.T) {
	t.Parallel()
	rooms := make(map[string]room)
	for name, imports := range map[string][]string{"a": {"b", "c", "d"}, "b": {"c"}, "c": nil, "d": nil, "e": {"c"}} {
		rooms[name] = room{name, imports}
	}
	below := arrows(rooms)
	if got := fmt.Sprint(below); got != "map[a:[b d] b:[c] e:[c]]" {
		t.Error(got)
	}
	if got := fmt.Sprint(layered(rooms, below)); got != "map[a:0 b:1 c:2 d:1 e:1]" {
		t.Error(got)
	}
}

func TestATerminalsStylesBecomeThoseOfAPicture(t *testing.T) {
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
