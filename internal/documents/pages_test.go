package documents

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// pages returns README.md and every page of docs/.
func pages(t *testing.T) []string {
	t.Helper()
	found, err := fs.Glob(os.DirFS("."), "docs/*.md")
	if err != nil || len(found) < 10 {
		t.Fatalf("%d pages in docs/: %v", len(found), err)
	}
	return append([]string{"README.md"}, found...)
}

func TestReadmeIsShort(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if words := len(strings.Fields(string(text))); words > 1200 {
		t.Errorf("README.md has %d words, it may have 1200: move the rest to docs/", words)
	}
}

func TestIndexListsEachPage(t *testing.T) {
	t.Parallel()
	index, err := os.ReadFile("docs/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages(t) {
		name := filepath.Base(page)
		if name != "README.md" && !strings.Contains(string(index), "]("+name+")") {
			t.Errorf("docs/README.md does not list %s", name)
		}
	}
}

// maxWords is how many words a page of docs/ may have.
const maxWords = 2000

func TestPagesAreShort(t *testing.T) {
	t.Parallel()
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if words := len(strings.Fields(string(text))); words > maxWords {
			t.Errorf("%s has %d words, it may have %d: split it", page, words, maxWords)
		}
	}
}

// A page that begins with a table of contents lists all its headings, but those that only
// say which page has the topic.
func TestTablesOfContentsAreComplete(t *testing.T) {
	t.Parallel()
	checked := 0
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		top, rest, _ := strings.Cut(fenced.ReplaceAllString(string(text), ""), "\n## ")
		if !strings.Contains(top, "](#") {
			continue
		}
		checked++
		for section := range strings.SplitSeq(rest, "\n## ") {
			title, body, _ := strings.Cut(section, "\n")
			for anchor := range anchors("## " + title) {
				if !strings.Contains(top, "](#"+anchor+")") && len(strings.Fields(body)) > 20 {
					t.Errorf("the table of contents of %s has no %q", page, title)
				}
			}
		}
	}
	if checked < 10 {
		t.Errorf("%d pages have a table of contents", checked)
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
