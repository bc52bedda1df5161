package pgxlock_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
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
	if named < 100 {
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
	for _, row := range regexp.MustCompile(`(?m)^\| \*\*(I\d+)\*\* ([^|]*) \| ([^|]*) \| ([^|]*) \|$`).FindAllStringSubmatch(table, -1) {
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
		title, kept, tests := rows[invariant][0][0], rows[invariant][0][1], testName.FindAllString(rows[invariant][0][2], -1)
		if title == "" || kept == "" {
			t.Errorf("docs/invariants.md does not say how %s is kept", invariant)
		}
		if !slices.ContainsFunc(tests, func(name string) bool { return declared[name] }) {
			t.Errorf("docs/invariants.md names no test of %s that there is", invariant)
		}
	}
	if n := len(regexp.MustCompile(`(?m)^\*\*I\d+ `).FindAllString(design, -1)); n != len(rows) {
		t.Errorf("docs/design.md has %d invariants, docs/invariants.md %d", n, len(rows))
	}
}

func TestTheReadmeIsShort(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if words := len(strings.Fields(string(text))); words > 1200 {
		t.Errorf("README.md has %d words, it may have 1200: move the rest to docs/", words)
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	fenced  = regexp.MustCompile("(?ms)^```.*?^```")
)

// anchors are the names under which GitHub links to a document's headings.
func anchors(text string) map[string]bool {
	found := make(map[string]bool)
	for _, match := range heading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		found[strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-', r == '_', unicode.IsLetter(r), unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, match[1])] = true
	}
	return found
}

func TestLinksOfTheDocumentsLeadSomewhere(t *testing.T) {
	t.Parallel()
	documents, err := fs.Glob(os.DirFS("."), "docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	read := func(document string) string {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Error(err)
		}
		return string(text)
	}
	followed := 0
	for _, document := range append(documents, "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md", "bench/README.md") {
		text := read(document)
		for _, match := range link.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			target, anchor, anchored := strings.Cut(match[1], "#")
			if strings.Contains(target, "://") {
				continue
			}
			followed++
			there := text
			if target != "" {
				file := filepath.Join(filepath.Dir(document), target)
				if _, err := os.Stat(file); err != nil {
					t.Errorf("%s links to %s: %v", document, match[1], err)
					continue
				}
				if anchored {
					there = read(file)
				}
			}
			if anchored && !anchors(there)[anchor] {
				t.Errorf("%s links to %s, which has no such heading", document, match[1])
			}
		}
	}
	if followed < 50 {
		t.Errorf("the documents have %d links", followed)
	}
}
