package migrations_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// madeHere counts what is in the schemas.
const madeHere = `select (select count(*) from pg_class c where c.relnamespace = any ((select array_agg(oid) from pg_namespace where nspname !~ '^pg_|^information_schema$')::oid[])) + (select count(*) from pg_proc where pronamespace in (select oid from pg_namespace where nspname !~ '^pg_|^information_schema$'))
	+ (select count(*) from pg_namespace where nspname !~ '^pg_|^information_schema$|^public$')`

func TestEngineThatKeepsNoLocksGetsNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	testkit.KeepNoLocks(t, db)
	for _, w := range ways {
		err := w.up(t, db.URL)
		if err == nil || !strings.Contains(err.Error(), "grants advisory locks and does not keep them") || !strings.Contains(err.Error(), "PostgreSQL 1") {
			t.Errorf("%s: %v", w.name, err)
		}
		db.Exec(t, "drop table if exists schema_migrations, pgxlock_migrations") // golang-migrate makes one before it runs a file
		expect(t, db.Pool, 0, madeHere)
	}
	err := migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: "locks"})
	if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "docs/engines.md") {
		t.Errorf("%v, want ErrUnsupported and the page to read", err)
	}
	expect(t, db.Pool, 0, madeHere)
}

// After a dump from PostgreSQL was restored on such an engine, everything is there.
func TestEngineThatKeepsNoLocksIsNotRepaired(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	testkit.KeepNoLocks(t, db)
	db.Exec(t, "drop function lock_tx")
	if err := migrations.Up(t.Context(), db.Pool, nil); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
	expect(t, db.Pool, true, "select to_regproc('lock_tx') is null")
}
