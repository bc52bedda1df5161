package migrations_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// Who has the seed's rights goes on, through every version and back.
func TestSeedsGrantsAreEnoughInEveryVersion(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, from := range []uint{0, 1, newest - 1} {
		t.Run(fmt.Sprint("from version ", from), func(t *testing.T) {
			t.Parallel()
			db := newSeed(t)
			role := newRole(t, db)
			db.Exec(t, "grant select, insert, update, delete on distributed_locks to "+role)
			conn := pgtest.Connect(t, as(t, db, "role", role))
			upTo(t, db.URL, from)
			calls := func() {
				t.Helper()
				for range 6 {
					expect(t, conn, true, "select acquire_lock('k', 'me')")
					expect(t, conn, false, "select acquire_lock('k', 'you')")
					expect(t, conn, true, "select release_lock('k', 'me')")
				}
			}
			calls()
			expect(t, conn, true, "select acquire_lock('held', 'me', 600)")
			must(t, migrations.Up(t.Context(), db.Pool, nil))
			calls()
			db.Exec(t, "select setval('pgxlock_tickets', 2000000)") // the numbers that callsOfWaiters gives
			goodAndBadCalls(t, conn)
			callsOfWaiters(t, conn)
			callsOfLimits(t, conn)
			callsOfShares(t, conn)
			expect(t, conn, "r", "select pgxlock_release_batch('{held}', '{me}', array[null]::bigint[])")
			must(t, psql(t, db.URL, asArguments(downFiles[:newest-from])...))
			calls()
		})
	}
}

// Whatever table is locked, nobody has more rights afterwards than before.
func TestDownThatFailsSoftensNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	role := newRole(t, db)
	db.Exec(t, "select harden_locks(), grant_locks('"+role+"', 'application')")
	expect(t, db.Pool, true, "select acquire_lock('k', 'a', 600)")
	hardened := catalog(t, db)
	for _, table := range []string{"distributed_locks", "pgxlock_waiters", "pgxlock_evictions"} { // of the last file, of one between, of the first
		user, err := db.Connect(t).Begin(t.Context())
		must(t, err)
		_, err = user.Exec(t.Context(), "select from "+table)
		must(t, err)
		refuse(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}), pgerrcode.LockNotAvailable)
		if sameCatalog(t, catalog(t, db), hardened); t.Failed() {
			t.Fatalf("after a Down that did not get %s", table)
		}
		must(t, user.Rollback(t.Context()))
	}
	must(t, migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}))
}

// The table's rights stand in the catalog; what harden_locks() changed of it goes
// back with soften_locks(), and with the migration.
func TestHardeningIsUndoneCompletely(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest-1)
	before := catalog(t, db)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	soft := catalog(t, db)
	db.Exec(t, "select harden_locks()")
	hardened := catalog(t, db)
	db.Exec(t, "select harden_locks()")
	sameCatalog(t, catalog(t, db), hardened)
	db.Exec(t, "select soften_locks()")
	sameCatalog(t, catalog(t, db), soft)
	db.Exec(t, "select soften_locks()")
	sameCatalog(t, catalog(t, db), soft)
	db.Exec(t, "select harden_locks()")
	must(t, psql(t, db.URL, asArguments(downFiles[:1])...))
	sameCatalog(t, catalog(t, db), before)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	sameCatalog(t, catalog(t, db), soft)
}

// The files are run again after a rename of the schema. Each function that they
// replace runs with its caller's rights then, until the last file has ended.
func TestHardenedLocksStayHardenedWhenTheFilesRunAgain(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: "old"}))
	application, monitoring := newRole(t, db), newRole(t, db)
	db.Exec(t, "set search_path = old; select harden_locks(), grant_locks('"+application+"', 'application'), grant_locks('"+monitoring+"', 'monitoring'); reset search_path")
	db.Exec(t, "alter schema old rename to new")
	must(t, psql(t, db.URL, append([]string{"-1", "-v", "ON_ERROR_STOP=1", "-c", "SET search_path = new", "-c", "DELETE FROM pgxlock_migrations"}, asArguments(upFiles)...)...))
	expect(t, db.Pool, true, "select new.pgxlock_hardened() and prosecdef from pg_proc where oid = 'new.acquire_lock'::regproc")
	app, looks := pgtest.Connect(t, as(t, db, "role", application, "search_path", "new")), pgtest.Connect(t, as(t, db, "role", monitoring, "search_path", "new"))
	expect(t, app, true, "select acquire_lock('k', 'me')")
	expect(t, looks, "me", "select holder_id::text from lock_leases")
	for _, query := range []string{"delete from distributed_locks", "select pgxlock_next_tokens(1)", "select purge_claims('0')"} {
		_, err := app.Exec(t.Context(), query)
		refuse(t, err, pgerrcode.InsufficientPrivilege)
		_, err = looks.Exec(t.Context(), query)
		refuse(t, err, pgerrcode.InsufficientPrivilege)
	}
}

// Each of these is one of the rights by which a kind of role is known.
func TestRolesKeepTheirRightsWhenUpMakesAnewWhatWasDropped(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	for _, kind := range []string{"application", "monitoring", "administration"} {
		db.Exec(t, "select harden_locks(), grant_locks('"+newRole(t, db)+"', '"+kind+"')")
	}
	want := catalog(t, db)
	for _, object := range []string{
		"table distributed_locks", "view lock_leases", "table pgxlock_claims", "table pgxlock_runs",
		"function pgxlock_renew_batch(text[], text[], bigint[], bigint[])", "function try_acquire_lock(varchar, varchar, interval, jsonb)",
		"function claim_once(text, interval, interval)", "function repair_lock_tokens()", "function purge_claims(interval, integer)",
		"function evict_lock(varchar, varchar, bigint, text)", "function harden_locks()",
	} {
		db.Exec(t, "drop "+object+" cascade")
		must(t, migrations.Up(t.Context(), db.Pool, nil))
		sameCatalog(t, catalog(t, db), want)
		if t.Failed() {
			t.Fatal(object)
		}
	}
}

// The owner of a function may change its comment, too.
func TestInternalFunctionOfAnotherRoleIsNotHardened(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest)
	role := newRole(t, db)
	db.Exec(t, "alter function pgxlock_key(text, text) owner to "+role+"; comment on function pgxlock_key(text, text) is null")
	_, err := db.Pool.Exec(t.Context(), "select harden_locks()")
	if err := refusal(t, err, pgerrcode.ObjectNotInPrerequisiteState); !strings.Contains(err.Message, "pgxlock_key(text,text) (owned by "+role+")") {
		t.Error(err.Message)
	}
}

// A program that may only lock calls Up at its start, too.
func TestUpDoesNothingForAHardenedApplication(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, &migrations.Config{Schema: "locks"}))
	role, stranger := newRole(t, db), newRole(t, db)
	db.Exec(t, "select locks.harden_locks(), locks.grant_locks('"+role+"', 'application')")
	want := catalog(t, db)
	for _, schema := range []string{"", "locks"} {
		must(t, migrations.Up(t.Context(), pgtest.Pool(t, as(t, db, "role", role, "search_path", "locks")), &migrations.Config{Schema: schema}))
	}
	sameCatalog(t, catalog(t, db), want)
	if err := migrations.Down(t.Context(), pgtest.Pool(t, as(t, db, "role", role)), &migrations.Config{Schema: "locks"}); err == nil {
		t.Error("an application removed the schema")
	}
	// A schema that is made by us is closed to all others.
	conn := pgtest.Connect(t, as(t, db, "role", stranger))
	for _, query := range []string{"select locks.advisory_lock_key('k')", "select * from locks.lock_leases", "create table locks.mine ()"} {
		_, err := conn.Exec(t.Context(), query)
		refuse(t, err, pgerrcode.InsufficientPrivilege)
	}
	expect(t, db.Pool, false, "select has_schema_privilege('public', 'locks', 'usage') or has_schema_privilege('public', 'locks', 'create')")
}

// A stranger's functions must not run on the way down.
func TestDownFileCallsNothingOfAStranger(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := atVersion(t, newest-1)
	_, conn := newSquatter(t, db)
	for _, name := range []string{"harden_locks()", "pgxlock_hardened()", "soften_locks()"} {
		_, err := conn.Exec(t.Context(), "create function "+name+" returns boolean language sql as $$ select nextval('public.ran') > 0 $$")
		must(t, err)
	}
	if err := psql(t, db.URL, "-f", downFiles[0]); err == nil {
		t.Error("no error")
	}
	expect(t, db.Pool, false, "select is_called from ran")
}
