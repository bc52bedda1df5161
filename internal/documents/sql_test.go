package documents

import (
	"io/fs"
	"os"
	"strings"
	"testing"
	"unicode/utf8"
)

// Administrators read the SQL before they allow it, in terminals and in reviews.
func TestSQLLinesHaveAtMost130Characters(t *testing.T) {
	t.Parallel()
	root, checked := os.DirFS("."), 0
	for _, pattern := range []string{"migrations/*.sql", "migrations/sql/*.sql", "sql/*/*.sql"} {
		paths, err := fs.Glob(root, pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			text, err := fs.ReadFile(root, path)
			if err != nil {
				t.Fatal(err)
			}
			line := 0
			for content := range strings.Lines(string(text)) {
				line++
				if length := utf8.RuneCountInString(strings.TrimSuffix(content, "\n")); length > 130 {
					t.Errorf("%s:%d: %d characters", path, line, length)
				}
			}
			checked++
		}
	}
	if checked < 100 {
		t.Errorf("only %d files were found", checked)
	}
}
