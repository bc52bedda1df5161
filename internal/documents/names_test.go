package documents

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// declaredTests returns the names of all tests of the repository.
func declaredTests(t *testing.T) map[string]bool {
	t.Helper()
	declared := make(map[string]bool)
	declaration := regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	err := fs.WalkDir(os.DirFS("."), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range declaration.FindAllSubmatch(text, -1) {
			declared[string(match[1])] = true
		}
		return err
	})
	if err != nil || len(declared) < 500 {
		t.Fatalf("%d tests are declared: %v", len(declared), err)
	}
	return declared
}

func TestNamesOfTestsBeginWithTheirSubject(t *testing.T) {
	t.Parallel()
	other := regexp.MustCompile(`^Test(Soak)?(A|An|The|One|No|Nobody|Nothing|What|Who)[A-Z]`)
	for name := range declaredTests(t) {
		if other.MatchString(name) {
			t.Errorf("%s begins with an article or a pronoun, better: with what it tests", name)
		}
	}
}

var testName = regexp.MustCompile(`\bTest[A-Z]\w+`)

// The documents must not name a test that was renamed or removed.
func TestTestsThatTheDocumentsNameExist(t *testing.T) {
	t.Parallel()
	declared := declaredTests(t)
	documents, err := fs.Glob(os.DirFS("."), "docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, document := range append(documents, "README.md", "CONTRIBUTING.md") {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range testName.FindAllString(string(text), -1) {
			if name == "TestSoak" || name == "TestMain" { // how those of make soak begin, and no test
				continue
			}
			if named++; !declared[name] {
				t.Errorf("%s names %s, which there is not", document, name)
			}
		}
	}
	if named < 90 {
		t.Errorf("the documents name %d tests", named)
	}
}

func TestEachInvariantHasARowWithItsTests(t *testing.T) {
	t.Parallel()
	declared := declaredTests(t)
	read := func(document string) string {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	design, table := read("docs/design.md"), read("docs/invariants.md")
	rows := make(map[string][][]string)
	for _, row := range regexp.MustCompile(`(?m)^\| \*\*(I\d+)\*\* ([^|]*) \| ([^|]*) \|$`).FindAllStringSubmatch(table, -1) {
		rows[row[1]] = append(rows[row[1]], row[2:])
	}
	for i := range 12 {
		invariant := fmt.Sprint("I", i+1)
		if n := strings.Count(design, "**"+invariant+" "); n != 1 {
			t.Errorf("docs/design.md says %d times what %s is", n, invariant)
		}
		if len(rows[invariant]) != 1 {
			t.Errorf("docs/invariants.md has %d rows of %s", len(rows[invariant]), invariant)
			continue
		}
		tests := testName.FindAllString(rows[invariant][0][1], -1)
		if !slices.ContainsFunc(tests, func(name string) bool { return declared[name] }) {
			t.Errorf("docs/invariants.md names no test of %s that there is", invariant)
		}
	}
	if n := len(regexp.MustCompile(`(?m)^\*\*I\d+ `).FindAllString(design, -1)); n != len(rows) {
		t.Errorf("docs/design.md has %d invariants, docs/invariants.md %d", n, len(rows))
	}
}

// What breaks an invariant must not wait for make test-all to be seen.
func TestEachInvariantHasTwoTestsThatMakeTestRuns(t *testing.T) {
	t.Parallel()
	table, err := os.ReadFile("docs/invariants.md")
	if err != nil {
		t.Fatal(err)
	}
	short := shortTests(t)
	rows := regexp.MustCompile(`(?m)^\| \*\*(I\d+)\*\* .*$`).FindAllSubmatch(table, -1)
	if len(rows) != 12 {
		t.Errorf("docs/invariants.md has %d rows of invariants", len(rows))
	}
	for _, row := range rows {
		run := make(map[string]bool)
		for _, name := range testName.FindAllString(string(row[0]), -1) {
			if short[name] {
				run[name] = true
			}
		}
		if len(run) < 2 {
			t.Errorf("of the tests that docs/invariants.md names for %s, make test runs %v; want two: without pgtest.Long", row[1], slices.Sorted(maps.Keys(run)))
		}
	}
}

// shortTests returns the names of the tests of this module that run with -short: they neither
// begin with a call to pgtest.Long, nor make one through pgtest.Soak or pgtest.Model.
func shortTests(t *testing.T) map[string]bool {
	t.Helper()
	short := make(map[string]bool)
	err := fs.WalkDir(os.DirFS("."), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil && path != "." {
				return fs.SkipDir // a module of its own
			}
			return nil
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, declaration := range file.Decls {
			function, ok := declaration.(*ast.FuncDecl)
			if ok && function.Recv == nil && testName.MatchString(function.Name.Name) && !isLong(function) {
				short[function.Name.Name] = true
			}
		}
		return nil
	})
	if err != nil || len(short) < 200 {
		t.Fatalf("%d tests run with -short: %v", len(short), err)
	}
	for _, elsewhere := range []string{"TestMain", "TestIntegration"} { // no test, and what make test-integration runs
		delete(short, elsewhere)
	}
	return short
}

// isLong says whether a test skips itself in a run with -short.
func isLong(test *ast.FuncDecl) bool {
	long := false
	for i, statement := range test.Body.List {
		ast.Inspect(statement, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				called := call.Fun
				if generic, ok := called.(*ast.IndexExpr); ok {
					called = generic.X
				}
				if f, ok := called.(*ast.SelectorExpr); ok {
					long = long || f.Sel.Name == "Soak" || f.Sel.Name == "Model" || f.Sel.Name == "Long" && i == 0
				}
			}
			return true
		})
	}
	return long
}

// exportedErrors returns the sentinels that a package exports.
func exportedErrors(t *testing.T, dir string) (names []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files in %s: %v", len(files), dir, err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for name, object := range parsed.Scope.Objects {
			if object.Kind == ast.Var && strings.HasPrefix(name, "Err") {
				names = append(names, name)
			}
		}
	}
	return names
}

func TestErrorsHaveARow(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	var cells strings.Builder // the first of each row
	for _, row := range regexp.MustCompile(`(?m)^\| ([^|]*) \| [^|]+ \| [^|]+ \| [^|]+ \|$`).FindAllSubmatch(text, -1) {
		cells.Write(row[1])
	}
	exported := make(map[string]bool)
	for dir, prefix := range map[string]string{".": "", "once": "once.", "ratelimit": "ratelimit.", "doctor": "doctor.", "monitor": "monitor."} {
		for _, name := range exportedErrors(t, dir) {
			exported[name] = true
			if !strings.Contains(cells.String(), "`"+prefix+name+"`") {
				t.Errorf("docs/errors.md has no row of %s%s with its meaning, whether the lock is held, and what to do", prefix, name)
			}
		}
	}
	if len(exported) < 16 {
		t.Errorf("%d errors are exported", len(exported))
	}
	for _, name := range regexp.MustCompile(`\bErr[A-Z]\w+`).FindAllString(cells.String(), -1) {
		if !exported[name] && name != "ErrUnsupported" { // of package errors
			t.Errorf("docs/errors.md has a row of %s, which there is not", name)
		}
	}
}
