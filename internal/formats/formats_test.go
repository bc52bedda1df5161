package formats_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/formats"
	"github.com/pgxlock/pgxlock/migrations"
)

// texts are the files of package migrations that end so, in order.
func texts(t *testing.T, suffix string) (texts []string) {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*"+suffix)
	if err != nil || len(names) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, name := range names {
		text, err := migrations.FS.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(text))
	}
	return texts
}

func files(t *testing.T, format formats.Format, o formats.Options) []formats.File {
	t.Helper()
	files, err := formats.Files(format, o)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func names(files []formats.File) (names []string) {
	for _, f := range files {
		names = append(names, f.Name)
	}
	return names
}

func TestEachToolFindsItsNames(t *testing.T) {
	t.Parallel()
	for format, want := range map[formats.Format][]string{
		formats.Plain:   {"pgxlock.up.sql"},
		formats.Migrate: {"000001_pgxlock_leases.up.sql", "000001_pgxlock_leases.down.sql", "000002_pgxlock_transactions.up.sql"},
		formats.Goose:   {"00001_pgxlock_leases.sql", "00002_pgxlock_transactions.sql"},
		formats.Flyway:  {"V1__pgxlock_leases.sql", "U1__pgxlock_leases.sql", "V2__pgxlock_transactions.sql"},
		formats.Tern:    {"001_pgxlock_leases.sql", "002_pgxlock_transactions.sql"},
	} {
		if got := names(files(t, format, formats.Options{})); len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
			t.Errorf("%s: %q, want %q first", format, got, want)
		}
	}
	got := names(files(t, formats.Flyway, formats.Options{From: 2, Number: 20261121120000}))
	if want := []string{"V20261121120000__pgxlock_transactions.sql", "U20261121120000__pgxlock_transactions.sql"}; !slices.Equal(got[:2], want) {
		t.Errorf("%q, want %q first", got, want)
	}
}

// What databases carry must be what was released.
func TestEveryFormatHasTheTextsAsTheyAre(t *testing.T) {
	t.Parallel()
	ups, downs := texts(t, ".up.sql"), texts(t, ".down.sql")
	for _, format := range formats.All {
		for _, schema := range []string{"", "locks"} {
			var all strings.Builder
			for _, f := range files(t, format, formats.Options{Schema: schema}) {
				all.WriteString(f.Text)
			}
			if format == formats.Plain {
				all.WriteString(files(t, format, formats.Options{Schema: schema, Down: true})[0].Text)
			}
			for _, text := range slices.Concat(ups, downs) {
				if strings.Count(all.String(), text) != 1 {
					t.Errorf("%s, schema %q: one is there %d times:\n%.200s", format, schema, strings.Count(all.String(), text), text)
				}
			}
		}
	}
	for i, f := range files(t, formats.Migrate, formats.Options{}) {
		if pair := [][]string{ups, downs}[i%2]; f.Text != pair[i/2] {
			t.Errorf("%s is not the file of package migrations", f.Name)
		}
	}
}

// Flyway cannot be run here. Its documentation says what it does to a file: it
// replaces ${...}, cuts it at each semicolon that is in no string, comment or
// dollar quote, and runs it in one transaction, unless there is a statement among
// them that cannot be.
func TestFlywayReplacesNothingAndCutsAtTheEndsOfStatements(t *testing.T) {
	t.Parallel()
	for _, schema := range []string{"", "it's \"mine\""} {
		for _, f := range files(t, formats.Flyway, formats.Options{Schema: schema}) {
			if strings.Contains(f.Text, "${") {
				t.Errorf("%s has a placeholder", f.Name)
			}
			statements := split(t, f.Text)
			want := 3 // save, the file, restore
			if schema != "" {
				want++ // where to
				if strings.HasPrefix(f.Name, "V") {
					want++ // which is made
				}
			}
			if len(statements) != want {
				t.Errorf("%s, schema %q: %d statements, want %d", f.Name, schema, len(statements), want)
			}
			for _, s := range statements {
				if !strings.HasPrefix(s, "DO $") {
					t.Errorf("%s: not one block: %.100s", f.Name, s)
				}
			}
		}
	}
}

// split cuts a script into its statements, without the comments before them.
func split(t *testing.T, script string) (statements []string) {
	t.Helper()
	begin := -1
	for i := 0; i < len(script); i++ {
		rest := script[i:]
		skip := func(open, end string) {
			j := strings.Index(rest[len(open):], end)
			if j < 0 {
				t.Fatalf("no end of %.100s", rest)
			}
			i += len(open) + j + len(end) - 1
		}
		if strings.HasPrefix(rest, "--") {
			skip("--", "\n")
			continue
		}
		if begin < 0 && strings.TrimSpace(rest[:1]) != "" {
			begin = i
		}
		switch rest[0] {
		case '\'', '"':
			skip(rest[:1], rest[:1])
		case '$':
			tag, _, found := strings.Cut(rest[1:], "$")
			if !found || strings.ContainsAny(tag, " \n") {
				t.Fatalf("no dollar quote: %.100s", rest)
			}
			skip("$"+tag+"$", "$"+tag+"$")
		case ';':
			statements, begin = append(statements, script[begin:i+1]), -1
		}
	}
	if begin >= 0 {
		t.Fatalf("no semicolon after %.100s", script[begin:])
	}
	return statements
}

func TestFormatsRefuseOptionsThatTheyCannotHonour(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		format formats.Format
		o      formats.Options
		says   string
	}{
		{"liquibase", formats.Options{}, `no format "liquibase"`},
		{formats.Goose, formats.Options{Down: true}, "both ways"},
		{formats.Plain, formats.Options{Number: 7}, "no number"},
		{formats.Goose, formats.Options{Number: 1<<64 - 1}, "counts that far"},
		{formats.Goose, formats.Options{From: 1000}, "no version 1000"},
		{formats.Goose, formats.Options{Schema: "pg_locks"}, "must not begin with pg_"},
		{formats.Goose, formats.Options{Schema: "a${b}"}, "may take for its own"},
		{formats.Tern, formats.Options{Schema: "{{a}}"}, "may take for its own"},
		{formats.Goose, formats.Options{Schema: "a\n-- +goose Down"}, "may take for its own"},
		{formats.Plain, formats.Options{Schema: `a\b`}, "may take for its own"},
	} {
		if _, err := formats.Files(test.format, test.o); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s %+v: %v, want %q", test.format, test.o, err, test.says)
		}
	}
}

func TestFilesAreLeftAsTheyAreWhereOneIsInTheWay(t *testing.T) {
	t.Parallel()
	all := files(t, formats.Goose, formats.Options{})
	for name, inTheWay := range map[string]formats.File{
		"the same name":                   {Name: all[1].Name, Text: all[1].Text + "-- changed\n"},
		"the same number":                 {Name: "00002_users.sql", Text: "-- theirs\n"},
		"the same number in other digits": {Name: "2_users.go", Text: "package migrations\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			path := filepath.Join(dir, inTheWay.Name)
			if err := os.WriteFile(path, []byte(inTheWay.Text), 0o600); err != nil {
				t.Fatal(err)
			}
			written, err := formats.Write(dir, all)
			if !errors.Is(err, formats.ErrInTheWay) || !strings.Contains(err.Error(), path) || len(written) > 0 {
				t.Errorf("written %q: %v", written, err)
			}
			if text, err := os.ReadFile(path); err != nil || string(text) != inTheWay.Text {
				t.Errorf("%s: %q, %v", path, text, err)
			}
			if there, err := os.ReadDir(dir); err != nil || len(there) != 1 {
				t.Errorf("%d files: %v", len(there), err)
			}
		})
	}
}

func TestFilesThatAreThereStayAndTheOthersAreAdded(t *testing.T) {
	t.Parallel()
	all := files(t, formats.Flyway, formats.Options{})
	dir := t.TempDir()
	for _, f := range []formats.File{all[0], {Name: "README.md"}, {Name: "V1.2__users.sql"}, {Name: "R__views.sql"}} {
		if err := os.WriteFile(filepath.Join(dir, f.Name), []byte(f.Text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	written, err := formats.Write(dir, all)
	if err != nil || len(written) != len(all)-1 || slices.Contains(written, filepath.Join(dir, all[0].Name)) {
		t.Errorf("written %q: %v", written, err)
	}
	for _, f := range all {
		if text, err := os.ReadFile(filepath.Join(dir, f.Name)); err != nil || string(text) != f.Text {
			t.Errorf("%s differs: %v", f.Name, err)
		}
	}
	if written, err := formats.Write(dir, all); err != nil || len(written) > 0 {
		t.Errorf("written again: %q: %v", written, err)
	}
	if _, err := formats.Write(filepath.Join(dir, "nowhere"), all); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}
