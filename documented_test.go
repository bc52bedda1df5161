package pgxlock_test

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

// The table of invariants names the tests that break without them: a test that was renamed or
// removed must not stay in it.
func TestTestsThatTheDocumentsNameExist(t *testing.T) {
	t.Parallel()
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
		for _, name := range regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(string(text), -1) {
			if name == "TestSoak" { // how those of make soak begin
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
