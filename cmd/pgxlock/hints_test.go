package main

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
)

// all returns the commands below a command, and itself.
func all(cmd *cobra.Command) []*cobra.Command {
	commands := []*cobra.Command{cmd}
	for _, below := range cmd.Commands() {
		commands = append(commands, all(below)...)
	}
	return commands
}

// inLine finds, in one line, where a command of ours begins, and flags.
var inLine = regexp.MustCompile(`\bpgxlock((?: [a-z]+)*)|--([a-z][a-z-]*)`)

// unknownFlags returns the flags that a text mentions and that the command which it is shown in
// lacks, or the command that the text names before.
func unknownFlags(root, shownIn *cobra.Command, text string) (unknown []string) {
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, " -- ") // behind it stands another program's command
		cmd := shownIn
		for _, m := range inLine.FindAllStringSubmatch(line, -1) {
			if m[2] == "" {
				if named, _, err := root.Find(strings.Fields(m[1])); err == nil && named != root {
					cmd = named
				}
				continue
			}
			if cmd == nil {
				continue // of another program
			}
			cmd.InitDefaultHelpFlag()
			if cmd.Flags().Lookup(m[2]) == nil && cmd.InheritedFlags().Lookup(m[2]) == nil {
				unknown = append(unknown, cmd.CommandPath()+" --"+m[2])
			}
		}
	}
	return unknown
}

func TestUnknownFlagsAreFoundInATextByTheCommandBeforeThem(t *testing.T) {
	t.Parallel()
	root := newRoot()
	ls, _, err := root.Find([]string{"ls"})
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string][]string{
		"use --state or --holder":                                       nil,
		"leave out --ttl 5m":                                            {"pgxlock ls --ttl"},
		"run pgxlock migrate up --schema x":                             nil,
		"run pgxlock migrate up --force":                                {"pgxlock migrate up --force"},
		"pgxlock run k --no-wait -- program --wait\nsee --wait":         {"pgxlock ls --wait"},
		"pgxlock version --schema s; pgxlock evict k --schema s --no-x": {"pgxlock version --schema", "pgxlock evict --no-x"},
	} {
		if got := unknownFlags(root, ls, text); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// A source is the functions and variables of this package, and which of them each refers to.
type source struct {
	declared map[types.Object]ast.Node
	info     types.Info
}

// readSource reads the package without what it imports, which is enough to know who calls whom
// here.
func readSource(t *testing.T) *source {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	s := &source{make(map[types.Object]ast.Node), types.Info{Defs: make(map[*ast.Ident]types.Object), Uses: make(map[*ast.Ident]types.Object)}}
	var files []*ast.File
	set := token.NewFileSet()
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "_bsd.go") || strings.HasSuffix(path, "_other.go") { // each of which has another of the same names
			continue
		}
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	config := types.Config{Error: func(error) {}} // that it does not find other packages is one: what they declare has no texts of ours
	_, _ = config.Check("main", set, files, &s.info)
	for _, file := range files {
		for _, decl := range file.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				s.declared[s.info.Defs[decl.Name]] = decl
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					if values, ok := spec.(*ast.ValueSpec); ok {
						for _, name := range values.Names {
							s.declared[s.info.Defs[name]] = values
						}
					}
				}
			}
		}
	}
	return s
}

// texts returns the texts in a declaration and in all that it refers to, but for what stops says.
func (s *source) texts(from types.Object, stops func(name string) bool) (texts []string) {
	seen := make(map[types.Object]bool)
	var visit func(types.Object)
	visit = func(object types.Object) {
		node := s.declared[object]
		if node == nil || seen[object] || stops(object.Name()) {
			return
		}
		seen[object] = true
		ast.Inspect(node, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				if name, ok := n.Type.(*ast.Ident); ok && name.Name == "remediedError" {
					return false // describe looks whether the command has the flags
				}
			case *ast.Ident:
				visit(s.info.Uses[n])
			case *ast.BasicLit:
				if text, err := strconv.Unquote(n.Value); n.Kind == token.STRING && err == nil {
					texts = append(texts, text)
				}
			}
			return true
		})
	}
	visit(from)
	return texts
}

// Every text that the source of a command has, in its help or in a message, is looked at. What
// describe adds depends on the command, and has a test of its own.
func TestEveryFlagThatACommandMentionsIsOneThatItHas(t *testing.T) {
	t.Parallel()
	s := readSource(t)
	root := newRoot()
	stops := func(name string) bool {
		return slices.Contains([]string{"describe", "explain", "inFlags", "advices", "arguments", "newRoot"}, name)
	}
	constructors := map[string]string{ // of each command
		"newRun": "run", "newRunsForget": "runs forget", "newLs": "ls", "newTree": "tree", "newWatch": "watch", "newReap": "reap", "newEvict": "evict", "newDoctor": "doctor",
		"newAcquire": "acquire", "newExtend": "extend", "newRelease": "release", "newVersion": "version",
		"newMigrateUp": "migrate up", "newMigrateDown": "migrate down", "newMigrateStatus": "migrate status", "newMigrateSQL": "migrate sql", "newMigrateRepair": "migrate repair",
	}
	mentions := make(map[string]int)
	for object := range s.declared {
		path, ok := constructors[object.Name()]
		if !ok {
			continue
		}
		cmd, _, err := root.Find(strings.Fields(path))
		if err != nil {
			t.Fatal(err)
		}
		delete(constructors, object.Name())
		for _, text := range s.texts(object, stops) {
			mentions[path] += len(mention.FindAllString(text, -1))
			for _, unknown := range unknownFlags(root, cmd, text) {
				t.Errorf("%s: there is no %s: %q", path, unknown, text)
			}
		}
	}
	if len(constructors) > 0 {
		t.Errorf("there is no %q", constructors)
	}
	for _, path := range []string{"run", "evict", "ls", "acquire"} { // of which it is known that they mention some
		if mentions[path] == 0 {
			t.Errorf("nothing of %s was looked at", path)
		}
	}
	for _, cmd := range all(root) { // commands that only hold others speak of the flags of these, topics of all flags
		shared, those := cmd, all(cmd)[1:]
		if cmd.IsAdditionalHelpTopicCommand() {
			those = all(root)
		}
		if len(those) > 0 {
			shared = &cobra.Command{Use: cmd.Use}
			for _, below := range those {
				shared.Flags().AddFlagSet(below.Flags())
			}
		}
		for _, text := range []string{cmd.Short, cmd.Long, cmd.Example} {
			for _, unknown := range unknownFlags(root, shared, text) {
				t.Errorf("%s: there is no %s: %q", cmd.CommandPath(), unknown, text)
			}
		}
	}
}

func TestEveryHintNamesFlagsOfTheCommandThatShowsIt(t *testing.T) {
	t.Parallel()
	root := newRoot()
	config, err := pgconn.ParseConfig("host=127.0.0.1 port=1 user=u sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	_, unconnected := pgconn.ConnectConfig(t.Context(), config)
	failures := []error{unconnected, &remediedError{errors.New("none"), "--schema names one"}}
	for _, h := range advices {
		failures = append(failures, errors.New(h.program), &pgconn.PgError{Hint: h.program})
	}
	for _, h := range arguments {
		failures = append(failures, &pgconn.PgError{Code: pgerrcode.InvalidParameterValue, Message: h.program})
	}
	mentions := 0
	for _, cmd := range all(root) {
		for _, failed := range failures {
			text := describe(cmd.Flags(), failed)
			mentions += len(mention.FindAllString(text, -1))
			for _, unknown := range unknownFlags(root, cmd, text) {
				t.Errorf("%s: there is no %s: %q", cmd.CommandPath(), unknown, text)
			}
		}
	}
	if mentions == 0 {
		t.Error("no hint mentions a flag")
	}
	run, _, err := root.Find([]string{"run"})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range advices {
		if has(run.Flags(), h.command) && describe(run.Flags(), errors.New(h.program)) != h.command {
			t.Errorf("run shows %q instead of %q", describe(run.Flags(), errors.New(h.program)), h.command)
		}
	}
}

// A text that was changed in the package would be shown as it is.
func TestEveryHintIsForSomethingThatThePackageSays(t *testing.T) {
	t.Parallel()
	var sources strings.Builder
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "cmd" || entry.Name() == "bench" || entry.Name() == "chaos" || path != "../.." && strings.HasPrefix(entry.Name(), ".")):
			return filepath.SkipDir
		case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"), strings.HasSuffix(path, ".up.sql"):
			text, err := os.ReadFile(path)
			sources.Write(text)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range slices.Concat(advices, arguments) {
		program := h.program
		if kind, ok := strings.CutSuffix(program, ".Schema"); ok { // which is put together of the two
			program = `"` + kind + `"`
		}
		if !strings.Contains(sources.String(), strings.TrimSuffix(strings.TrimPrefix(program, "; "), ":")) {
			t.Errorf("nothing says %q", h.program)
		}
	}
}

func TestDocumentsMentionFlagsThatTheirCommandHas(t *testing.T) {
	t.Parallel()
	root := newRoot()
	paths, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range append(paths, "../../README.md", "../../CHANGELOG.md") {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var shownIn *cobra.Command
		if filepath.Base(path) == "run.md" {
			if shownIn, _, err = root.Find([]string{"run"}); err != nil {
				t.Fatal(err)
			}
		}
		for _, unknown := range unknownFlags(root, shownIn, string(text)) {
			t.Errorf("%s: there is no %s", path, unknown)
		}
	}
}
