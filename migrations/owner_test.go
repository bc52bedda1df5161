// What is in the schema before the installation: objects of another role, and tables that only
// look like the one to adopt.

package migrations_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// newSquatter makes a role that may create in the schema public, its sessions,
// and a sequence that its functions draw from: that shows that they ran, though
// all else is rolled back.
func newSquatter(t *testing.T, db *pgtest.DB) (role string, conn *pgx.Conn) {
	t.Helper()
	role = newRole(t, db)
	db.Exec(t, "grant usage, create on schema public to "+role)
	conn = pgtest.Connect(t, as(t, db, "role", role))
	_, err := conn.Exec(t.Context(), `create sequence ran; grant all on ran to public;
		create function run() returns trigger language plpgsql security definer as $$ begin perform nextval('public.ran'); return null; end $$`)
	must(t, err)
	return role, conn
}

// refusedByName checks that nobody can install, why, and that it left no trace.
func refusedByName(t *testing.T, db *pgtest.DB, object, owner string) {
	t.Helper()
	before := catalog(t, db)
	table, stays := ask[bool](t, db.Pool, "select to_regclass('pgxlock_migrations') is not null"), ""
	if table {
		stays = ask[string](t, db.Pool, versionTable) // of the versions before, if they are installed
	}
	var installed uint
	_, _ = fmt.Sscan(stays, &installed) // none: 0
	for _, flags := range [][]string{nil, {"-1"}} {
		err := psql(t, db.URL, append(flags, asArguments(upFiles[installed:])...)...)
		if err == nil || !strings.Contains(err.Error(), "has objects of another role") ||
			!strings.Contains(err.Error(), object+" (owned by "+owner+")") || !strings.Contains(err.Error(), "SET ROLE") {
			t.Errorf("%s: psql: %v", object, err)
		}
		expect(t, db.Pool, table, "select to_regclass('pgxlock_migrations') is not null")
	}
	err := refusal(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.InsufficientPrivilege)
	if !strings.Contains(err.Message, object) || !strings.Contains(err.Hint, "SET ROLE") {
		t.Errorf("%s: Up: %s; hint: %s", object, err.Message, err.Hint)
	}
	// Up itself says so about the version table, without the owner.
	if object != migrations.Table && !strings.Contains(err.Message, object+" (owned by "+owner+")") {
		t.Errorf("%s: Up does not name the owner: %s", object, err.Message)
	}
	sameCatalog(t, catalog(t, db), before)
	expect(t, db.Pool, false, "select is_called from ran")
	if table {
		expect(t, db.Pool, stays, versionTable)
	} else {
		forget(t, db) // the empty one that Up made
	}
}

// object is one of ours, as a stranger makes it.
type object struct{ name, create, drop string }

// trapsFor lists all that is in a database with pgxlock, with what a stranger
// would make in its place to be run by the role that installs.
func trapsFor(t *testing.T, installed *pgtest.DB) (objects []object) {
	t.Helper()
	for _, name := range strings.Split(ask[string](t, installed.Pool, `select string_agg(concat(relkind, relname), ' ') from pg_class
		where relnamespace = 'public'::regnamespace and relkind in ('r', 'v', 'S')`), " ") {
		kind, name := name[:1], name[1:]
		switch kind {
		case "v":
			objects = append(objects, object{name, "create view " + name + " as select nextval('ran')", "drop view " + name})
		case "S":
			objects = append(objects, object{name, "create sequence " + name, "drop sequence " + name})
		default:
			columns, ok := map[string]string{
				"pgxlock_migrations": versionColumns,
				"pgxlock_epoch":      strings.Replace(epochColumns, "timeline bigint", "timeline bigint default nextval('ran')", 1),
				"distributed_locks":  leaseColumns,
				"pgxlock_claims":     claimColumns,

				"pgxlock_advisory_locks": sessionColumns,
				"pgxlock_waiters":        waiterColumns,
				"pgxlock_step_down":      stepDownColumns,
				"pgxlock_semaphores":     semaphoreColumns,
				"pgxlock_limits":         limitColumns,
				"pgxlock_runs":           runColumns,
				"pgxlock_evictions":      evictionColumns,
				"pgxlock_names":          nameColumns,
				"pgxlock_since_crash":    crashColumns,

				"distributed_lock_shares": shareColumns,
			}[name]
			if !ok {
				t.Fatalf("which columns has %s?", name)
			}
			objects = append(objects, object{name, trapped(name, columns), "drop table " + name})
		}
	}
	// What takes rows of a table cannot be made before the table.
	rows, err := installed.Pool.Query(t.Context(), `select oid::regprocedure::text,
			format('create function %I(%s) returns %s language plpgsql as $$ begin perform nextval(''public.ran''); raise exception ''ran''; end $$',
			       proname, pg_get_function_arguments(oid), pg_get_function_result(oid)),
			'drop function ' || oid::regprocedure
		from pg_proc where pronamespace = 'public'::regnamespace and (to_regtype('pgxlock_advisory_locks[]')::oid = any (proargtypes)) is not true`)
	must(t, err)
	functions, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (o object, err error) {
		return o, row.Scan(&o.name, &o.create, &o.drop)
	})
	must(t, err)
	return append(objects, functions...)
}

// Triggers and defaults of another role's table would run as the role that installs;
// and what CREATE OR REPLACE replaces stays the other role's, to change at will.
// Each file looks at all that it makes, wherever the files before it have run.
func TestSoakObjectsThatAnotherRoleMadeBeforeAreRefusedByName(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	first := firstTried(t)
	var before []object // the version before has them, and they are ours
	if first > 0 {
		before = trapsFor(t, atVersion(t, uint(first)))
	}
	for i, want := range []int{30, 7, 8, 18, 17, 9, 6, 18}[first:] {
		v := uint(first + i)
		t.Run(upFiles[v], func(t *testing.T) {
			installed := atVersion(t, v+1)
			all := trapsFor(t, installed)
			objects := slices.DeleteFunc(slices.Clone(all), func(o object) bool { return slices.Contains(before, o) })
			before = all
			if len(objects) < want {
				t.Fatalf("only %d objects", len(objects))
			}

			db := atVersion(t, v)
			role, conn := newSquatter(t, db)
			for _, object := range objects {
				t.Run(object.name, func(t *testing.T) {
					_, err := conn.Exec(t.Context(), object.create)
					must(t, err)
					defer func() {
						_, err := conn.Exec(t.Context(), object.drop)
						must(t, err)
					}()
					refusedByName(t, db, object.name, role)
				})
			}
			must(t, migrations.Up(t.Context(), db.Pool, nil))
			goodAndBadCalls(t, db.Connect(t))
			callsInTransactions(t, db.Connect(t))
			expect(t, db.Pool, false, "select is_called from ran")
		})
	}
}

// Who may create in the schema can say in it that pgxlock is installed. That must
// not be believed: who locks would run the other role's functions.
func TestInstallationThatAnotherRoleFeignsIsRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	_, conn := newSquatter(t, db)
	_, err := conn.Exec(t.Context(), `create function pgxlock_version() returns bigint language sql immutable return 1::bigint;
		create function acquire_lock(varchar, varchar, integer default 30, jsonb default '{}') returns boolean language sql as $$ select nextval('public.ran') > 0 $$`)
	must(t, err)
	refuse(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.InsufficientPrivilege)
	expect(t, db.Pool, false, "select is_called from ran")
}

func TestTwoObjectsOfAnotherRoleAreBothNamed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role, conn := newSquatter(t, db)
	_, err := conn.Exec(t.Context(), "create sequence pgxlock_tokens; create table pgxlock_epoch ()")
	must(t, err)
	refusedByName(t, db, "pgxlock_tokens", role)
	refusedByName(t, db, "pgxlock_epoch", role)
}

// What other roles do with objects of their own while a file runs is none of its business: neither
// what is committed meanwhile, nor what is older.
func TestObjectsOfOtherRolesThatHaveOtherNamesMayChangeMeanwhile(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, direction := range []string{"up", "down"} {
		version, file := newest-1, upFiles[newest-1]
		if direction == "down" {
			version, file = newest, downFiles[0]
		}
		text, err := migrations.FS.ReadFile(file)
		must(t, err)
		db := atVersion(t, version)
		role, bystander := newSquatter(t, db)
		do := func(sql string) {
			t.Helper()
			_, err := bystander.Exec(t.Context(), sql)
			must(t, err)
		}
		do("create table staging (i int); create materialized view daily as select * from staging; create function theirs() returns int language sql as 'select 1'")
		for _, act := range []string{
			"truncate staging", "grant select on staging to public", "refresh materialized view daily", "create index on staging (i)",
			"alter table staging add j int", "create table newer (i int)", "create or replace function theirs() returns int language sql as 'select 2'",
		} {
			func() {
				tx, err := db.Pool.Begin(t.Context())
				must(t, err)
				defer func() { must(t, tx.Rollback(t.Context())) }()
				if ask[string](t, tx, "select pg_current_xact_id()::text") == "" {
					t.Fatal("no transaction id")
				}
				do(act)
				if _, err := tx.Exec(t.Context(), string(text)); err != nil {
					t.Errorf("%s, while %s: %v", file, act, err)
				}
			}()
		}
		// One of ours is refused all the same, and nobody is told to drop what is another role's.
		do("create table pgxlock_evictions_of_mine ()")
		_, err = db.Pool.Exec(t.Context(), string(text))
		refusal := refusal(t, err, pgerrcode.InsufficientPrivilege)
		if !strings.Contains(refusal.Message, "pgxlock_evictions_of_mine (owned by "+role) || strings.Contains(refusal.Hint, "drop") {
			t.Errorf("%s; %s", refusal.Message, refusal.Hint)
		}
	}
}

// A function of our name with other arguments is another function.
func TestOverloadsOfAnotherRoleAreNotInTheWay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	_, conn := newSquatter(t, db)
	for _, signature := range []string{
		"acquire_lock(text, text, integer, jsonb)", "acquire_lock(bigint)", "release_lock(text, text)", "extend_lock(text, text, integer)",
		"pgxlock_next_tokens(integer)", "pgxlock_check(varchar, varchar)", "repair_lock_tokens(boolean)", "pgxlock_version(integer)",
		"lock_tx(varchar, interval, boolean, boolean)", "lock_tx(bigint)", "claim_once(varchar, interval, interval)", "claim_once(bigint)",
		"claim_request(varchar, text, interval, interval)", "answer_request(text, text, text)",
		"purge_claims(interval, bigint)", "pgxlock_deadline(text)", "pgxlock_lock_timeout(timestamp)",
		"pgxlock_migrate(text, integer)", "harden_locks(bigint)", "soften_locks(text)", "grant_locks(name, text)", "revoke_locks(varchar)", "pgxlock_renew_batch(varchar[], varchar[], bigint[], bigint[])",
		"pgxlock_holders(varchar)", "pgxlock_apply_rights(integer)", "pgxlock_check_owner(text)", "wake_lock_waiter(text)", "pgxlock_waiter_key(integer)",
		"allow_rate(text, double precision, integer, integer)", "reserve_rate(varchar, numeric, integer, integer, interval)", "pgxlock_limit_clock(integer)",
	} {
		_, err := conn.Exec(t.Context(), "create function "+signature+" returns bigint language sql as $$ select nextval('public.ran') $$")
		must(t, err)
	}
	for _, way := range ways {
		way.again(t, db.URL) // the first one installs
	}
	goodAndBadCalls(t, db.Connect(t))
	callsInTransactions(t, db.Connect(t))
	expect(t, db.Pool, false, "select is_called from ran")
}

// The new objects have to belong to the one whose table is adopted.
func TestTableOfAnotherRoleIsAdoptedByThatRole(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	owner, _ := newSquatter(t, db)
	db.Exec(t, `alter table distributed_locks owner to `+owner+`;
		alter function acquire_lock owner to `+owner+`; alter function release_lock owner to `+owner)
	expect(t, db.Pool, true, "select acquire_lock('held', 'a', 600)")
	for _, object := range []string{"distributed_locks", "acquire_lock(character varying,character varying,integer,jsonb)", "release_lock(character varying,character varying)"} {
		refusedByName(t, db, object, owner)
	}
	before := catalog(t, db)
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "set role "+owner)
			return err
		}
	})
	must(t, migrations.Up(t.Context(), pool, nil))
	expect(t, db.Pool, 0, "select count(*) from pg_class where relnamespace = 'public'::regnamespace and relowner <> $1::regrole", owner)
	expect(t, db.Pool, 0, "select count(*) from pg_proc where pronamespace = 'public'::regnamespace and proowner <> $1::regrole", owner)
	expect(t, db.Pool, false, "select acquire_lock('held', 'b')")
	expect(t, db.Pool, true, "select release_lock('held', 'a')")
	goodAndBadCalls(t, pgtest.Connect(t, as(t, db, "role", owner)))
	must(t, migrations.Down(t.Context(), pool, nil))
	sameCatalog(t, catalog(t, db), before)
}

// What comes by a column of our name has not the meaning of ours, and without
// the key on lock_name two could hold one lock.
func TestTableThatOnlyLooksLikeTheOneToAdoptIsRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const classic = "lock_name varchar(255), holder_id varchar(255), acquired_at timestamptz, expires_at timestamptz, metadata jsonb"
	db := pgtest.New(t)
	for columns, has := range map[string]string{
		classic + ", fencing_token bigint, primary key (lock_name)":                    "fencing_token bigint",
		classic + ", fencing_token bigint not null default 0, primary key (lock_name)": "fencing_token bigint",
		classic + ", fencing_token text, primary key (lock_name)":                      "fencing_token text",
		classic:                                          "metadata jsonb",
		classic + ", unique (lock_name)":                 "metadata jsonb",
		classic + ", primary key (holder_id)":            "primary key holder_id",
		classic + ", primary key (lock_name, holder_id)": "primary key lock_name",
		"lock_name varchar(255) primary key, holder_id varchar(255), acquired_at timestamp, expires_at timestamp, metadata jsonb": "expires_at timestamp without time zone",
	} {
		db.Exec(t, "create table distributed_locks ("+columns+"); insert into distributed_locks (lock_name, holder_id, expires_at) values ('k', 'a', now() - interval '1 day')")
		before := catalog(t, db)
		err := refusal(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.DuplicateTable)
		if !strings.Contains(err.Message, "public.distributed_locks exists and cannot be adopted") || !strings.Contains(err.Message, has) || err.Hint == "" {
			t.Errorf("%s: %v", columns, err)
		}
		if err := psqlFiles("up")(t, db.URL); err == nil || !strings.Contains(err.Error(), "cannot be adopted") {
			t.Errorf("%s: psql: %v", columns, err)
		}
		sameCatalog(t, catalog(t, db), before)
		expect(t, db.Pool, 1, "select count(*) from distributed_locks")
		db.Exec(t, "drop table distributed_locks")
	}
}

// The functions rely on it: a comparison with NULL is neither live nor expired.
func TestAdoptedTableGetsItsNotNulls(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newSeed(t)
	db.Exec(t, `alter table distributed_locks alter holder_id drop not null, alter expires_at drop not null;
		insert into distributed_locks (lock_name, holder_id, expires_at) values ('k', 'a', now() - interval '1 day')`)
	before := catalog(t, db)
	for column, value := range map[string]string{"holder_id": "'a'", "expires_at": "now() - interval '1 day'"} {
		db.Exec(t, "update distributed_locks set "+column+" = null")
		err := refusal(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.NotNullViolation)
		if err.TableName != "distributed_locks" || err.ColumnName != column {
			t.Errorf("%s: %v", column, err)
		}
		if err := psqlFiles("up")(t, db.URL); err == nil || !strings.Contains(err.Error(), `"`+column+`"`) {
			t.Errorf("%s: psql: %v", column, err)
		}
		sameCatalog(t, catalog(t, db), before)
		version(t, db.Pool, 0)
		db.Exec(t, "update distributed_locks set "+column+" = "+value)
	}
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	expect(t, db.Pool, "expires_at holder_id", `select string_agg(attname, ' ' order by attname) from pg_attribute
		where attrelid = 'distributed_locks'::regclass and attnotnull and attname in ('holder_id', 'expires_at')`)
	expect(t, db.Pool, true, "select acquire_lock('k', 'b')")
}

func TestTemporaryTableIsNotTheOneToAdopt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	fresh := atVersion(t, newest)
	want := catalog(t, fresh)
	for what, temporary := range map[string]string{
		"another table": "create temp table distributed_locks (mine int)",
		"one to adopt":  "create temp table distributed_locks (lock_name varchar(255) primary key, holder_id varchar(255), acquired_at timestamptz, expires_at timestamptz, metadata jsonb)",
		"all others": `create temp table pgxlock_epoch (mine int); create temp table pgxlock_migrations (mine int); create temp table pgxlock_claims (mine int);
			create temp sequence pgxlock_tokens; create temp view lock_leases as select 1 as mine`,
	} {
		for name, newDB := range map[string]func(*testing.T) *pgtest.DB{
			"fresh": func(t *testing.T) *pgtest.DB { return pgtest.New(t) },
			"seed":  newSeed,
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				t.Parallel()
				db := newDB(t)
				before := catalog(t, db)
				all := []string{"-c", temporary}
				for _, file := range upFiles {
					all = append(all, "-f", file, "-f", file) // the second time over what the first one made
				}
				must(t, psql(t, db.URL, all...))
				sameCatalog(t, catalog(t, db), want)
				goodAndBadCalls(t, db.Connect(t))
				callsInTransactions(t, db.Connect(t))
				must(t, psql(t, db.URL, slices.Concat([]string{"-c", temporary}, asArguments(downFiles))...))
				sameCatalog(t, catalog(t, db), before)
				forget(t, db)

				pool := db.NewPool(t, func(c *pgxpool.Config) {
					c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
						_, err := conn.Exec(ctx, temporary)
						return err
					}
				})
				must(t, migrations.Up(t.Context(), pool, nil))
				sameCatalog(t, catalog(t, db), want)
				must(t, migrations.Down(t.Context(), pool, nil))
				sameCatalog(t, catalog(t, db), before)
			})
		}
	}
}

// PostgreSQL then quotes what the file compares and writes down.
func TestSeedIsAdoptedAndGivenBackWhereAllIdentifiersAreQuoted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	fresh := atVersion(t, newest)
	want := catalog(t, fresh)
	db := newSeed(t)
	url := as(t, db, "quote_all_identifiers", "on")
	before := catalog(t, db)
	for _, way := range ways {
		if strings.Contains(way.name, "URL") || strings.Contains(way.name, "command") {
			continue // they spell the settings in it anew, in a way that the server does not know
		}
		if err := way.up(t, url); err != nil {
			t.Fatalf("%s: %v", way.name, err)
		}
		sameCatalog(t, catalog(t, db), want)
		goodAndBadCalls(t, pgtest.Connect(t, url))
		if err := way.down(t, url); err != nil {
			t.Fatalf("%s: down: %v", way.name, err)
		}
		sameCatalog(t, catalog(t, db), before)
		forget(t, db)
	}
	role, conn := newSquatter(t, db)
	_, err := conn.Exec(t.Context(), "create function pgxlock_next_tokens(bigint) returns bigint[] language sql as $$ select array[nextval('public.ran')] $$")
	must(t, err)
	if err := psqlFiles("up")(t, url); err == nil || !strings.Contains(err.Error(), "pgxlock_next_tokens(bigint) (owned by "+role+")") {
		t.Errorf("another role's function: %v", err)
	}
}

func TestUpNamesTheRightThatTheRoleLacks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role := newRole(t, db)
	var owner, database string
	must(t, db.Pool.QueryRow(t.Context(), "select current_user::text, current_database()::text").Scan(&owner, &database))
	db.Exec(t, `revoke create on schema public from public; create schema "A b"`)
	for schema, want := range map[string]string{
		"public": "GRANT CREATE ON SCHEMA public TO " + role + " as the schema's owner",
		"A b":    `GRANT CREATE ON SCHEMA "A b" TO ` + role,
		"new":    "GRANT CREATE ON DATABASE " + database + " TO " + role + " as the database's owner",
	} {
		err := migrations.Up(t.Context(), pgtest.Pool(t, as(t, db, "role", role)), &migrations.Config{Schema: schema})
		if refuse(t, err, pgerrcode.InsufficientPrivilege); !strings.Contains(fmt.Sprint(err), want) || strings.Contains(fmt.Sprint(err), "grant_locks") {
			t.Errorf("%s: %v", schema, err)
		}
	}
	db.Exec(t, "grant create on schema public to "+role)
	must(t, up(t, as(t, db, "role", role)))
}
