package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/formats"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The tools themselves read the files in migrations/othertools.
func TestMigrateSQLWritesWhatIsMissingAndSaysWhat(t *testing.T) {
	t.Parallel()
	for _, format := range formats.All {
		dir := t.TempDir()
		files, err := formats.Files(format, formats.Options{Schema: "locks"})
		if err != nil {
			t.Fatal(err)
		}
		args := []string{"migrate", "sql", "--format", string(format), "--schema", "locks", "--dir", dir}
		r := execute(t, nil, args...)
		r.want(t, exitOK, dir, "")
		var want strings.Builder
		for _, f := range files {
			path := filepath.Join(dir, f.Name)
			want.WriteString(path + "\n")
			if text, err := os.ReadFile(path); err != nil || string(text) != f.Text {
				t.Errorf("%s: %v", path, err)
			}
		}
		if r.stdout != want.String() {
			t.Errorf("%s printed %q, want %q", format, r.stdout, want.String())
		}
		execute(t, nil, args...).want(t, exitOK, "", "there already")

		spoiled := filepath.Join(dir, files[0].Name)
		if err := os.WriteFile(spoiled, []byte("-- mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		execute(t, nil, args...).want(t, exitUsage, "", spoiled)
		if text, err := os.ReadFile(spoiled); err != nil || string(text) != "-- mine" {
			t.Errorf("%s was changed: %q, %v", spoiled, text, err)
		}
	}
}

func TestMigrateSQLSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	nowhere := filepath.Join(t.TempDir(), "nowhere")
	for _, test := range []struct{ args, says string }{
		{"--format liquibase", "use plain, migrate, goose, flyway or tern"},
		{"--format goose", "name their directory with --dir"},
		{"--format goose --dir " + nowhere, "there is no directory " + nowhere},
		{"--format goose --dir=", "--dir is empty"},
		{"--schema=", "--schema is empty"},
		{"--format flyway --down --dir .", "both ways"},
		{"--number 7", "--number is for files"},
		{"--from 1000", "no version 1000"},
		{"--number few", `--number "few": use a whole number`},
	} {
		execute(t, nil, append([]string{"migrate", "sql"}, strings.Fields(test.args)...)...).want(t, exitUsage, "", test.says)
	}
}

func TestMigrateSQLOutputForASchemaInstallsThere(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := empty(t)
	env := []string{"DATABASE_URL=" + db.URL}
	sql := func(args ...string) {
		t.Helper()
		r := execute(t, nil, append([]string{"migrate", "sql", "--schema", "locks"}, args...)...)
		r.want(t, exitOK, `"locks"`, "")
		db.Exec(t, r.stdout)
	}
	sql()
	execute(t, env, "migrate", "status", "--schema", "locks").want(t, exitOK, "current", "")
	db.Exec(t, "select locks.acquire_lock('k', 'a', 1)")
	db.Exec(t, "update locks.distributed_locks set expires_at = clock_timestamp()") // a live one would be in the way
	sql("--from", "2", "--down")
	execute(t, env, "migrate", "status", "--schema", "locks", "-o", "json").want(t, exitNotCurrent, `"installed": 1`, "")
	sql("--from", "2")
	execute(t, env, "migrate", "status", "--schema", "locks").want(t, exitOK, "current", "")
	db.Exec(t, "select locks.release_lock('k', 'a')")
	sql("--down")
	execute(t, env, "migrate", "status", "--schema", "locks").want(t, exitNotCurrent, "not installed", "")
	if _, err := migrations.Version(t.Context(), db.Pool, nil); err != nil {
		t.Error(err) // nothing is in public, and there is no doubt about it
	}
}
