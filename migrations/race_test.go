// A role makes objects of our names during and after an installation: nothing of it may run as
// the role that installs or removes.

package migrations_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// trapped is a table of our name that draws from the squatter's sequence when it
// is written.
func trapped(table, columns string) string {
	return "create table " + table + " (" + columns + "); grant all on " + table + ` to public;
		create trigger run before insert or update or delete or truncate on ` + table + " execute function run()"
}

const (
	versionColumns   = "version bigint not null primary key, dirty boolean not null"
	epochColumns     = "singleton boolean primary key default true, system_identifier bigint, epoch_base bigint, timeline bigint"
	leaseColumns     = "lock_name varchar(255) primary key, holder_id varchar, acquired_at timestamptz, expires_at timestamptz, metadata jsonb"
	claimColumns     = "claim_key varchar(255) primary key, claimed_at timestamptz, expires_at timestamptz, claimed_by xid8, fingerprint varchar(255), answer bytea"
	sessionColumns   = "key_space integer, key_id bigint, session bigint, shared boolean, token bigint, primary key (key_space, key_id, session)"
	limitColumns     = "limit_key text primary key, tat bigint"
	waiterColumns    = "kind integer, name text, ticket bigint, client bigint, owner text, waiters integer, since timestamptz, live_until timestamptz, woken timestamptz, holds text[], role text, primary key (kind, name, ticket)"
	evictionColumns  = "kind integer, name text, holder text, token bigint, evicted_at timestamptz, evicted_by text, reason text, key_name text, primary key (kind, name, holder, token)"
	nameColumns      = "key_id bigint primary key, name text, held_at timestamptz"
	stepDownColumns  = "kind integer, name text, holder text, asked_at timestamptz, asked_by text, reason text, primary key (kind, name, holder)"
	semaphoreColumns = "name text, permits integer, used_at timestamptz, used_by text, primary key (name, permits)"
	runColumns       = "run_key varchar(255), slot timestamptz, state text, attempt integer, holder text, lease text, started_at timestamptz, finished_at timestamptz, error text, keep_until timestamptz, primary key (run_key, slot)"
	crashColumns     = "singleton boolean default true check (singleton), primary key (singleton)"
	shareColumns     = "lock_name varchar, holder_id varchar, fencing_token bigint, acquired_at timestamptz, expires_at timestamptz, metadata jsonb, primary key (lock_name, holder_id)"
)

// whileWaiting runs do when a session in the database waits for another one's
// transaction.
func whileWaiting(t *testing.T, db *pgtest.DB, do func()) {
	t.Helper()
	pgtest.Until(t, "somebody waits", func() bool {
		return ask[bool](t, db.Pool, `select exists (select from pg_locks l join pg_stat_activity using (pid)
			where l.locktype = 'transactionid' and not l.granted and datname = current_database())`)
	})
	do()
}

// The owners were looked at before the object could be seen; it appears while
// the file waits to make its own.
func TestObjectsThatAppearWhileTheFileWaitsAreRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, test := range []struct {
		from         uint
		object, make string
	}{
		{0, "table", trapped("pgxlock_migrations", versionColumns)},
		{1, "table", trapped("pgxlock_claims", claimColumns)},
		{1, "function", "create function claim_once(text, interval, interval) returns boolean language sql as $$ select nextval('public.ran') > 0 $$"},
	} {
		for name, install := range map[string]func(*testing.T, string) error{"Up": up, "psql": psqlFiles("up"), "psql -1": psqlFiles("up", "-1")} {
			t.Run(fmt.Sprintf("%s of %s %s", test.object, upFiles[test.from], name), func(t *testing.T) {
				t.Parallel()
				db := atVersion(t, test.from)
				_, conn := newSquatter(t, db)
				before := catalog(t, db)
				_, err := conn.Exec(t.Context(), "begin; "+test.make)
				must(t, err)
				done := make(chan error, 1)
				go func() { done <- install(t, db.URL) }()
				whileWaiting(t, db, func() {
					_, err := conn.Exec(t.Context(), "commit")
					must(t, err)
				})
				if err := <-done; err == nil {
					t.Error("installed on another role's " + test.object)
				}
				expect(t, db.Pool, false, "select is_called from ran")
				if test.object == "table" {
					_, err = conn.Exec(t.Context(), "drop table "+strings.Fields(test.make)[2])
				} else {
					_, err = conn.Exec(t.Context(), "drop function claim_once")
				}
				must(t, err)
				sameCatalog(t, catalog(t, db), before)
			})
		}
	}
}

// One table is held back so that the file waits; another object, which the file
// makes later, is made meanwhile.
func TestObjectsMadeWhileTheFileWaitsForAnotherAreRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, test := range []struct {
		from               uint
		wait, make, object string
	}{
		{0, "create table distributed_locks (" + leaseColumns + ")", trapped("pgxlock_epoch", epochColumns), "pgxlock_epoch"},
		{1, "create table pgxlock_claims (" + claimColumns + ")", "create sequence pgxlock_claims_claimed_at", "pgxlock_claims_claimed_at"},
		{
			1, "create table pgxlock_claims (" + claimColumns + ")",
			"create function purge_claims(p_age interval, p_limit integer default 10000) returns bigint language sql as $$ select nextval('public.ran') $$",
			"purge_claims(interval,integer)",
		},
		{
			2, "create table pgxlock_advisory_locks (" + sessionColumns + ")",
			"create function pgxlock_reap_advisory(p_limit integer default 1000, p_session bigint default null) returns bigint language sql as $$ select nextval('public.ran') $$",
			"pgxlock_reap_advisory(integer,bigint)",
		},
		{
			3, "create table pgxlock_waiters (" + waiterColumns + ")",
			"create function pgxlock_waiter_dead(p_client bigint, p_live_until timestamptz) returns boolean language sql as $$ select nextval('public.ran') > 0 $$",
			"pgxlock_waiter_dead(bigint,timestamp with time zone)",
		},
		{
			7, "create table pgxlock_step_down (" + stepDownColumns + ")",
			"create function pgxlock_hardened() returns boolean language sql as $$ select nextval('public.ran') > 0 $$", "pgxlock_hardened()",
		},
		{
			6, "create table pgxlock_limits (" + limitColumns + ")",
			"create function pgxlock_limit_clock() returns bigint language sql as $$ select nextval('public.ran') $$", "pgxlock_limit_clock()",
		},
		{
			5, "create table pgxlock_runs (" + runColumns + ")",
			"create function start_run_at(p_key text, p_tick timestamptz) returns boolean language sql as $$ select nextval('public.ran') > 0 $$",
			"start_run_at(text,timestamp with time zone)",
		},
		{
			7, "create table pgxlock_evictions (" + evictionColumns + ")",
			"create function pgxlock_revoke(p_grantee text, p_beyond boolean) returns void language sql as $$ select nextval('public.ran') $$", "pgxlock_revoke(text,boolean)",
		},
		{
			7, "create view lock_holders as select 1 as one",
			"create function pgxlock_check_owner() returns oid language sql as $$ select nextval('public.ran')::oid $$", "pgxlock_check_owner()",
		},
		{
			4, "create table distributed_lock_shares (" + shareColumns + ")",
			"create function release_shared_lock(p_lock_name varchar, p_holder_id varchar) returns boolean language sql as $$ select nextval('public.ran') > 0 $$",
			"release_shared_lock(character varying,character varying)",
		},
		{ // beside the one that the file makes: it is another function, and not in the way
			1, "create table pgxlock_claims (" + claimColumns + ")",
			"create function pgxlock_deadline(integer) returns bigint language sql as $$ select nextval('public.ran') $$", "pgxlock_deadline(integer)",
		},
	} {
		t.Run(upFiles[test.from]+" "+test.object, func(t *testing.T) {
			t.Parallel()
			db := atVersion(t, test.from)
			role, first := newSquatter(t, db)
			second := pgtest.Connect(t, as(t, db, "role", role))
			var err error
			for try := 0; ; try++ {
				_, err = first.Exec(t.Context(), "begin; "+test.wait)
				must(t, err)
				done := make(chan error, 1)
				go func() { done <- psql(t, db.URL, "-f", upFiles[test.from]) }()
				whileWaiting(t, db, func() {
					_, err := second.Exec(t.Context(), test.make)
					must(t, err)
					_, err = first.Exec(t.Context(), "rollback")
					must(t, err)
				})
				if err = <-done; !lockTimeout(err) || try == 10 {
					break
				}
				// This machine let it wait for as long as it does. Once more, without the object.
				_, err = second.Exec(t.Context(), "drop "+strings.Fields(test.make)[1]+" "+test.object)
				must(t, err)
			}
			if strings.HasPrefix(test.object, "pgxlock_deadline(") {
				must(t, err)
				expect(t, db.Pool, true, "select claim_once('k')")
				version(t, db.Pool, test.from+1)
			} else {
				if err == nil || !strings.Contains(err.Error(), test.object+" (owned by "+role+")") {
					t.Errorf("got %v", err)
				}
				version(t, db.Pool, test.from)
			}
			expect(t, db.Pool, false, "select is_called from ran")
		})
	}
}

// The check reads what there is when it begins. It takes long where another role has
// many functions with many arguments, and meanwhile that role makes what the file calls next.
func TestFunctionsThatAppearDuringTheCheckAreNotCalled(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, object := range []struct{ name, make string }{
		{"pgxlock_version()", "create function pgxlock_version() returns bigint language sql as $$ select nextval('public.ran') $$"},
		{"pgxlock_migrations", "create view pgxlock_migrations as select nextval('public.ran') as version, false as dirty"},
	} {
		t.Run(object.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			_, conn := newSquatter(t, db)
			_, err := conn.Exec(t.Context(), `do $do$ begin
				for i in 1..2000 loop
					execute format('create function slow_%s(%s) returns integer language sql as $$ select 1 $$', i, repeat('information_schema.sql_identifier[], ', 99) || 'text');
				end loop;
			end $do$;
			select pg_advisory_lock(('x706c6a' || encode(substr(sha256(decode('00', 'hex') || 'migrate' || decode('00', 'hex') || 'public'), 1, 5), 'hex'))::bit(64)::bigint)`)
			must(t, err)
			done := make(chan error, 1)
			go func() { done <- psql(t, db.URL, "-f", upFiles[0]) }()
			pgtest.Until(t, "the file waits for the lock of schema changes", func() bool {
				return ask[bool](t, db.Pool, `select exists (select from pg_locks l join pg_stat_activity using (pid)
					where l.locktype = 'advisory' and not l.granted and datname = current_database())`)
			})
			for _, query := range []string{"begin", object.make, "select pg_advisory_unlock_all(), pg_sleep(0.1)", "commit"} {
				_, err := conn.Exec(t.Context(), query)
				must(t, err)
			}
			if err := <-done; err == nil {
				t.Errorf("installed on another role's %s", object.name)
			}
			expect(t, db.Pool, false, "select is_called from ran")
		})
	}
}

// A role installs pgxlock itself, and then changes what is its own.
func TestAnotherRolesInstallationIsNeitherRunNorBelieved(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role, conn := newSquatter(t, db)
	must(t, psqlFiles("up")(t, as(t, db, "role", role)))
	_, err := conn.Exec(t.Context(), `drop table pgxlock_migrations;
		create or replace function repair_lock_tokens() returns boolean language sql as $$ select nextval('public.ran') > 0 $$`)
	must(t, err)
	for range 2 { // a program that starts again tries again
		refuse(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.InsufficientPrivilege)
	}
	before := catalog(t, db)
	errs := map[string]error{
		"Repair": migrations.Repair(t.Context(), db.Pool, nil),
		"Down":   migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}),
		"psql":   psqlFiles("down")(t, db.URL),
	}
	for _, file := range downFiles {
		errs[file] = psql(t, db.URL, "-f", file)
	}
	for name, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "belongs to another role") {
			t.Errorf("%s: %v", name, err)
		}
	}
	sameCatalog(t, catalog(t, db), before)
	expect(t, db.Pool, false, "select is_called from ran")
}

// A program may call Up at its start with no right but to lock.
func TestUpIsNothingForARoleThatMayOnlyLock(t *testing.T) {
	t.Parallel()
	db := atVersion(t, newest)
	role := newRole(t, db)
	db.Exec(t, "grant select, insert, update, delete on distributed_locks to "+role)
	before := catalog(t, db)
	must(t, up(t, as(t, db, "role", role)))
	sameCatalog(t, catalog(t, db), before)

	// Where there is something to do, it says whose that is.
	must(t, psql(t, db.URL, "-f", downFiles[0]))
	before = catalog(t, db)
	var owner string
	must(t, db.Pool.QueryRow(t.Context(), "select current_user::text").Scan(&owner))
	want := "belongs to another role, " + owner + ", and this is " + role + ": connect as " + owner + ", or, as a member of it, SET ROLE"
	if err := up(t, as(t, db, "role", role)); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Up from an older version: %v", err)
	}
	sameCatalog(t, catalog(t, db), before)
}
