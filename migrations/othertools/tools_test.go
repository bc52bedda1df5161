// Each tool runs here on what Write writes for it.

package othertools_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/golang-migrate/migrate/v4"
	_ "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	_ "github.com/golang-migrate/migrate/v4/source/file"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	tern "github.com/jackc/tern/v2/migrate"
	"github.com/pressly/goose/v3"

	"github.com/pgxlock/pgxlock/internal/formats"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/migrations"
)

// tool runs the files of a directory: all that are new up, or all down.
type tool struct {
	name     string
	format   formats.Format
	up, down func(ctx context.Context, dir, url string) error

	// own is a migration of the user's that makes a table without naming a schema;
	// nil: the tool keeps no record of what it ran.
	own func(number int, table string) []formats.File
}

const create, drop = "create table %s (i int);\n", "drop table %s;\n"

var tools = []tool{
	{
		"goose", formats.Goose,
		func(ctx context.Context, dir, url string) error {
			return withGoose(dir, url, func(p *goose.Provider) error { _, err := p.Up(ctx); return err })
		},
		func(ctx context.Context, dir, url string) error {
			return withGoose(dir, url, func(p *goose.Provider) error { _, err := p.DownTo(ctx, 0); return err })
		},
		func(number int, table string) []formats.File {
			return []formats.File{{
				Name: fmt.Sprintf("%05d_%s.sql", number, table),
				Text: fmt.Sprintf("-- +goose Up\n"+create+"-- +goose Down\n"+drop, table, table),
			}}
		},
	},
	{
		"tern", formats.Tern,
		func(ctx context.Context, dir, url string) error {
			return withTern(ctx, dir, url, func(m *tern.Migrator) error { return m.Migrate(ctx) })
		},
		func(ctx context.Context, dir, url string) error {
			return withTern(ctx, dir, url, func(m *tern.Migrator) error { return m.MigrateTo(ctx, 0) })
		},
		func(number int, table string) []formats.File {
			return []formats.File{{
				Name: fmt.Sprintf("%03d_%s.sql", number, table),
				Text: fmt.Sprintf(create+"---- create above / drop below ----\n"+drop, table, table),
			}}
		},
	},
	{
		"golang-migrate", formats.Migrate,
		func(_ context.Context, dir, url string) error { return withMigrate(dir, url, (*migrate.Migrate).Up) },
		func(_ context.Context, dir, url string) error { return withMigrate(dir, url, (*migrate.Migrate).Down) },
		func(number int, table string) []formats.File {
			stem := fmt.Sprintf("%06d_%s", number, table)
			return []formats.File{{Name: stem + ".up.sql", Text: fmt.Sprintf(create, table)}, {Name: stem + ".down.sql", Text: fmt.Sprintf(drop, table)}}
		},
	},
	{"psql", formats.Plain, psql("up"), psql("down"), nil},
	{"psql -1", formats.Plain, psql("up", "-1"), psql("down", "-1"), nil},
}

func withGoose(dir, url string, do func(*goose.Provider) error) error {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return err
	}
	db := stdlib.OpenDB(*config)
	defer db.Close()
	provider, err := goose.NewProvider(goose.DialectPostgres, db, os.DirFS(dir))
	if err != nil {
		return err
	}
	return do(provider)
}

func withTern(ctx context.Context, dir, url string, do func(*tern.Migrator) error) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	m, err := tern.NewMigratorEx(ctx, conn, "public.schema_version", &tern.MigratorOptions{})
	if err != nil {
		return err
	}
	if err := m.LoadMigrations(os.DirFS(dir)); err != nil {
		return err
	}
	return do(m)
}

func withMigrate(dir, url string, do func(*migrate.Migrate) error) error {
	_, rest, _ := strings.Cut(url, "://")
	m, err := migrate.New("file://"+dir, "pgx5://"+rest)
	if err != nil {
		return err
	}
	err = do(m)
	if errors.Is(err, migrate.ErrNoChange) {
		err = nil
	}
	sourceErr, databaseErr := m.Close()
	return errors.Join(err, sourceErr, databaseErr)
}

func psql(direction string, arg ...string) func(ctx context.Context, dir, url string) error {
	return func(ctx context.Context, dir, url string) error {
		binaries, err := pgserver.Find()
		if err != nil {
			return err
		}
		file := filepath.Join(dir, "pgxlock."+direction+".sql")
		cmd := exec.CommandContext(ctx, filepath.Join(binaries.Dir, "psql"), slices.Concat([]string{"-X", "-q", "-d", url, "-f", file}, arg)...)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 { // it prints errors and goes on
			return fmt.Errorf("psql: %w: %s", err, out)
		}
		return nil
	}
}

// write writes what the tool takes.
func (w tool) write(t *testing.T, dir string, o formats.Options) {
	t.Helper()
	files, err := formats.Files(w.format, o)
	must(t, err)
	if w.format == formats.Plain {
		o.Down = true
		down, err := formats.Files(w.format, o)
		must(t, err)
		files = append(files, down...)
	}
	write(t, dir, files)
}

func write(t *testing.T, dir string, files []formats.File) {
	t.Helper()
	written, err := formats.Write(dir, files)
	must(t, err)
	if len(written) != len(files) {
		t.Fatalf("%d of %d files written", len(written), len(files))
	}
}

// place is where pgxlock is installed.
type place struct {
	path   string // what the search_path of the sessions names; "": what it is by default
	schema string // what the files name; "": they follow the search_path
}

func (p place) installed() string { return cmp.Or(p.schema, p.path) }

// newDatabase makes a database in which the search_path leads somewhere.
func (p place) newDatabase(t *testing.T) (db database, connString string) {
	t.Helper()
	db = newDatabase(t)
	if p.path == "" {
		return db, db.url()
	}
	name := pgx.Identifier{p.path}.Sanitize()
	db.exec(t, "create schema "+name)
	return db, db.url() + "&options=" + url.QueryEscape("-csearch_path="+name)
}

// reference returns what a database is like with what Up installed, and when it
// was removed again.
func (p place) reference(t *testing.T) (with, without string) {
	t.Helper()
	db, _ := p.newDatabase(t)
	cfg := &migrations.Config{Schema: p.installed()}
	must(t, migrations.Up(t.Context(), db.pool, cfg))
	with = db.dump(t)
	must(t, migrations.Down(t.Context(), db.pool, cfg))
	return with, db.dump(t)
}

var places = map[string]place{
	"where the search_path leads by default":                           {},
	"where the search_path leads":                                      {path: "Locks"},
	"in the schema that the files name":                                {schema: "Locks"},
	"in the schema that the files name, whatever the search_path says": {path: "elsewhere", schema: `it's "mine" %I`},
}

// newest is the version that all of the files make.
func newest(t *testing.T) uint {
	t.Helper()
	files, err := fs.Glob(migrations.FS, "*.up.sql")
	must(t, err)
	return uint(len(files))
}

func TestEveryToolInstallsWhatUpInstallsAndRemovesItAgain(t *testing.T) {
	long(t)
	t.Parallel()
	for name, p := range places {
		with, without := p.reference(t)
		for _, tool := range tools {
			t.Run(tool.name+" "+name, func(t *testing.T) {
				t.Parallel()
				db, connString := p.newDatabase(t)
				dir := t.TempDir()
				tool.write(t, dir, formats.Options{Schema: p.schema})
				for range 2 {
					must(t, tool.up(t.Context(), dir, connString))
					db.installed(t, p.installed(), newest(t))
					must(t, migrations.Up(t.Context(), db.pool, &migrations.Config{Schema: p.installed()})) // which sees that
					if tool.own != nil {
						must(t, tool.up(t.Context(), dir, connString)) // which has nothing to do either
					}
					same(t, db.dump(t), with)

					must(t, tool.down(t.Context(), dir, connString))
					db.installed(t, p.installed(), 0)
				}
				same(t, db.dump(t), without)
			})
		}
	}
}

// What the files set must be over when they are, though the tool's transaction
// may go on.
func TestFilesStandAmongThoseOfAProject(t *testing.T) {
	long(t)
	t.Parallel()
	for _, tool := range tools {
		if tool.own == nil {
			continue
		}
		for _, schema := range []string{"", "locks"} {
			t.Run(fmt.Sprintf("%s, schema %q", tool.name, schema), func(t *testing.T) {
				t.Parallel()
				p := place{path: "app", schema: schema}
				db, connString := p.newDatabase(t)
				empty := db.dump(t)
				dir := t.TempDir()
				versions := int(newest(t))
				write(t, dir, tool.own(1, "before"))
				tool.write(t, dir, formats.Options{Schema: schema, Number: 2})
				write(t, dir, tool.own(2+versions, "after"))
				must(t, tool.up(t.Context(), dir, connString))
				db.installed(t, p.installed(), newest(t))
				expect(t, db, "app app", "select string_agg(relnamespace::regnamespace::text, ' ') from pg_class where relname in ('before', 'after')")
				expect(t, db, p.installed(), "select relnamespace::regnamespace::text from pg_class where relname = 'distributed_locks'")

				must(t, tool.down(t.Context(), dir, connString))
				expect(t, db, 0, "select count(*) from pg_class where relname in ('before', 'after', 'distributed_locks')")
				db.exec(t, "drop schema if exists locks cascade")
				same(t, db.dump(t), empty)
			})
		}
	}
}

// Flyway is a Java program, which these tests do not run. With group=true it
// runs all files in one transaction, and so in one with those of the user.
func TestFlywaysFilesLeaveNoSettingToTheRestOfTheirTransaction(t *testing.T) {
	long(t)
	t.Parallel()
	const settings = "select string_agg(name || '=' || setting, ', ' order by name) from pg_settings where name not like '%.%'"
	for name, p := range places {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			with, without := p.reference(t)
			db, connString := p.newDatabase(t)
			files, err := formats.Files(formats.Flyway, formats.Options{Schema: p.schema})
			must(t, err)
			conn, err := pgx.Connect(t.Context(), connString)
			must(t, err)
			defer conn.Close(t.Context())
			_, err = conn.Exec(t.Context(), "set quote_all_identifiers = on; set client_min_messages = error; set lock_timeout = '1min'") // not as the files have it
			must(t, err)
			run := func(prefix string) {
				t.Helper()
				var before, after string
				must(t, conn.QueryRow(t.Context(), settings).Scan(&before))
				must(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
					for _, f := range files {
						if !strings.HasPrefix(f.Name, prefix) {
							continue
						}
						if _, err := tx.Exec(t.Context(), f.Text); err != nil {
							return fmt.Errorf("%s: %w", f.Name, err)
						}
						if err := tx.QueryRow(t.Context(), settings).Scan(&after); err != nil {
							return err
						}
						same(t, strings.ReplaceAll(after, ", ", "\n"), strings.ReplaceAll(before, ", ", "\n"))
					}
					return nil
				}))
			}
			run("V")
			same(t, db.dump(t), with)
			slices.Reverse(files)
			run("U")
			same(t, db.dump(t), without)
		})
	}
}

// A project that wrote the files long ago writes the newer ones later, with
// numbers that are free by then.
func TestNewerVersionsAreAddedUnderLaterNumbers(t *testing.T) {
	long(t)
	t.Parallel()
	p := place{}
	with, _ := p.reference(t)
	for _, tool := range tools {
		if tool.own == nil {
			continue
		}
		t.Run(tool.name, func(t *testing.T) {
			t.Parallel()
			db, connString := p.newDatabase(t)
			dir := t.TempDir()
			first, err := formats.Files(tool.format, formats.Options{})
			must(t, err)
			perVersion := len(first) / int(newest(t))
			write(t, dir, first[:perVersion])
			write(t, dir, tool.own(2, "between"))
			must(t, tool.up(t.Context(), dir, connString))
			db.installed(t, "", 1)
			tool.write(t, dir, formats.Options{From: 2, Number: 3})
			must(t, tool.up(t.Context(), dir, connString))
			db.installed(t, "", newest(t))
			db.exec(t, "drop table between")
			same(t, db.dump(t), with)
		})
	}
}

func TestFailureLeavesNothingBehindWhateverToolRanTheFile(t *testing.T) {
	long(t)
	t.Parallel()
	p := place{path: "app", schema: "locks"}
	for _, tool := range tools {
		t.Run(tool.name, func(t *testing.T) {
			t.Parallel()
			db, connString := p.newDatabase(t)
			db.exec(t, "create schema locks; create table locks.lock_leases (in_the_way int)") // late in the first file
			before := db.dump(t)
			dir := t.TempDir()
			tool.write(t, dir, formats.Options{Schema: p.schema})
			if err := tool.up(t.Context(), dir, connString); err == nil || !strings.Contains(err.Error(), `"lock_leases" is not a view`) {
				t.Errorf("got %v", err)
			}
			same(t, db.dump(t), before)
			db.installed(t, p.installed(), 0)
		})
	}
}

// A tool runs the file of the newest version first: that one must know of all that is in use.
func TestDownThatIsRefusedLeavesEverythingWhateverToolRanTheFile(t *testing.T) {
	long(t)
	t.Parallel()
	for _, tool := range tools {
		t.Run(tool.name, func(t *testing.T) {
			t.Parallel()
			db, connString := place{}.newDatabase(t)
			dir := t.TempDir()
			tool.write(t, dir, formats.Options{})
			must(t, tool.up(t.Context(), dir, connString))
			with := db.dump(t)
			for what, use := range map[string][2]string{
				"live leases": {"select acquire_lock('k', 'a', 600)", "select release_lock('k', 'a')"},
				"claims":      {"select claim_once('k')", "delete from pgxlock_claims"},
				"runs":        {"select start_run('k', '1 hour')", "delete from pgxlock_runs"},
			} {
				db.exec(t, use[0])
				if err := tool.down(t.Context(), dir, connString); err == nil || !strings.Contains(err.Error(), "pgxlock: "+what+" in schema public: 1") {
					t.Errorf("got %v", err)
				}
				db.installed(t, "", newest(t))
				must(t, migrations.Up(t.Context(), db.pool, nil))
				db.exec(t, use[1])
				db.exec(t, "do $$ begin if to_regclass('schema_migrations') is not null then update schema_migrations set version = "+
					fmt.Sprint(newest(t))+", dirty = false; end if; end $$") // golang-migrate's own record, as its "force" does
			}
			same(t, db.dump(t), with)
			must(t, tool.down(t.Context(), dir, connString))
			db.installed(t, "", 0)
		})
	}
}
