package pgtest

import (
	"context"
	"maps"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// filled is a template of one test.
func filled() *Template {
	return NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := pool.Exec(ctx, `create table version (n int); insert into version values (7);
			create table work (n bigserial primary key, what text);
			create function noted() returns trigger language plpgsql as 'begin raise ''the row is deleted''; end';
			create trigger noted before delete on work for each row execute function noted()`)
		return err
	})
}

// has runs a test with a database of the template, and returns its name.
func has(t *testing.T, template *Template, test func(t *testing.T, db *DB)) (name string) {
	t.Helper()
	t.Run("a test", func(t *testing.T) {
		db := template.New(t)
		name = db.Name
		test(t, db)
	})
	return name
}

func exists(t *testing.T, name string) (exists bool) {
	t.Helper()
	row := Connect(t, serverURL(t)).QueryRow(t.Context(), "select exists (select from pg_database where datname = $1)", name)
	if err := row.Scan(&exists); err != nil {
		t.Fatal(err)
	}
	return exists
}

func TestDatabaseIsCleanedForTheNextTest(t *testing.T) {
	t.Parallel()
	template := filled()
	var left *pgx.Conn
	const look = `select concat_ws(' ', (select count(*) from work), nextval('work_n_seq'), (select n from version),
		(select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())),
		(select count(*) from pg_stat_activity where datname = current_database()), (select count(*) from pg_listening_channels()),
		(select count(*) from pg_prepared_statements where not name like 'stmtcache%'), current_setting('search_path'))`
	var first, again string
	looks := func(t *testing.T, db *DB, into *string) {
		t.Helper()
		if err := db.Pool.QueryRow(t.Context(), look).Scan(into); err != nil {
			t.Fatal(err)
		}
	}
	before := has(t, template, func(t *testing.T, db *DB) {
		looks(t, db, &first)
		db.Exec(t, "insert into work (what) select 'x' from generate_series(1, 10)")
		for range 3 { // connections of the pool
			conn, err := db.Pool.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Release()
			if _, err := conn.Exec(t.Context(), "set search_path = nowhere; select pg_advisory_lock_shared(1, 2); listen x; prepare y as select 1", pgx.QueryExecModeSimpleProtocol); err != nil {
				t.Fatal(err)
			}
		}
		var err error
		if left, err = pgx.Connect(t.Context(), db.URL); err != nil {
			t.Fatal(err)
		}
	})
	defer left.Close(context.Background())
	after := has(t, template, func(t *testing.T, db *DB) { looks(t, db, &again) })
	if after != before {
		t.Errorf("the next test got %s, not %s", after, before)
	}
	if again != first {
		t.Errorf("the next test found %q; the first one, %q", again, first)
	}
	if err := left.Ping(t.Context()); err == nil {
		t.Error("a connection that the first test left still works")
	}
}

func TestConnectionsThatAreKeptAreAsGoodAsNew(t *testing.T) {
	t.Parallel()
	template := filled().Keep()
	const look = `select concat_ws(' ', current_setting('search_path'), (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
		(select count(*) from pg_listening_channels()), (select count(*) from pg_prepared_statements where not name like 'stmtcache%'))`
	var pids []map[uint32]bool
	for range 2 {
		has(t, template, func(t *testing.T, db *DB) {
			seen := make(map[uint32]bool)
			for range 3 {
				conn, err := db.Pool.Acquire(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Release()
				seen[conn.Conn().PgConn().PID()] = true
				var found string
				if err := conn.QueryRow(t.Context(), look).Scan(&found); err != nil || found != `"$user", public 0 0 0` {
					t.Errorf("%q, %v", found, err)
				}
				if _, err := conn.Exec(t.Context(), "set search_path = nowhere; select pg_advisory_lock_shared(1, 2); listen x; prepare y as select 1", pgx.QueryExecModeSimpleProtocol); err != nil {
					t.Fatal(err)
				}
			}
			pids = append(pids, seen)
		})
	}
	if !maps.Equal(pids[0], pids[1]) {
		t.Errorf("the next test has the connections %v, the first one %v", pids[1], pids[0])
	}
}

func TestDatabaseThatWasChangedIsNotUsedAgain(t *testing.T) {
	Long(t)
	t.Parallel()
	template := filled()
	for change, sql := range map[string]string{
		"a row of the template":    "update version set n = 8",
		"one more such row":        "insert into version values (8)",
		"a new table":              "create table more ()",
		"a new column":             "alter table work add column more int",
		"a default":                "alter table work alter column what set default 'x'",
		"a dropped table":          "drop table version",
		"a new function":           "create function more() returns int language sql return 1",
		"another body":             "create or replace function noted() returns trigger language plpgsql as 'begin return null; end'",
		"a setting of a function":  "alter function noted() set search_path = ''",
		"a disabled trigger":       "alter table work disable trigger noted",
		"a right":                  "grant select on work to public",
		"a right on a function":    "revoke execute on function pg_catalog.pg_notify(text, text) from public",
		"a setting":                "do $$ begin execute format('alter database %I set lock_timeout = 1', current_database()); end $$",
		"a limit":                  "do $$ begin execute format('alter database %I connection limit 7', current_database()); end $$",
		"a right on the database":  "do $$ begin execute format('revoke connect on database %I from public', current_database()); end $$",
		"a policy":                 "create policy p on work",
		"an operator":              "create operator ### (function = int4pl, leftarg = int, rightarg = int)",
		"a view":                   "create view v as select 1",
		"an index":                 "create index on work (what)",
		"a type":                   "create type mood as enum ('x')",
		"a schema":                 "create schema s",
		"a default right":          "alter default privileges revoke execute on functions from public",
		"an event trigger":         "create function e() returns event_trigger language plpgsql as 'begin end'; create event trigger e on ddl_command_end execute function e()",
		"a publication":            "create publication p",
		"a large object":           "select lo_from_bytea(0, 'x')",
		"more rows than are clean": "insert into work (what) select repeat('x', 1000) from generate_series(1, 1000)",
	} {
		t.Run(change, func(t *testing.T) {
			name := has(t, template, func(t *testing.T, db *DB) { db.Exec(t, sql) })
			if exists(t, name) {
				t.Errorf("%s is still there after: %s", name, sql)
			}
		})
	}
}
