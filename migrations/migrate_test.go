// The ways to run the files: what they make, what an error leaves, and several at once.

package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgserver"
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
			version(t, db.Pool, newest)
			expect(t, db.Pool, marks(newest, false), versionTable)
			expect(t, db.Pool, true, "select acquire_lock('k', 'a')")
			expect(t, db.Pool, true, "select release_lock('k', 'a')")
			callsInTransactions(t, db.Connect(t))

			way.again(t, db.URL)
			sameCatalog(t, catalog(t, db), want)

			must(t, migrations.Up(t.Context(), db.Pool, nil)) // adopts it
			sameCatalog(t, catalog(t, db), want)
			expect(t, db.Pool, marks(newest, false), versionTable)

			must(t, way.down(t, db.URL))
			sameCatalog(t, catalog(t, db), empty)
			version(t, db.Pool, 0)

			must(t, way.up(t, db.URL))
			sameCatalog(t, catalog(t, db), want)
			must(t, way.down(t, db.URL))
		})
	}
}

// versionTable asks for all that it holds; marks is what it should hold.
const versionTable = "select coalesce(string_agg(version || ' ' || dirty, ', '), '') from pgxlock_migrations"

func marks(version uint, dirty bool) string { return fmt.Sprint(version, " ", dirty) }

// forget removes what stays when all versions are removed, so that a database
// serves several cases.
func forget(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.Exec(t, "drop table if exists pgxlock_migrations, schema_migrations")
}

// obstacles make each file fail, late in it.
var obstacles = []struct{ create, drop, says string }{
	{"create table lock_leases (in_the_way int)", "drop table lock_leases", `"lock_leases" is not a view`},
	{
		"create function purge_claims(p_age interval, p_limit integer) returns text language sql return ''::text",
		"drop function purge_claims(interval, integer)", "cannot change return type of existing function",
	},
	{
		"create function pgxlock_reap_advisory(p_limit integer, p_session bigint) returns text language sql as $$ select ''::text $$",
		"drop function pgxlock_reap_advisory(integer, bigint)", "cannot change return type of existing function",
	},
	{
		"create function pgxlock_reap_waiters(p_limit integer) returns text language sql as $$ select ''::text $$",
		"drop function pgxlock_reap_waiters(integer)", "cannot change return type of existing function",
	},
	{
		"create function pgxlock_reap_shares(p_grace interval, p_limit integer) returns text language sql as $$ select ''::text $$",
		"drop function pgxlock_reap_shares(interval, integer)", "cannot change return type of existing function",
	},
	{
		"create function start_run_at(p_key text, p_tick timestamptz) returns text language sql as $$ select ''::text $$",
		"drop function start_run_at(text, timestamptz)", "cannot change return type of existing function",
	},
	{
		"create function pgxlock_reap_limits(p_page integer, p_pages integer) returns text language sql as $$ select ''::text $$",
		"drop function pgxlock_reap_limits(integer, integer)", "cannot change return type of existing function",
	},
	{
		"create function soften_locks() returns text language sql as $$ select ''::text $$",
		"drop function soften_locks()", "cannot change return type of existing function",
	},
}

func TestSoakErrorLeavesNothingBehindWhateverRanTheFile(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	if len(obstacles) != len(upFiles) {
		t.Fatalf("%d obstacles for %d files", len(obstacles), len(upFiles))
	}
	reference := atVersion(t, newest)
	want := catalog(t, reference)
	for _, way := range ways {
		for failing, obstacle := range obstacles {
			if failing < firstTried(t) {
				continue
			}
			t.Run(way.name+" "+upFiles[failing], func(t *testing.T) {
				t.Parallel()
				db := atVersion(t, uint(failing)) // of its own: what one leaves would hide what the next one leaves
				db.Exec(t, obstacle.create)
				before := catalog(t, db)
				failed := func(stays uint) {
					t.Helper()
					if err := way.up(t, db.URL); err == nil {
						t.Fatal("no error")
					} else if !strings.Contains(err.Error(), obstacle.says) {
						t.Errorf("the error does not say what is in the way: %v", err)
					}
					sameCatalog(t, catalog(t, db), before)
					version(t, db.Pool, stays)
				}
				// Who runs every file is refused by an older one before this one's turn.
				if failing < 2 || !way.runsEveryFile() {
					failed(uint(failing))
				}

				// Fresh, the files before the failing one take effect, but where
				// all are run in one transaction.
				if failing > 0 {
					must(t, migrations.Repair(t.Context(), db.Pool, nil)) // golang-migrate left its mark
				}
				must(t, psql(t, db.URL, asArguments(downFiles[int(newest)-failing:])...))
				forget(t, db)
				stays := uint(failing)
				if way.name == "psql -1" {
					before, stays = catalog(t, db), 0
				}
				failed(stays)

				db.Exec(t, obstacle.drop)
				err := way.up(t, db.URL)
				if err != nil && strings.Contains(err.Error(), "Dirty database") {
					// golang-migrate keeps its mark, and Up knows better.
					must(t, migrations.Up(t.Context(), db.Pool, nil))
					err = way.up(t, db.URL)
					if strings.Contains(way.name, "its own table") {
						err = nil // that one is not ours to heal
					}
				}
				must(t, way.nothingToDo(err))
				sameCatalog(t, catalog(t, db), want)
				version(t, db.Pool, newest)
			})
		}
	}
}

// A file that fails on the way down leaves its version, and those before it; Down leaves everything.
func TestSoakErrorOnTheWayDownLeavesThatVersion(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const dependent = "create view in_the_way as select %s as one"
	for _, way := range ways {
		for i, call := range []string{
			"pgxlock_hardened()", "pgxlock_limit_clock()", "(pgxlock_due_runs('k', '1 day', '0', 'UTC', 0, false)).slot", "pgxlock_share_pin('k'::text, 'h'::text)",
			"pgxlock_waiter_key(1)", "pgxlock_session_key(1)", "purge_claims('1 hour'::interval, 1)", "advisory_lock_key('k')",
		} {
			if len(downFiles)-1-i < firstTried(t) {
				continue
			}
			t.Run(way.name+" "+downFiles[i], func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				must(t, way.up(t, db.URL))
				stays := newest
				if way.name != "psql -1" && way.name != "Up" {
					stays -= uint(i)
				}
				reference := atVersion(t, stays)
				for _, d := range []*pgtest.DB{db, reference} {
					d.Exec(t, fmt.Sprintf(dependent, call))
				}
				if err := way.down(t, db.URL); err == nil || !strings.Contains(err.Error(), "other objects depend on") {
					t.Errorf("down: %v", err)
				}
				sameCatalog(t, catalog(t, db), catalog(t, reference))
				version(t, db.Pool, stays)
			})
		}
	}
}

func TestFailedUpMarksNothingDirty(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	for failing, obstacle := range obstacles {
		db.Exec(t, obstacle.create)
		if err := migrations.Up(t.Context(), db.Pool, nil); err == nil || !strings.Contains(err.Error(), obstacle.says) {
			t.Errorf("Up: %v", err)
		}
		if failing > 0 {
			expect(t, db.Pool, marks(uint(failing), false), versionTable)
		} else {
			expect(t, db.Pool, true, "select to_regclass('pgxlock_migrations') is null")
		}
		db.Exec(t, obstacle.drop)
	}
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	version(t, db.Pool, newest)
}

func TestRepairClearsADirtyMark(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Repair(t.Context(), db.Pool, nil); err == nil || !strings.Contains(err.Error(), "nothing is installed") {
		t.Errorf("Repair of nothing: %v", err)
	}
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	want := catalog(t, db)
	for _, mark := range []string{"(1, true)", "(2, true)", "(3, true)", "(4, true)", "(-1, true)", fmt.Sprintf("(%d, true)", newest+1)} {
		db.Exec(t, "truncate pgxlock_migrations; insert into pgxlock_migrations values "+mark)
		version(t, db.Pool, newest) // what is there, not what the mark says
		must(t, migrations.Repair(t.Context(), db.Pool, nil))
		expect(t, db.Pool, marks(newest, false), versionTable)
		sameCatalog(t, catalog(t, db), want)
	}
}

// golang-migrate marks a version dirty while it runs the file, so that another
// run of the file sees what is installed as not installed.
func TestInstallationIsNotAdoptedAsAForeignTable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	for i, file := range upFiles {
		v := uint(i + 1)
		must(t, psql(t, db.URL, "-f", file))
		want := catalog(t, db)
		expect(t, db.Pool, marks(v, false), versionTable)
		db.Exec(t, "update pgxlock_migrations set dirty = true")
		must(t, psql(t, db.URL, "-f", file))
		sameCatalog(t, catalog(t, db), want)
		expect(t, db.Pool, marks(v, false), versionTable)
	}
}

func TestManyMigratorsMayRunAtOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	reference := atVersion(t, newest)
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
					for again := 20; ; {
						if errs[i] = way.nothingToDo(way.up(t, db.URL)); lockTimeout(errs[i]) && again > 0 { // the others took too long
							again--
							heal(t, db, way)
						} else if !othersFault(errs[i]) {
							return
						}
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
			version(t, db.Pool, newest)
			expect(t, db.Pool, true, "select acquire_lock('k', 'a')")
			callsInTransactions(t, db.Connect(t))
		})
	}
}

// heal takes back the mark that golang-migrate leaves of a file that failed. Of a table of
// its own it is not Up that does.
func heal(t *testing.T, db *pgtest.DB, way way) {
	var err error
	switch {
	case strings.Contains(way.name, "its own table"):
		_, err = db.Pool.Exec(t.Context(), "delete from schema_migrations")
	case strings.HasPrefix(way.name, "golang-migrate"):
		err = migrations.Up(t.Context(), db.Pool, nil)
	}
	if err != nil && !lockTimeout(err) {
		t.Errorf("%s: heal: %v", way.name, err)
	}
}

// othersFault says whether it must be run again. golang-migrate's library and its
// command do not exclude each other while they make the version table, and one
// sees the other's mark. What psql installed between the look at the version and
// the file is no error when looked at again. Up looks again by itself.
func othersFault(err error) bool {
	if err == nil || strings.HasPrefix(err.Error(), "pgxlock: migrations: up: ") {
		return false
	}
	return madeMeanwhile(err.Error()) || strings.Contains(err.Error(), "Dirty database") ||
		strings.Contains(err.Error(), "already has a later version") && !strings.HasPrefix(err.Error(), "psql:")
}

// madeMeanwhile says whether golang-migrate met a version table that was not there when its
// CREATE TABLE IF NOT EXISTS began. The server notices it in the catalogs, in one of their
// indexes, or before both. The statement's quotes tell it from those of the files.
func madeMeanwhile(text string) bool {
	return strings.Contains(text, `CREATE TABLE IF NOT EXISTS "`) &&
		(strings.Contains(text, "already exists") || strings.Contains(text, "_nsp_index"))
}

func TestVersionSaysWhatIsInstalledAndWhatThereIs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	before := catalog(t, db)
	status, err := migrations.Version(t.Context(), db.Pool, nil)
	must(t, err)
	if want := (migrations.Status{Database: db.Name, Schema: "public", Newest: newest}); status != want {
		t.Errorf("%+v, want %+v", status, want)
	}
	expect(t, db.Pool, true, "select to_regclass('pgxlock_migrations') is null") // asking makes nothing
	sameCatalog(t, catalog(t, db), before)

	must(t, migrations.Down(t.Context(), db.Pool, nil)) // of nothing
	expect(t, db.Pool, true, "select to_regclass('pgxlock_migrations') is null")

	for v := range newest {
		must(t, psql(t, db.URL, "-f", upFiles[v]))
		version(t, db.Pool, v+1)
	}
}

// version fails the test unless that version is installed.
func version(t *testing.T, pool *pgxpool.Pool, want uint) {
	t.Helper()
	status, err := migrations.Version(t.Context(), pool, nil)
	must(t, err)
	if status.Installed != want {
		t.Errorf("version %d is installed, want %d", status.Installed, want)
	}
}

func TestFileRefusesToRunOverALaterVersion(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	refused := func(files []string, mark string) {
		t.Helper()
		before := catalog(t, db)
		for _, file := range files {
			for _, arg := range [][]string{{"-f", file}, {"-1", "-f", file}} {
				if err := psql(t, db.URL, arg...); err == nil || !strings.Contains(err.Error(), "later version") {
					t.Errorf("%s: %v", file, err)
				}
			}
			sameCatalog(t, catalog(t, db), before)
			expect(t, db.Pool, mark, versionTable)
		}
	}
	refused(upFiles[:newest-1], marks(newest, false))
	refused(downFiles[1:], marks(newest, false))
	db.Exec(t, "update pgxlock_migrations set version = $1", newest+1)
	if err := migrations.Up(t.Context(), db.Pool, nil); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("the schema has version %d", newest+1)) {
		t.Errorf("Up: %v", err)
	}
	refused(upFiles, marks(newest+1, false))
	refused(downFiles, marks(newest+1, false))
}

// golang-migrate records a version before it runs the file, which another tool may have
// run meanwhile, and later ones too.
func TestOlderFileThatRunsAgainTakesNothingBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	want := catalog(t, db)
	for v := uint(1); v < newest; v++ {
		db.Exec(t, fmt.Sprintf("update pgxlock_migrations set version = %d, dirty = true", v))
		must(t, psql(t, db.URL, "-f", upFiles[v-1]))
		expect(t, db.Pool, int(newest), "select pgxlock_version()")
	}
	must(t, psql(t, db.URL, "-f", upFiles[newest-1]))
	sameCatalog(t, catalog(t, db), want)
	version(t, db.Pool, newest)
}

func TestFileRefusesToRunWithoutTheVersionBeforeIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	empty := catalog(t, db)
	for i, up := range upFiles {
		down := downFiles[int(newest)-1-i]
		before := catalog(t, db)
		if i > 0 {
			for name, err := range map[string]error{down: psql(t, db.URL, "-f", down), "-1 " + down: psql(t, db.URL, "-1", "-f", down)} {
				if err == nil || !strings.Contains(err.Error(), fmt.Sprint("does not have version ", i+1)) {
					t.Errorf("%s at version %d: %v", name, i, err)
				}
			}
		}
		for _, later := range upFiles[i+1:] {
			for name, err := range map[string]error{later: psql(t, db.URL, "-f", later), "-1 " + later: psql(t, db.URL, "-1", "-f", later)} {
				if err == nil || !strings.Contains(err.Error(), "does not have version") || !strings.Contains(err.Error(), "first") {
					t.Errorf("%s at version %d: %v", name, i, err)
				}
			}
		}
		sameCatalog(t, catalog(t, db), before)
		version(t, db.Pool, uint(i))
		must(t, psql(t, db.URL, "-f", up))
	}
	must(t, psqlFiles("down")(t, db.URL))
	sameCatalog(t, catalog(t, db), empty)
}

// Each version can be taken back alone, and put on again.
func TestEveryVersionGoesUpDownAndUpAgain(t *testing.T) {
	t.Parallel()
	first := 0
	if testing.Short() {
		first = len(upFiles) - 1
	}
	db := atVersion(t, uint(first))
	for i, up := range upFiles {
		if i < first {
			continue
		}
		before := catalog(t, db)
		must(t, psql(t, db.URL, "-f", up))
		after := catalog(t, db)
		must(t, psql(t, db.URL, "-f", downFiles[int(newest)-1-i]))
		sameCatalog(t, catalog(t, db), before)
		version(t, db.Pool, uint(i))
		if i > 0 {
			expect(t, db.Pool, marks(uint(i), false), versionTable)
		}
		must(t, psql(t, db.URL, "-f", up))
		sameCatalog(t, catalog(t, db), after)
		version(t, db.Pool, uint(i+1))
		expect(t, db.Pool, marks(uint(i+1), false), versionTable)
	}
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	must(t, migrations.Down(t.Context(), db.Pool, nil))
}

// As others see it who look with pg_dump, over all ways and over up, down and up
// again. The server is one of our own, because its pg_dump is of its version.
func TestSoakPgDumpSeesTheSameWhateverRanTheFiles(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{})
	newDB := func(name, template string) (url string, dump func() string) {
		conn := pgtest.Connect(t, server.URL("postgres"))
		_, err := conn.Exec(t.Context(), "create database "+name+" template "+template)
		must(t, err)
		return server.URL(name), func() string {
			t.Helper()
			text, err := server.Dump(t.Context(), name, "--exclude-table="+migrations.Table, "--exclude-table=schema_migrations")
			must(t, err)
			return text
		}
	}
	seed, err := os.ReadFile("../testdata/seed.sql")
	must(t, err)
	seeded, _ := newDB("seeded", "template1")
	conn := pgtest.Connect(t, seeded)
	_, err = conn.Exec(t.Context(), string(seed))
	must(t, err)
	must(t, conn.Close(t.Context()))

	for _, template := range []string{"template1", "seeded"} {
		var want string
		for i, way := range ways {
			url, dump := newDB(fmt.Sprint("from_", template, "_", i), template)
			before := dump()
			must(t, way.up(t, url))
			after := dump()
			if want == "" {
				want = after // by Up
			}
			sameCatalog(t, after, want)
			must(t, way.down(t, url))
			sameCatalog(t, dump(), before)
			if i == 0 || pgtest.Soak(t, false, true) {
				must(t, way.up(t, url))
				sameCatalog(t, dump(), want)
			}
		}
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
			_, err := migrations.Version(ctx, p, nil)
			return err
		},
	} {
		err := call(t.Context(), nil)
		if want := fmt.Sprintf("pgxlock: migrations: %s: the pool is nil; make one with pgxpool.New", name); err == nil || err.Error() != want {
			t.Errorf("nil pool: got %v, want %s", err, want)
		}
		var noContext context.Context
		err = call(noContext, db.Pool)
		if want := fmt.Sprintf("pgxlock: migrations: %s: the context is nil", name); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("nil context: got %v, want %s", err, want)
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
	db := atVersion(t, newest)
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
	// What a crash may take away: what ends with it anyway, and what tells that there was one.
	expect(t, db.Pool, "pgxlock_advisory_locks, pgxlock_limits, pgxlock_names, pgxlock_semaphores, pgxlock_since_crash, pgxlock_step_down, pgxlock_waiters", "select string_agg(relname, ', ' order by relname) from pg_class where relnamespace = 'public'::regnamespace and relkind <> 'i' and relpersistence <> 'p'")
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
