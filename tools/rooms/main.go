// Command rooms prints how the module is divided: the entries at its top level, what each
// package imports of the others and exports, imports against the order of the packages, and
// how many source files of a package refer to each other in a circle.
//
//	go run -C tools ./rooms ..
//
// Its exit code is 1 if an import goes against the order.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// layers are the packages from the top down. A package imports packages of its own layer and
// of lower ones only.
var layers = [][]string{
	{"cmd/", "examples/", "adapters/", "bench", "internal/systemtest", "internal/testkit", "internal/sqltest", "internal/locktest"},
	{"doctor", "monitor", "ratelimit", "once", "locktesting"},
	{""}, // the root
	{"internal/lease", "internal/advisory", "internal/memory", "internal/waitqueue", "internal/usertx"},
	{"internal/hold"},
	{"internal/dbconn", "internal/batcher"},
	{"internal/place", "sql"},
	{"internal/lockerr", "internal/lockkey", "internal/clock", "internal/oneline"},
}

// modules are the directories of the modules that are read: those of the library and of what is
// released beside it, without the other adapters.
var modules = []string{".", "cmd/pgxlock", "adapters/prometheus"}

func layerOf(path string) int {
	for i, layer := range layers {
		for _, name := range layer {
			if path == name || name != "" && strings.HasSuffix(name, "/") && strings.HasPrefix(path, name) {
				return i
			}
		}
	}
	return -1 // in no layer: tests' servers, migrations
}

type pkg struct {
	ImportPath, Dir, Export, Name string
	GoFiles, Imports              []string
	Module                        *struct{ Path, Dir string }
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: rooms DIRECTORY")
		os.Exit(2)
	}
	upward, err := report(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "rooms:", err)
		os.Exit(2)
	}
	if upward > 0 {
		os.Exit(1)
	}
}

func report(dir string) (upward int, err error) {
	tracked, err := run(dir, "git", "ls-files")
	if err != nil {
		return 0, err
	}
	entries := make(map[string]bool)
	for line := range strings.Lines(string(tracked)) {
		entry, _, _ := strings.Cut(strings.TrimSpace(line), "/")
		entries[entry] = true
	}
	fmt.Printf("entries at the top level: %d\n\n", len(entries))

	var listed []byte
	for _, module := range modules {
		out, err := run(filepath.Join(dir, module), "go", "list", "-export", "-deps", "-json=ImportPath,Dir,Export,Name,GoFiles,Imports,Module", "./...")
		if err != nil {
			return 0, err
		}
		listed = append(listed, out...)
	}
	exports := make(map[string]string)
	var ours []pkg
	for decoder := json.NewDecoder(bytes.NewReader(listed)); ; {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return 0, err
		}
		exports[p.ImportPath] = p.Export
		known := slices.ContainsFunc(ours, func(o pkg) bool { return o.ImportPath == p.ImportPath }) // an import of an earlier module's
		if !known && p.Module != nil && slices.ContainsFunc(modules, func(module string) bool { return p.Module.Dir == absolute(filepath.Join(dir, module)) }) {
			ours = append(ours, p)
		}
	}
	if len(ours) == 0 {
		return 0, errors.New("no package found")
	}
	module := ours[0].Module.Path // of the root, in whose directory the others are
	short := func(path string) string { return strings.TrimPrefix(strings.TrimPrefix(path, module), "/") }
	slices.SortFunc(ours, func(a, b pkg) int { return strings.Compare(a.ImportPath, b.ImportPath) })

	fmt.Printf("%-28s %6s %8s %7s %9s  %s\n", "package", "files", "exports", "arrows", "in circle", "imports")
	for _, p := range ours {
		name := short(p.ImportPath)
		var imports []string
		for _, path := range p.Imports {
			if path != module && !strings.HasPrefix(path, module+"/") {
				continue
			}
			to := short(path)
			imports = append(imports, "/"+to)
			if from, below := layerOf(name), layerOf(to); from >= 0 && below >= 0 && (below < from) {
				fmt.Printf("AGAINST THE ORDER: %s imports /%s\n", name, to)
				upward++
			}
		}
		exported, arrows, circle, err := look(p, exports)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", name, err)
		}
		fmt.Printf("/%-27s %6d %8d %7d %9d  %s\n", name, len(p.GoFiles), exported, arrows, circle, strings.Join(imports, " "))
	}
	return upward, nil
}

// look returns how many names a package exports, fields and methods not counted, how many of
// its files refer to another one, each pair once, and how many stand in the largest circle.
func look(p pkg, exports map[string]string) (exported, arrows, circle int, err error) {
	set := token.NewFileSet()
	var files []*ast.File
	for _, name := range p.GoFiles {
		file, err := parser.ParseFile(set, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return 0, 0, 0, err
		}
		files = append(files, file)
	}
	info := &types.Info{Uses: make(map[*ast.Ident]types.Object)}
	open := func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
	config := types.Config{Importer: importer.ForCompiler(set, "gc", open), FakeImportC: true}
	checked, err := config.Check(p.ImportPath, set, files, info)
	if err != nil {
		return 0, 0, 0, err
	}
	for _, name := range checked.Scope().Names() {
		if ast.IsExported(name) {
			exported++
		}
	}
	refers := make(map[string]map[string]bool)
	for id, object := range info.Uses {
		if object.Pkg() != checked || !object.Pos().IsValid() {
			continue
		}
		from, to := set.Position(id.Pos()).Filename, set.Position(object.Pos()).Filename
		if from == to {
			continue
		}
		if refers[from] == nil {
			refers[from] = make(map[string]bool)
		}
		if !refers[from][to] {
			refers[from][to] = true
			arrows++
		}
	}
	return exported, arrows, largestCircle(refers), nil
}

// largestCircle returns the size of the largest set of files of which each leads to each.
func largestCircle(refers map[string]map[string]bool) (largest int) {
	reach := func(start string) map[string]bool {
		seen, todo := make(map[string]bool), []string{start}
		for len(todo) > 0 {
			at := todo[len(todo)-1]
			todo = todo[:len(todo)-1]
			for to := range refers[at] {
				if !seen[to] {
					seen[to] = true
					todo = append(todo, to)
				}
			}
		}
		return seen
	}
	reached := make(map[string]map[string]bool)
	for file := range refers {
		reached[file] = reach(file)
	}
	for file, from := range reached {
		size := 0
		for other := range from {
			if reached[other][file] {
				size++
			}
		}
		largest = max(largest, size)
	}
	return largest
}

func absolute(dir string) string {
	path, err := filepath.Abs(dir)
	if err != nil {
		return dir
	}
	return path
}

func run(dir, name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	return cmd.Output()
}
