package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// A room is a package of the module, as the go command knows it.
type room struct {
	name    string   // its path in the module; empty: the root
	imports []string // of the same module, by their names
}

// command is where the command is, in the module.
const command = "/cmd/pgxlock/"

// roles say in a few words what a package is for.
var roles = map[string]string{
	"":                    "Locker, Lock, LockTx",
	"adapters/health":     "who leads, over HTTP",
	"adapters/prometheus": "figures for Prometheus",
	"cmd/pgxlock":         "the command",
	"doctor":              "can locks be trusted here?",
	"internal/advisory":   "locks of one session",
	"internal/batcher":    "many calls, one statement",
	"internal/clock":      "time, asleep or awake",
	"internal/dbconn":     "own connections",
	"internal/formats":    "for other migration tools",
	"internal/hold":       "believes exactly so long",
	"internal/lease":      "rows that expire",
	"internal/lockerr":    "what errors mean",
	"internal/lockkey":    "what a key names",
	"internal/memory":     "locks in this process",
	"internal/observe":    "calls Observe",
	"internal/oneline":    "a text on one line",
	"internal/place":      "finds the schema",
	"internal/usertx":     "in the caller's transaction",
	"internal/waitqueue":  "who is next",
	"migrations":          "installs tables and functions",
	"monitor":             "shows and evicts holders",
	"once":                "a job once per period",
	"ratelimit":           "a rate over all processes",
	"sql":                 "every statement",
}

// modules are the directories of the module of the library, of the command's, and of those
// that the command imports.
var modules = []string{".", "cmd/pgxlock", "adapters/prometheus"}

// modulePath is the module of the library, in whose directory the others are.
const modulePath = "github.com/pgxlock/pgxlock"

// packages returns the packages that programs import or run, and what these are built of;
// not those that only tests and examples need.
func packages(root string) (map[string]room, error) {
	var listed []byte
	for _, dir := range modules {
		cmd := exec.Command("go", "list", "-json=ImportPath,Imports,GoFiles", "./...")
		cmd.Dir, cmd.Stderr = filepath.Join(root, dir), os.Stderr
		cmd.Env = append(os.Environ(), "GOOS=linux", "GOWORK=off", "PWD=") // the same picture everywhere
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		listed = append(listed, out...)
	}
	all := make(map[string]room)
	var named []string // what a program may name, and the command
	for decoder := json.NewDecoder(bytes.NewReader(listed)); ; {
		var p struct {
			ImportPath       string
			Imports, GoFiles []string
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		if len(p.GoFiles) == 0 {
			continue
		}
		inside := func(path string) (name string, ok bool) {
			name, ok = strings.CutPrefix(path, modulePath)
			ok = ok && (name == "" || name[0] == '/')
			if strings.HasPrefix(name, command+"internal/") { // what only the command imports is part of it
				name = command
			}
			return strings.Trim(name, "/"), ok
		}
		var r room
		r.name, _ = inside(p.ImportPath)
		for _, path := range p.Imports {
			if name, ok := inside(path); ok && name != r.name {
				r.imports = append(r.imports, name)
			}
		}
		r.imports = append(r.imports, all[r.name].imports...)
		slices.Sort(r.imports)
		r.imports = slices.Compact(r.imports)
		all[r.name] = r
		if !strings.Contains("/"+r.name+"/", "/internal/") && !strings.HasPrefix(r.name, "examples/") && r.name != "locktesting" { // which programs' tests name
			named = append(named, r.name)
		}
	}
	if len(named) == 0 {
		return nil, errors.New("go list shows no package of the project")
	}
	reached := make(map[string]room)
	for len(named) > 0 {
		r := all[named[0]]
		named = named[1:]
		if _, done := reached[r.name]; !done {
			reached[r.name] = r
			named = append(named, r.imports...)
		}
	}
	return reached, nil
}

// arrows returns what each package imports, without what one of its other imports leads to.
func arrows(rooms map[string]room) map[string][]string {
	var reaches func(from, to string) bool
	reaches = func(from, to string) bool {
		return from == to || slices.ContainsFunc(rooms[from].imports, func(next string) bool { return reaches(next, to) })
	}
	found := make(map[string][]string)
	for name, r := range rooms {
		for _, to := range slices.Sorted(slices.Values(r.imports)) {
			if !slices.ContainsFunc(r.imports, func(other string) bool { return other != to && reaches(other, to) }) {
				found[name] = append(found[name], to)
			}
		}
	}
	return found
}

// layered returns the layer of each package, counted from the top: below all packages that
// import it. One that no package imports is just above what it imports.
func layered(rooms map[string]room, below map[string][]string) map[string]int {
	layer := make(map[string]int)
	names := slices.Sorted(maps.Keys(rooms))
	for range names {
		for _, name := range names {
			for _, to := range below[name] {
				layer[to] = max(layer[to], layer[name]+1)
			}
		}
	}
	imported := make(map[string]bool)
	for _, name := range names {
		for _, to := range below[name] {
			imported[to] = true
		}
	}
	for _, name := range names {
		if imported[name] || len(below[name]) == 0 {
			continue
		}
		least := len(names)
		for _, to := range below[name] {
			least = min(least, layer[to])
		}
		layer[name] = least - 1
	}
	return layer
}

// architecture draws the packages from the top down: each imports packages of lower layers
// only.
func architecture(rooms map[string]room) *canvas {
	const (
		boxWidth, boxHeight = 118, 54
		rowHeight           = 104
		top, margin         = 16, 8
		width               = 900
	)
	below := arrows(rooms)
	layer := layered(rooms, below)
	g := newGraph(below, layer, func(name string) int {
		if _, ok := rooms[name]; ok {
			return boxWidth + 8
		}
		return 26 // an arrow that passes
	})
	g.place(margin, width-margin)
	height := top + len(g.rows)*rowHeight - (rowHeight - boxHeight) + 56

	var words strings.Builder
	for _, name := range slices.Sorted(maps.Keys(rooms)) {
		if len(below[name]) > 0 {
			shown := make([]string, len(below[name]))
			for i, to := range below[name] {
				shown[i] = nameOf(to)
			}
			fmt.Fprintf(&words, "%s imports %s. ", nameOf(name), strings.Join(shown, ", "))
		}
	}
	c := newCanvas(width, height, "The packages of pgxlock, and which imports which",
		"Packages as boxes in layers, each with arrows down to the packages that it imports. "+words.String())

	y := func(row int) int { return top + row*rowHeight }
	for row, points := range g.rows {
		for _, p := range points {
			for _, to := range p.down {
				from := y(row)
				if p.passes {
					c.path("line", fmt.Sprintf("M%d %dv%d", p.x, from, boxHeight))
				}
				end := y(row + 1)
				if !to.passes {
					end -= 8
				}
				c.path("line", fmt.Sprintf("M%d %dC%d %d %d %d %d %d", p.x, from+boxHeight, p.x, from+boxHeight+24, to.x, end-24, to.x, end))
				if !to.passes {
					c.draw(`<path d="M%d %dl-4 -8h8z" %s/>`, to.x, y(row+1), c.as("head"))
				}
			}
		}
	}
	for row, points := range g.rows {
		for _, p := range points {
			if p.passes {
				continue
			}
			as := "ours"
			switch {
			case strings.HasPrefix(p.name, "cmd/"):
				as = "other"
			case strings.HasPrefix(p.name, "internal/"):
				as = "box"
			}
			at := y(row)
			c.box(as, p.x-boxWidth/2, at, boxWidth, boxHeight)
			c.text("ink", font{size: 13, bold: true, centred: true}, p.x, at+18, shortName(p.name))
			small := font{size: 10, centred: true}
			for i, line := range wrapped(small, boxWidth-8, roles[p.name]) {
				c.text("faint", small, p.x, at+33+13*i, line)
			}
		}
	}
	legend, x := height-32, margin+4
	for _, l := range []struct{ as, text string }{
		{"ours", "public"}, {"other", "the command"}, {"box", "internal"},
	} {
		c.box(l.as, x, legend, 22, 16)
		c.text("ink", font{size: 12}, x+30, legend+13, l.text)
		x += 60 + widthOf(font{size: 12}, l.text)
	}
	c.arrow("line", "head", x, legend+8, x+30, legend+8)
	c.text("ink", font{size: 12}, x+38, legend+13, "imports it, and may import what that imports")
	return c
}

func nameOf(name string) string {
	if name == "" {
		return "pgxlock"
	}
	return name
}

// shortName is a package's name where it is drawn.
func shortName(name string) string {
	if path.Dir(name) == "cmd" {
		return name
	}
	return path.Base(nameOf(name))
}
