package migrations_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() { // what tests of each way hold, two show: ours, and the plain files
		ways = slices.DeleteFunc(ways, func(w way) bool { return w.name != "Up" && w.name != "psql" })
	}
	pgtest.Main(m)
}

// The files, in the order in which they are run. One version is one of each.
var (
	upFiles   = files("up")
	downFiles = files("down")
	newest    = uint(len(upFiles))
)

func files(direction string) []string {
	names, err := fs.Glob(migrations.FS, "*."+direction+".sql") // sorted
	if err != nil {
		panic(err)
	}
	if direction == "down" {
		slices.Reverse(names)
	}
	return names
}

// way is one way to run the files.
type way struct {
	name     string
	up, down func(t *testing.T, url string) error
}

// again runs up where the newest version is installed.
func (w way) again(t *testing.T, url string) {
	t.Helper()
	must(t, w.nothingToDo(w.up(t, url)))
}

// runsEveryFile says who does not look at our version table.
func (w way) runsEveryFile() bool {
	return strings.HasPrefix(w.name, "psql") || strings.Contains(w.name, "its own table")
}

// nothingToDo takes away what those report who run every file: the older ones
// refuse to run over a later version.
func (w way) nothingToDo(err error) error {
	if !w.runsEveryFile() || err == nil || !strings.Contains(err.Error(), "already has a later version") {
		return err
	}
	for line := range strings.Lines(err.Error()) {
		if strings.Contains(line, "ERROR:") && !strings.Contains(line, "already has a later version") &&
			!strings.Contains(line, "current transaction is aborted") {
			return err
		}
	}
	return nil
}

// atVersion returns a database with that version, which is copied.
func atVersion(t *testing.T, version uint) *pgtest.DB {
	t.Helper()
	return versions()[version].New(t)
}

// versions are databases with each version that there is.
var versions = sync.OnceValue(func() (all []*pgtest.Template) {
	for v := range len(upFiles) + 1 {
		all = append(all, pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error {
			for _, name := range upFiles[:v] {
				text, err := migrations.FS.ReadFile(name)
				if err != nil {
					return err
				}
				if _, err := pool.Exec(ctx, string(text)); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	return all
})

// firstTried is the first of the files that a test of each goes through: files that have
// landed do not change, so that make test takes the last two.
func firstTried(t *testing.T) int {
	t.Helper()
	return pgtest.Soak(t, len(upFiles)-2, 0)
}

// upTo installs that version.
func upTo(t *testing.T, url string, version uint) {
	t.Helper()
	must(t, psql(t, url, asArguments(upFiles[:version])...))
}

// asArguments are the files as psql takes them.
func asArguments(files []string) (arg []string) {
	for _, file := range files {
		arg = append(arg, "-f", file)
	}
	return arg
}

// golangMigrateEnv names a directory with two programs that run the files: golang-migrate's
// command, migrate, and golangmigrate of adapters/golangmigrate, which calls its library. Tests
// of its ways are run where they are, as make test does.
const golangMigrateEnv = "PGXLOCK_TEST_GOLANGMIGRATE"

// ways are all that the documentation names.
var ways = slices.Concat([]way{{"Up", up, down}}, waysOfGolangMigrate(), []way{
	{"psql", psqlFiles("up"), psqlFiles("down")},
	{"psql -1", psqlFiles("up", "-1"), psqlFiles("down", "-1")},
})

func waysOfGolangMigrate() []way {
	if os.Getenv(golangMigrateEnv) == "" {
		return nil
	}
	return []way{
		{"golang-migrate's library", library("pool", "up"), library("pool", "down")},
		{"golang-migrate by URL", library("url", "up"), library("url", "down")},
		{"golang-migrate by URL, its own table", library("own-table", "up"), library("own-table", "down")},
		{"golang-migrate's command", command("up"), command("down", "-all")},
	}
}

func TestWaysOfGolangMigrateAreRun(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	if os.Getenv(golangMigrateEnv) == "" {
		pgtest.Missing(t, "golangmigrate", golangMigrateEnv+" does not name a directory with migrate and golangmigrate, which make test builds: its ways are left out of all tests")
	}
	for _, program := range []string{"migrate", "golangmigrate"} {
		if _, err := exec.LookPath(filepath.Join(os.Getenv(golangMigrateEnv), program)); err != nil {
			t.Errorf("%s: %v", golangMigrateEnv, err)
		}
	}
}

func up(t *testing.T, url string) error {
	return migrations.Up(t.Context(), pgtest.Pool(t, url), nil)
}

func down(t *testing.T, url string) error {
	return migrations.Down(t.Context(), pgtest.Pool(t, url), nil)
}

// library is a program that calls golang-migrate's library in that way.
func library(way, direction string) func(*testing.T, string) error {
	return func(t *testing.T, url string) error {
		return start(t, filepath.Join(os.Getenv(golangMigrateEnv), "golangmigrate"), way, direction, url)
	}
}

// command is golang-migrate's command line tool.
func command(arg ...string) func(*testing.T, string) error {
	return func(t *testing.T, url string) error {
		return start(t, filepath.Join(os.Getenv(golangMigrateEnv), "migrate"), slices.Concat([]string{"-path", ".", "-database", migrateURL(url)}, arg)...)
	}
}

func migrateURL(url string) string {
	_, rest, _ := strings.Cut(url, "://")
	separator := "?"
	if strings.Contains(rest, "?") {
		separator = "&"
	}
	return "pgx5://" + rest + separator + "x-migrations-table=" + migrations.Table
}

// psqlFiles runs the files that FS has with psql, as people do.
func psqlFiles(direction string, arg ...string) func(*testing.T, string) error {
	return func(t *testing.T, url string) error {
		return psql(t, url, slices.Concat(arg, asArguments(files(direction)))...)
	}
}

func psql(t *testing.T, url string, arg ...string) error {
	path := "psql"
	if binaries, err := pgserver.Find(); err == nil {
		path = filepath.Join(binaries.Dir, "psql")
	}
	return start(t, path, append([]string{"-X", "-q", "-d", url}, arg...)...)
}

// start runs a program. Without ON_ERROR_STOP psql goes on after an error, and
// exits with 0: its messages tell.
func start(t *testing.T, name string, arg ...string) error {
	cmd := exec.CommandContext(t.Context(), name, arg...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "PG") })
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%w: %s", err, &stderr)
	}
	if strings.Contains(stderr.String(), "ERROR:") {
		return errors.New(stderr.String())
	}
	return nil
}

// as returns the database's URL for sessions that have these settings, name and
// value in turn, as if they were set for the role.
func as(t *testing.T, db *pgtest.DB, settings ...string) string {
	t.Helper()
	u, err := url.Parse(db.URL)
	if err != nil || u.Scheme == "" {
		t.Fatal("these tests need a connection string that is a URL")
	}
	query := u.Query()
	options := query.Get("options")
	for i := 0; i < len(settings); i += 2 {
		options += " -c " + settings[i] + "=" + strings.NewReplacer(`\`, `\\`, " ", `\ `).Replace(settings[i+1])
	}
	query.Set("options", strings.TrimSpace(options))
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // psql does not know +
	return u.String()
}

// newRole makes a role that may do nothing but what PUBLIC may, dropped with all
// it has in the database when the test is over. Sessions become it by the
// setting "role".
func newRole(t *testing.T, db *pgtest.DB) string {
	t.Helper()
	name := "pgxlock_test_" + strings.ToLower(rand.Text())
	db.Exec(t, "create role "+name)
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.Background(), "drop owned by "+name+" cascade; drop role "+name); err != nil {
			t.Errorf("drop role: %v", err)
		}
	})
	return name
}

// newPlainRole makes a role that owns a schema of its own, and returns the URL
// of its sessions there.
func newPlainRole(t *testing.T, db *pgtest.DB) (role, url string) {
	t.Helper()
	role = newRole(t, db)
	db.Exec(t, "create schema authorization "+role)
	return role, as(t, db, "role", role)
}

// querier is what a query may be asked of.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// ask returns the one value that the query gives.
func ask[T any](t *testing.T, q querier, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := q.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%v\n%s", err, sql)
	}
	return v
}

// expect fails the test unless the query gives the value.
func expect[T comparable](t *testing.T, q querier, want T, sql string, args ...any) {
	t.Helper()
	if got := ask[T](t, q, sql, args...); got != want {
		t.Errorf("got %v, want %v: %s", got, want, sql)
	}
}

// refuse fails the test unless err comes from the server with that SQLSTATE.
func refuse(t *testing.T, err error, code string) {
	t.Helper()
	_ = refusal(t, err, code)
}

// refusal is refuse for tests that check more of the error.
func refusal(t *testing.T, err error, code string) *pgconn.PgError {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		t.Fatalf("got %v, want SQLSTATE %s", err, code)
	}
	if pgErr.Code != code {
		t.Fatalf("got %v (%s), want SQLSTATE %s", pgErr, pgErr.Detail, code)
	}
	return pgErr
}

// lockTimeout reports whether err means that a lock_timeout ended the wait for a lock.
func lockTimeout(err error) bool {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code == pgerrcode.LockNotAvailable
	}
	return err != nil && (strings.Contains(err.Error(), "canceling statement due to lock timeout") || // as psql says it
		strings.Contains(err.Error(), "can't acquire database lock")) // as golang-migrate does
}

// must fails the test at an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// catalog describes all that is in the database, but for version tables and, while pgxlock
// is installed, what it keeps of an older table, as
// lines that do not depend on the order in which things were made. Rights are
// those of others than the owner.
func catalog(t *testing.T, db *pgtest.DB) string {
	t.Helper()
	lines := strings.Split(ask[string](t, db.Pool, catalogSQL), "\n")
	return strings.Join(slices.DeleteFunc(lines, func(line string) bool {
		return strings.Contains(line, migrations.Table) || strings.Contains(line, "schema_migrations") // golang-migrate's own
	}), "\n")
}

const catalogSQL = `
WITH relation AS (
  SELECT c.*, c.oid::regclass AS called FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
   WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
     AND (c.relname !~ '^pgxlock_adopted' OR to_regclass(quote_ident(n.nspname) || '.pgxlock_epoch') IS NULL)
)
SELECT coalesce(string_agg(line, E'\n' ORDER BY line COLLATE "C"), '') FROM (
  SELECT concat_ws(' ', 'schema', n.nspname, n.nspowner::regrole, n.nspacl) AS line
    FROM pg_namespace n WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
  UNION ALL
  SELECT concat_ws(' ', 'relation', c.called, c.relkind, c.relpersistence, c.relowner::regrole, c.reloptions, (SELECT array_agg(x::text ORDER BY x::text) FROM aclexplode(c.relacl) x WHERE x.grantee <> c.relowner), c.relrowsecurity,
                   obj_description(c.oid, 'pg_class')) FROM relation c
  UNION ALL
  SELECT concat_ws(' ', 'column', c.called, row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum), a.attname, format_type(a.atttypid, a.atttypmod),
                   a.attnotnull, a.attcollation::regcollation, a.attacl, pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum))
    FROM relation c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum WHERE c.relkind IN ('r', 'v')
  UNION ALL
  SELECT concat_ws(' ', 'index', pg_get_indexdef(i.indexrelid), i.indisvalid) FROM relation c JOIN pg_index i ON i.indrelid = c.oid
  UNION ALL
  SELECT concat_ws(' ', 'constraint', c.called, k.conname, pg_get_constraintdef(k.oid)) FROM relation c JOIN pg_constraint k ON k.conrelid = c.oid
  UNION ALL
  SELECT concat_ws(' ', 'view', c.called, pg_get_viewdef(c.oid)) FROM relation c WHERE c.relkind = 'v'
  UNION ALL
  SELECT concat_ws(' ', 'sequence', c.called, s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle)
    FROM relation c JOIN pg_sequence s ON s.seqrelid = c.oid
  UNION ALL
  SELECT concat_ws(' ', 'trigger', pg_get_triggerdef(g.oid)) FROM relation c JOIN pg_trigger g ON g.tgrelid = c.oid WHERE NOT g.tgisinternal
  UNION ALL
  SELECT concat_ws(' ', 'function', p.oid::regprocedure, p.proowner::regrole, 
                   (SELECT array_agg(x::text ORDER BY x::text) FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) x WHERE x.grantee <> p.proowner), obj_description(p.oid, 'pg_proc'), pg_get_functiondef(p.oid))
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
   WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND p.prokind = 'f'
     AND (p.proname !~ '^pgxlock_adopted' OR to_regclass(quote_ident(n.nspname) || '.pgxlock_epoch') IS NULL)
) lines`

// sameCatalog fails the test, naming the lines, unless both are equal.
func sameCatalog(t *testing.T, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for _, line := range g {
		if !slices.Contains(w, line) {
			t.Errorf("too much: %s", line)
		}
	}
	for _, line := range w {
		if !slices.Contains(g, line) {
			t.Errorf("missing: %s", line)
		}
	}
	t.Fatal("it is not the same")
}
