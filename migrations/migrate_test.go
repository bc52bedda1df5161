// This file is about the ways to run the files: what they make, what an error
// leaves, and several at once.

package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"testing"

	"github.com/golang-migrate/migrate/v4"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestEveryWayInstallsTheSame(t *testing.T) {
	t.Parallel()
	reference := pgtest.New(t)
	must(t, migrations.Up(t.Context(), reference.Pool, nil))
	want := catalog(t, reference)
	db := pgtest.New(t)
	empty := catalog(t, db)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			forget(t, db)
			must(t, way.up(t, db.URL))
			sameCatalog(t, catalog(t, db), want)
			version(t, db.Pool, 1)
			expect(t, db.Pool, true, "select acquire_lock('k', 'a')")
			expect(t, db.Pool, true, "select release_lock('k', 'a')")

			must(t, way.up(t, db.URL)) // again
			sameCatalog(t, catalog(t, db), want)

			must(t, migrations.Up(t.Context(), db.Pool, nil)) // adopts it
			sameCatalog(t, catalog(t, db), want)
			expect(t, db.Pool, "1 false", "select string_agg(version || ' ' || dirty, ', ') from pgxlock_migrations")

			must(t, way.down(t, db.URL))
			sameCatalog(t, catalog(t, db), empty)
			version(t, db.Pool, 0)

			must(t, way.up(t, db.URL))
			sameCatalog(t, catalog(t, db), want)
			must(t, way.down(t, db.URL))
		})
	}
}

// forget removes what stays when all versions are removed, so that a database
// serves several cases.
func forget(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.Exec(t, "drop table if exists pgxlock_migrations, schema_migrations")
}

func TestAnErrorLeavesNothingBehindWhateverRanTheFile(t *testing.T) {
	t.Parallel()
	reference := pgtest.New(t)
	must(t, migrations.Up(t.Context(), reference.Pool, nil))
	want := catalog(t, reference)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)                                     // of its own: what one leaves would hide what the next one leaves
			db.Exec(t, "create table lock_leases (in_the_way int)") // where a view is made, late in the file
			before := catalog(t, db)
			if err := way.up(t, db.URL); err == nil {
				t.Fatal("no error")
			} else if !strings.Contains(err.Error(), `"lock_leases" is not a view`) {
				t.Errorf("the error does not say what is in the way: %v", err)
			}
			sameCatalog(t, catalog(t, db), before)
			version(t, db.Pool, 0)

			db.Exec(t, "drop table lock_leases")
			err := way.up(t, db.URL)
			if dirty := (migrate.ErrDirty{}); errors.As(err, &dirty) || err != nil && strings.Contains(err.Error(), "Dirty database") {
				// golang-migrate keeps its mark, and Up knows better.
				must(t, migrations.Up(t.Context(), db.Pool, nil))
				err = way.up(t, db.URL)
				if strings.Contains(way.name, "its own table") {
					err = nil // that one is not ours to heal
				}
			}
			must(t, err)
			sameCatalog(t, catalog(t, db), want)
			version(t, db.Pool, 1)
		})
	}
}

func TestAFailedUpMarksNothingDirty(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "create table lock_leases (in_the_way int)")
	refuse(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.WrongObjectType)
	expect(t, db.Pool, 0, "select count(*) from pgxlock_migrations")
	db.Exec(t, "drop table lock_leases")
	must(t, byURL((*migrate.Migrate).Up, migrations.Table)(t, db.URL))
}

func TestRepairClearsADirtyMark(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Repair(t.Context(), db.Pool, nil); err == nil || !strings.Contains(err.Error(), "nothing is installed") {
		t.Errorf("Repair of nothing: %v", err)
	}
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	want := catalog(t, db)
	for _, mark := range []string{"(1, true)", "(-1, true)", "(7, true)"} {
		db.Exec(t, "truncate pgxlock_migrations; insert into pgxlock_migrations values "+mark)
		version(t, db.Pool, 1) // what is there, not what the mark says
		must(t, migrations.Repair(t.Context(), db.Pool, nil))
		expect(t, db.Pool, "1 false", "select string_agg(version || ' ' || dirty, ', ') from pgxlock_migrations")
		sameCatalog(t, catalog(t, db), want)
	}
}

// golang-migrate marks a version dirty while it runs the file, so that another
// run of the file sees what is installed as not installed.
func TestAnInstallationIsNotAdoptedAsAForeignTable(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	want := catalog(t, db)
	db.Exec(t, "update pgxlock_migrations set dirty = true")
	must(t, psql(t, db.URL, "-f", "000001_leases.up.sql"))
	sameCatalog(t, catalog(t, db), want)
	expect(t, db.Pool, "1 false", "select version || ' ' || dirty from pgxlock_migrations")
}

func TestManyMigratorsMayRunAtOnce(t *testing.T) {
	t.Parallel()
	reference := pgtest.New(t)
	must(t, migrations.Up(t.Context(), reference.Pool, nil))
	want := catalog(t, reference)
	ups := ways[0]
	for _, test := range []struct {
		name string
		ways []way
	}{
		{"two Up", []way{ups, ups}},
		{"eight Up", []way{ups, ups, ups, ups, ups, ups, ups, ups}},
		{"mixed", append([]way{ups}, ways...)},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			errs := make([]error, len(test.ways))
			var wg sync.WaitGroup
			for i, way := range test.ways {
				wg.Go(func() {
					for errs[i] = way.up(t, db.URL); othersFault(errs[i]); {
						errs[i] = way.up(t, db.URL)
					}
				})
			}
			wg.Wait()
			for i, err := range errs {
				if err != nil {
					t.Errorf("%s: %v", test.ways[i].name, err)
				}
			}
			sameCatalog(t, catalog(t, db), want)
			version(t, db.Pool, 1)
			expect(t, db.Pool, true, "select acquire_lock('k', 'a')")
		})
	}
}

// Up takes the lock of golang-migrate's command, whose key its library makes in
// another way.
func TestUpWaitsForGolangMigratesCommand(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	driver, err := new(migratepgx.Postgres).Open(migrateURL(db.URL, migrations.Table))
	must(t, err)
	must(t, driver.Lock())
	done := make(chan error, 1)
	go func() { done <- migrations.Up(t.Context(), db.Pool, nil) }()
	const waits = "select exists (select from pg_stat_activity where wait_event = 'advisory' and datname = current_database())"
	for !ask[bool](t, db.Pool, waits) {
		select {
		case err := <-done:
			t.Fatalf("Up did not wait: %v", err)
		default:
		}
	}
	must(t, driver.Unlock())
	must(t, <-done)
	must(t, driver.Close())
}

// othersFault says whether golang-migrate, run by itself, must be run again: its
// library and its command do not exclude each other while they make the version
// table, and one sees the other's mark. Up has no such errors.
func othersFault(err error) bool {
	if err == nil || strings.HasPrefix(err.Error(), "pgxlock: migrations: up: ") {
		return false
	}
	return strings.Contains(err.Error(), "pg_type_typname_nsp_index") || strings.Contains(err.Error(), `type "pgxlock_migrations" already exists`) || strings.Contains(err.Error(), "Dirty database")
}

func TestVersionSaysWhatIsInstalledAndWhatThereIs(t *testing.T) {
	t.Parallel()
	files, err := fs.Glob(migrations.FS, "*.up.sql")
	must(t, err)
	db := pgtest.New(t)
	before := catalog(t, db)
	installed, newest, err := migrations.Version(t.Context(), db.Pool, nil)
	must(t, err)
	if installed != 0 || newest != uint(len(files)) {
		t.Errorf("installed %d, newest %d; want 0, %d", installed, newest, len(files))
	}
	expect(t, db.Pool, true, "select to_regclass('pgxlock_migrations') is null") // asking makes nothing
	sameCatalog(t, catalog(t, db), before)

	must(t, migrations.Down(t.Context(), db.Pool, nil)) // of nothing
	expect(t, db.Pool, true, "select to_regclass('pgxlock_migrations') is null")

	must(t, migrations.Up(t.Context(), db.Pool, nil))
	version(t, db.Pool, newest)
}

// version fails the test unless that version is installed.
func version(t *testing.T, pool *pgxpool.Pool, want uint) {
	t.Helper()
	installed, _, err := migrations.Version(t.Context(), pool, nil)
	must(t, err)
	if installed != want {
		t.Errorf("version %d is installed, want %d", installed, want)
	}
}

func TestAFileRefusesToRunOverALaterVersion(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	db.Exec(t, "update pgxlock_migrations set version = 7")
	before := catalog(t, db)
	if err := migrations.Up(t.Context(), db.Pool, nil); err == nil || !strings.Contains(err.Error(), "the schema has version 7") {
		t.Errorf("Up: %v", err)
	}
	for _, direction := range []string{"up", "down"} {
		err := psql(t, db.URL, "-f", "000001_leases."+direction+".sql")
		if err == nil || !strings.Contains(err.Error(), "later version") {
			t.Errorf("%s: %v", direction, err)
		}
		sameCatalog(t, catalog(t, db), before)
		expect(t, db.Pool, 7, "select version from pgxlock_migrations")
	}
}

func TestMisuseIsAClearError(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, call := range map[string]func(context.Context, *pgxpool.Pool) error{
		"up":     func(ctx context.Context, p *pgxpool.Pool) error { return migrations.Up(ctx, p, nil) },
		"down":   func(ctx context.Context, p *pgxpool.Pool) error { return migrations.Down(ctx, p, nil) },
		"repair": func(ctx context.Context, p *pgxpool.Pool) error { return migrations.Repair(ctx, p, nil) },
		"version": func(ctx context.Context, p *pgxpool.Pool) error {
			_, _, err := migrations.Version(ctx, p, nil)
			return err
		},
	} {
		err := call(t.Context(), nil)
		if want := fmt.Sprintf("pgxlock: migrations: %s: the pool is nil; make one with pgxpool.New", name); err == nil || err.Error() != want {
			t.Errorf("nil pool: got %v, want %s", err, want)
		}
		if err := call(cancelled, db.Pool); !errors.Is(err, context.Canceled) {
			t.Errorf("%s with a cancelled context: %v", name, err)
		}
	}
	expect(t, db.Pool, true, "select to_regclass('pgxlock_migrations') is null")
}

func TestUpUsesThePoolsHooksAndNoneOfItsConnections(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role, _ := newPlainRole(t, db)
	dialled := false
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { dialled = true; return nil }
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "set role "+role)
			return err
		}
	})
	only, err := pool.Acquire(t.Context())
	must(t, err)
	defer only.Release()
	must(t, migrations.Up(t.Context(), pool, nil))
	expect(t, db.Pool, role, "select relowner::regrole::text from pg_class where relname = 'distributed_locks'")
	if !dialled {
		t.Error("BeforeConnect was not called")
	}
}

func TestEveryObjectIsCommentedAndEveryTableHasAKey(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	expect(t, db.Pool, "", `
		select coalesce(string_agg(o, ', '), '') from (
		  select c.oid::regclass::text from pg_class c where c.relnamespace = 'public'::regnamespace
		     and c.relkind in ('r', 'v', 'S') and obj_description(c.oid, 'pg_class') is null
		  union all
		  select p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'public'::regnamespace and obj_description(p.oid, 'pg_proc') is null
		) uncommented (o)`)
	expect(t, db.Pool, "", `
		select coalesce(string_agg(c.relname, ', '), '') from pg_class c where c.relnamespace = 'public'::regnamespace and c.relkind = 'r'
		   and not exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary)`)
	expect(t, db.Pool, 0, "select count(*) from pg_class where relnamespace = 'public'::regnamespace and relpersistence <> 'p'")
}

// A body in SQL was parsed when the function was made; any other is parsed
// again by every caller, with the caller's search_path.
func TestEveryFunctionPinsTheSearchPath(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const schema = `A "b", c`
	must(t, migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: schema}))
	expect(t, db.Pool, "", `
		select coalesce(string_agg(p.oid::regprocedure || ' ' || coalesce(p.proconfig::text, 'not at all'), ', '), '') from pg_proc p
		 where p.pronamespace = quote_ident($1)::regnamespace and p.prosqlbody is null
		   and (p.proconfig @> array[format('search_path=%I, pg_temp', $1)]) is not true`, schema)
}
