// Where the files install, and on which sessions and servers.

package migrations_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestSearchPathThatLeadsElsewhereIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `create schema "Missing"; create schema here`)
	before := catalog(t, db)
	for _, path := range []string{
		``, `""`, `missing`, `missing, public`, `"missing", here`, `missing`, `"here, public", here`, `"HERE", public`,
		`pg_catalog`, `pg_catalog, public`, `pg_temp, public`, `"$user"`, `"$user", missing, public`, `"HERE"`, `"pg_temp"`,
	} {
		if testing.Short() && path != `missing, public` && path != `"$user"` {
			continue
		}
		url := as(t, db, "search_path", path)
		err := refusal(t, up(t, url), pgerrcode.InvalidSchemaName)
		if !strings.Contains(err.Message, "'"+path+"'") || err.Hint == "" {
			t.Errorf("search_path %q: the error does not tell: %v, hint %q", path, err, err.Hint)
		}
		if err := psqlFiles("up")(t, url); err == nil || !strings.Contains(err.Error(), "cannot tell which schema") {
			t.Errorf("search_path %q: psql: %v", path, err)
		}
		sameCatalog(t, catalog(t, db), before)
		expect(t, db.Pool, 0, "select count(*) from pg_class where relname = 'pgxlock_migrations'")
	}
}

// Callers that search the new schema first would not see the leases of the older table.
func TestFilesRefuseASchemaInFrontOfThatOfAnOlderTable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	db.Exec(t, `create schema app`)
	before := catalog(t, db)
	both := as(t, db, "search_path", "app, public")
	err := psqlFiles("up")(t, both)
	for _, part := range []string{"search_path finds distributed_locks in schema public", "SET search_path = public", "SET search_path = app"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("psql: %v; want %q", err, part)
		}
	}
	sameCatalog(t, catalog(t, db), before)
	must(t, psqlFiles("up")(t, as(t, db, "search_path", "app"))) // a second one, as asked for
	must(t, psqlFiles("up")(t, as(t, db, "search_path", "public, app")))
	expect(t, db.Pool, 2, "select count(*) from pg_class where relname = 'pgxlock_epoch'")
}

// A second table would be a second lock, so it is never made by accident: what the
// search_path finds is what is meant, as for a Locker, or else the only one that there is.
func TestSecondInstallationMustBeAskedFor(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	cfg := &migrations.Config{Schema: "locks"}
	must(t, migrations.Up(t.Context(), db.Pool, cfg))
	before := catalog(t, db)
	must(t, migrations.Up(t.Context(), db.Pool, nil)) // the only one
	must(t, migrations.Repair(t.Context(), db.Pool, nil))
	version(t, db.Pool, newest)
	sameCatalog(t, catalog(t, db), before)

	further := pgtest.Pool(t, as(t, db, "search_path", "public, locks")) // found, though not first
	must(t, migrations.Up(t.Context(), further, nil))
	sameCatalog(t, catalog(t, db), before)
	version(t, further, newest)

	must(t, migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: "public"}))
	expect(t, db.Pool, true, "select acquire_lock('k', 'a') and locks.acquire_lock('k', 'b')") // two locks, as was asked for
	beyond := pgtest.Pool(t, as(t, db, "search_path", "elsewhere"))
	for name, do := range map[string]func(context.Context, *pgxpool.Pool, *migrations.Config) error{
		"up": migrations.Up, "down": migrations.Down, "repair": migrations.Repair,
	} {
		if err := do(t.Context(), beyond, nil); err == nil || !strings.Contains(err.Error(), `installed in schema "locks", "public", and none`) {
			t.Errorf("%s of one of two: %v", name, err)
		}
	}
}

// Two tables are two locks, and nothing that is done to one touches the other.
func TestEachOfTwoInstallationsIsUpgradedAndRemovedAlone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "create schema locks_1; create schema locks_2")
	in := func(schema string) string { return as(t, db, "search_path", schema) }
	cfg := func(schema string) *migrations.Config { return &migrations.Config{Schema: schema} }
	of := func(schema string) string { // what there is in it
		return strings.Join(slices.DeleteFunc(strings.Split(catalog(t, db), "\n"), func(line string) bool { return !strings.Contains(line, schema+".") }), "\n")
	}
	upTo(t, in("locks_1"), 1)
	must(t, migrations.Up(t.Context(), db.Pool, cfg("locks_2")))
	for _, schema := range []string{"locks_1", "locks_2"} { // both: they do not know each other
		expect(t, db.Pool, true, "select "+schema+".acquire_lock('k', 'of "+schema+"', 600)")
	}

	first, second := of("locks_1"), of("locks_2")
	must(t, migrations.Up(t.Context(), db.Pool, cfg("locks_1")))
	if of("locks_1") == first {
		t.Error("locks_1 was not upgraded")
	}
	sameCatalog(t, of("locks_2"), second)
	first = of("locks_1")
	for _, schema := range []string{"locks_1", "locks_2"} {
		status, err := migrations.Version(t.Context(), db.Pool, cfg(schema))
		if err != nil || status.Installed != newest || status.Schema != schema {
			t.Errorf("%s: %+v, %v", schema, status, err)
		}
	}

	refuse(t, migrations.Down(t.Context(), db.Pool, cfg("locks_1")), pgerrcode.ObjectInUse)
	expect(t, db.Pool, true, "select locks_1.release_lock('k', 'of locks_1')")
	must(t, migrations.Down(t.Context(), db.Pool, cfg("locks_1"))) // the other lease is nothing to it
	sameCatalog(t, of("locks_2"), second)
	expect(t, db.Pool, "of locks_2", "select string_agg(holder_id, ' ') from locks_2.distributed_locks where lock_name = 'k'")
	must(t, migrations.Up(t.Context(), db.Pool, cfg("locks_1")))
	sameCatalog(t, of("locks_1"), first)
	must(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Schema: "locks_2", Force: true}))
	sameCatalog(t, of("locks_1"), first)

	// Who names none must say which, while there are two off the path.
	must(t, migrations.Up(t.Context(), db.Pool, cfg("locks_2")))
	for name, err := range map[string]error{"Up": up(t, db.URL), "Down": down(t, db.URL)} {
		if err == nil || !strings.Contains(err.Error(), `"locks_1", "locks_2"`) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, down(t, in("locks_2")))
	sameCatalog(t, of("locks_1"), first)
}

func TestSoakSchemaNamedFirstGetsTheObjects(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	tried := 0
	db := pgtest.New(t)
	for path, schema := range map[string]string{
		`here, public`:                      `here`,
		`HERE,public`:                       `here`,
		`"Here There", public`:              `Here There`,
		` "a,b" , public`:                   `a,b`,
		`"say ""hi"", Bob" ,here`:           `say "hi", Bob`,
		`"$user", missing, public`:          `$user`, // the test makes that one
		`"$user"   ,   here`:                `here`,
		`here, pg_catalog, missing`:         `here`,
		`"it's", public`:                    `it's`,
		`"back\slash"`:                      `back\slash`,
		`"%I %s", public`:                   `%I %s`,
		"\"schéma\", public":                `schéma`,
		`"$user", "$user", "Here", missing`: `Here`,
	} {
		if tried++; tried > pgtest.Soak(t, 2, 100) {
			break // whichever come first
		}
		t.Run(path, func(t *testing.T) {
			role := newRole(t, db) // whose schema goes with it
			name := schema
			if name == "$user" {
				name = role
			}
			db.Exec(t, "create schema "+pgx.Identifier{name}.Sanitize()+" authorization "+role)
			url := as(t, db, "role", role, "search_path", path)
			must(t, up(t, url))
			expect(t, db.Pool, 0, "select count(*) from pg_class where relnamespace = 'public'::regnamespace")
			expect(t, db.Pool, name, "select nspname::text from pg_namespace where oid = (select relnamespace from pg_class where relname = 'pgxlock_epoch')")
			pool := pgtest.Pool(t, url)
			expect(t, pool, true, "select acquire_lock('k', 'a')")
			expect(t, db.Pool, true, "select "+pgx.Identifier{name, "release_lock"}.Sanitize()+"('k', 'a')") // from any search_path
			callsInTransactions(t, pgtest.Connect(t, url))
			version(t, pool, newest)
			must(t, psql(t, url, "-f", upFiles[newest-1])) // again
			if pgtest.Soak(t, false, true) {
				must(t, psqlFiles("down")(t, url))
				must(t, psqlFiles("up", "-1")(t, url))
			}
			must(t, down(t, url))
			expect(t, db.Pool, 0, "select count(*) from pg_proc where pronamespace = $1::regnamespace", pgx.Identifier{name}.Sanitize())
		})
	}
}

// SET search_path FROM CURRENT would keep "$user" as it stands.
func TestAnotherRolesOwnSchemaIsNotUsedForOurs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	_, owner := newPlainRole(t, db)
	must(t, up(t, owner))
	ownerPool := pgtest.Pool(t, owner)
	schema := ask[string](t, ownerPool, "select current_schema()")
	other, otherURL := newPlainRole(t, db)
	must(t, migrations.Up(t.Context(), pgtest.Pool(t, otherURL), &migrations.Config{Schema: other}))
	db.Exec(t, "grant usage on schema "+schema+" to "+other+"; grant all on "+schema+".distributed_locks to "+other)
	expect(t, pgtest.Pool(t, otherURL), true, "select "+schema+".acquire_lock('k', 'a')")
	expect(t, ownerPool, false, "select acquire_lock('k', 'b')")
	expect(t, pgtest.Pool(t, otherURL), true, "select acquire_lock('k', 'c')") // another installation
}

func TestSchemaIsCreatedAndClosed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	cfg := &migrations.Config{Schema: `Locks, "of" ours`}
	status, err := migrations.Version(t.Context(), db.Pool, cfg)
	must(t, err)
	if status.Installed != 0 {
		t.Errorf("version %d before there is a schema", status.Installed)
	}
	for name, do := range map[string]func(context.Context, *pgxpool.Pool, *migrations.Config) error{"down": migrations.Down, "repair": migrations.Repair} {
		if err := do(t.Context(), db.Pool, cfg); err == nil || !strings.Contains(err.Error(), `schema "Locks, \"of\" ours"`) {
			t.Errorf("%s where there is no schema: %v", name, err)
		}
	}
	must(t, migrations.Up(t.Context(), db.Pool, cfg))
	must(t, migrations.Up(t.Context(), db.Pool, cfg))
	plain := pgtest.Pool(t, as(t, db, "role", newRole(t, db)))
	_, err = plain.Exec(t.Context(), `select "Locks, ""of"" ours".acquire_lock('k', 'a')`)
	refuse(t, err, pgerrcode.InsufficientPrivilege)
	expect(t, db.Pool, true, `select "Locks, ""of"" ours".acquire_lock('k', 'a')`)
	refuse(t, migrations.Down(t.Context(), db.Pool, cfg), pgerrcode.ObjectInUse)
	cfg.Force = true
	must(t, migrations.Down(t.Context(), db.Pool, cfg))
}

// The functions keep the name of their schema. docs/install.md says how to
// tell them the new one: all files once more, in one transaction.
func TestRenamedSchemaIsPutRightByRunningTheFilesAgain(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	fresh := pgtest.New(t)
	must(t, migrations.Up(t.Context(), fresh.Pool, &migrations.Config{Schema: "new"}))
	want := catalog(t, fresh)
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: "old"}))
	token := ask[int64](t, db.Pool, "select fencing_token from old.try_acquire_lock('k', 'a', '10 minutes')")
	expect(t, db.Pool, true, "select old.claim_once('k')")
	db.Exec(t, "alter schema old rename to new")
	_, err := db.Pool.Exec(t.Context(), "select new.acquire_lock('k', 'b')")
	refuse(t, err, pgerrcode.UndefinedFunction) // it looks in the schema that is gone

	must(t, psql(t, db.URL, slices.Concat([]string{"-1", "-v", "ON_ERROR_STOP=1", "-c", "SET search_path = new", "-c", "DELETE FROM pgxlock_migrations"},
		asArguments(upFiles))...))
	sameCatalog(t, catalog(t, db), want)
	conn := pgtest.Connect(t, as(t, db, "search_path", "new"))
	expect(t, conn, marks(newest, false), versionTable)
	expect(t, conn, false, "select acquire_lock('k', 'b')")
	expect(t, conn, token, "select assert_lock_held('k', 'a')")
	expect(t, conn, false, "select claim_once('k')")
	goodAndBadCalls(t, pgtest.Connect(t, as(t, db, "search_path", "pg_catalog, new")))
	callsInTransactions(t, conn)
	must(t, migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: "new"}))
	must(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Schema: "new", Force: true}))
}

func TestExistingSchemaNeedsNoRightToCreateSchemas(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role := newRole(t, db)
	db.Exec(t, "create schema theirs authorization "+role+"; grant usage on schema theirs to public")
	pool := pgtest.Pool(t, as(t, db, "role", role))
	must(t, migrations.Up(t.Context(), pool, &migrations.Config{Schema: "theirs"}))
	expect(t, db.Pool, true, "select has_schema_privilege('public', 'theirs', 'usage')") // left as it was
	refuse(t, migrations.Up(t.Context(), pool, &migrations.Config{Schema: "another"}), pgerrcode.InsufficientPrivilege)
}

// golang-migrate forgets a connection where it may not make its table.
func TestSessionsAreAllClosed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "revoke create on schema public from public") // as it is since PostgreSQL 15
	role := newRole(t, db)
	refuse(t, up(t, as(t, db, "role", role, "application_name", "migrator")), pgerrcode.InsufficientPrivilege)
	expect(t, db.Pool, 0, "select count(*) from pg_class where relnamespace = 'public'::regnamespace")
	must(t, up(t, as(t, db, "application_name", "migrator")))
	must(t, down(t, as(t, db, "application_name", "migrator")))
	pgtest.Until(t, "the sessions that were closed are gone", func() bool {
		return ask[bool](t, db.Pool, "select not exists (select from pg_stat_activity where application_name = 'migrator' and datname = current_database())")
	})
}

func TestSoakSettingsOfTheRoleDoNotMatter(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	reference := atVersion(t, newest)
	want := catalog(t, reference)
	db := pgtest.New(t)
	for _, settings := range [][]string{
		{"standard_conforming_strings", "off", "escape_string_warning", "off"},
		{"plpgsql.variable_conflict", "use_variable", "plpgsql.extra_errors", "all"},
		{"plpgsql.variable_conflict", "use_column"},
		{"quote_all_identifiers", "on", "transform_null_equals", "on", "array_nulls", "off"},
		{"IntervalStyle", "sql_standard", "DateStyle", "SQL, DMY", "TimeZone", "Asia/Kathmandu", "bytea_output", "escape", "extra_float_digits", "-15"},
		{"check_function_bodies", "off", "row_security", "off", "synchronous_commit", "off", "client_min_messages", "error"},
		{"client_encoding", "LATIN1", "lc_messages", "C", "enable_seqscan", "off", "enable_indexscan", "off"},
		{"statement_timeout", "90min", "lock_timeout", "1d", "IntervalStyle", "sql_standard"}, // as waits read them
		{"statement_timeout", "20500", "lock_timeout", "20500", "IntervalStyle", "iso_8601"},
		{"statement_timeout", "30s", "idle_in_transaction_session_timeout", "30s", "jit_above_cost", "0"},
	} {
		t.Run(settings[0]+" "+settings[1], func(t *testing.T) {
			url := as(t, db, settings...)
			must(t, psqlFiles("up")(t, url))
			sameCatalog(t, catalog(t, db), want)
			conn := pgtest.Connect(t, url)
			goodAndBadCalls(t, conn)
			callsInTransactions(t, conn)
			must(t, psqlFiles("down")(t, url))
			if pgtest.Soak(t, true, false) {
				return
			}
			for _, other := range ways {
				if other.name != "Up" && other.name != "golang-migrate's library" {
					continue
				}
				must(t, other.up(t, url))
				sameCatalog(t, catalog(t, db), want)
				must(t, down(t, url))
			}
		})
	}
}

// An older snapshot hides what another role has created since.
func TestFilesRefuseToRunAboveReadCommitted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	for _, isolation := range []string{"repeatable read", "serializable"} {
		url := as(t, db, "default_transaction_isolation", isolation)
		refuses := func(files ...string) {
			t.Helper()
			before := catalog(t, db)
			for _, file := range files {
				if err := psql(t, url, "-f", file); err == nil || !strings.Contains(err.Error(), "migrations run in READ COMMITTED") {
					t.Errorf("%s, %s: %v", isolation, file, err)
				}
			}
			sameCatalog(t, catalog(t, db), before)
		}
		refuses(upFiles[0])
		must(t, up(t, url)) // it chooses the isolation itself
		refuses(slices.Concat(upFiles, downFiles)...)
		must(t, down(t, url))
		forget(t, db)
	}
}

func TestUpWorksWhereTheRoleMayNotWriteOrWait(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	url := as(t, db, "default_transaction_read_only", "on", "lock_timeout", "1")
	must(t, up(t, url))
	must(t, down(t, url))
}

// Some engines refuse what tells a cluster and its timeline.
func TestEngineThatHidesItsClusterIsInstalledOnWithAWarning(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role, url := newPlainRole(t, db)
	db.Exec(t, "revoke execute on function pg_control_system(), pg_walfile_name(pg_lsn), pg_current_wal_insert_lsn() from public")
	var warnings []string
	pool := pgtest.Pool(t, url, func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { warnings = append(warnings, n.Severity+" "+n.Message) }
	})
	must(t, migrations.Up(t.Context(), pool, nil))
	if text := strings.Join(warnings, "\n"); len(warnings) != 2 || strings.Count(text, "WARNING pgxlock: ") != 2 ||
		!strings.Contains(text, "timeline") || !strings.Contains(text, "system identifier") {
		t.Errorf("warnings: %q", warnings)
	}
	last := int64(0)
	for range 3 {
		token := ask[int64](t, pool, "select fencing_token from try_acquire_lock('k', 'a', '1 minute')")
		if token <= last || token>>40 != 1 {
			t.Errorf("token %d after %d", token, last)
		}
		last = token
		expect(t, pool, true, "select release_lock('k', 'a')")
	}
	db.Exec(t, "grant execute on function pg_control_system(), pg_walfile_name(pg_lsn), pg_current_wal_insert_lsn() to "+role)
	must(t, up(t, url)) // nothing to do
	expect(t, pool, true, "select fencing_token > $1 from try_acquire_lock('k', 'a', '1 minute')", last)
}

func TestCancelledUpIsAnErrorAndCanBeRepeated(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	blocker, err := db.Connect(t).Begin(t.Context())
	must(t, err)
	_, err = blocker.Exec(t.Context(), "create table pgxlock_epoch ()") // the file waits for whether this commits
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- migrations.Up(ctx, db.Pool, nil) }()
	pgtest.Until(t, "Up waits", func() bool {
		return ask[bool](t, db.Pool, "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database())")
	})
	cancel()
	must(t, blocker.Rollback(t.Context()))
	if err := <-done; err == nil {
		t.Error("no error")
	}
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	version(t, db.Pool, newest)
}
