package migrations_test

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// The extension reads each statement of a function as it would be planned. It is loaded from
// where scripts/plpgsql-check-tree unpacked it: no server has it installed.
//
// Its hints on casts are not asked for, because names are handled as text on purpose; nor
// those on EXECUTE, which only builds GRANT, ALTER and LOCK from what the catalog quotes.
func TestPlpgsqlCheckFindsNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	root := os.Getenv("PGXLOCK_TEST_PLPGSQL_CHECK")
	if root == "" {
		pgtest.Missing(t, "plpgsql_check", "PGXLOCK_TEST_PLPGSQL_CHECK does not say where it is: scripts/plpgsql-check-tree")
	}
	scripts, err := filepath.Glob(filepath.Join(root, "usr/share/postgresql/15/extension/plpgsql_check--*.sql"))
	if err != nil || len(scripts) != 1 {
		t.Fatalf("%v, %v", scripts, err)
	}
	text, err := os.ReadFile(scripts[0])
	must(t, err)
	script := regexp.MustCompile(`(?m)^\\.*$`).ReplaceAllString(string(text), "") // psql's own commands
	script = strings.NewReplacer("MODULE_PATHNAME", filepath.Join(root, "usr/lib/postgresql/15/lib/plpgsql_check.so"), "@extschema@", "checker").Replace(script)

	db := atVersion(t, newest)
	if version := ask[int](t, db.Pool, "select current_setting('server_version_num')::int / 10000"); version != 15 {
		t.Skipf("plpgsql_check is there for PostgreSQL 15, and this is %d", version)
	}
	conn := db.Connect(t)
	_, err = conn.Exec(t.Context(), "create schema checker; set search_path = checker; "+script+"; set search_path = public")
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == pgerrcode.UndefinedFile {
		t.Skip("the server sees other files than this program: it is in a container")
	}
	must(t, err)
	expect(t, conn, "", `
		select coalesce(string_agg(format('%s, line %s: %s %s %s', p.oid::regprocedure, c.lineno, c.message, c.detail, c.query), E'\n'), '')
		  from pg_proc p join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql',
		       lateral checker.plpgsql_check_function_tb(p.oid, other_warnings => true, extra_warnings => true, compatibility_warnings => true) c
		 where p.pronamespace = 'public'::regnamespace`)
}
