// This file is about a role that makes objects of our names while, and after,
// somebody installs: nothing of it may run as whoever installs or removes.

package migrations_test

import (
	"strings"
	"testing"
	"time"

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
	versionColumns = "version bigint not null primary key, dirty boolean not null"
	epochColumns   = "singleton boolean primary key default true, system_identifier bigint, epoch_base bigint, timeline bigint, undo text[]"
	leaseColumns   = "lock_name varchar(255) primary key, holder_id varchar, acquired_at timestamptz, expires_at timestamptz, metadata jsonb"
)

// whileWaiting runs do when some backend waits for another one's transaction.
func whileWaiting(t *testing.T, db *pgtest.DB, do func()) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if ask[bool](t, db.Pool, "select exists (select from pg_locks where locktype = 'transactionid' and not granted)") {
			do()
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("nobody waits")
		}
	}
}

// The owners were looked at before the table could be seen; it appears while the
// file waits to make its own.
func TestATableThatAppearsWhileTheFileWaitsIsRefused(t *testing.T) {
	t.Parallel()
	for name, install := range map[string]func(*testing.T, string) error{"Up": up, "psql": psqlFiles("up"), "psql -1": psqlFiles("up", "-1")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			_, conn := newSquatter(t, db)
			_, err := conn.Exec(t.Context(), "begin; "+trapped("pgxlock_migrations", versionColumns))
			must(t, err)
			done := make(chan error, 1)
			go func() { done <- install(t, db.URL) }()
			whileWaiting(t, db, func() {
				_, err := conn.Exec(t.Context(), "commit")
				must(t, err)
			})
			if err := <-done; err == nil {
				t.Error("installed on another role's table")
			}
			expect(t, db.Pool, false, "select is_called from ran")
			expect(t, db.Pool, 0, "select count(*) from pg_proc where proname = 'acquire_lock'")
		})
	}
}

// One table is held back so that the file waits, another one is made meanwhile.
func TestATableThatIsMadeWhileTheFileWaitsForAnotherIsRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role, first := newSquatter(t, db)
	second := pgtest.Connect(t, as(t, db, "role", role))
	_, err := first.Exec(t.Context(), "begin; create table distributed_locks ("+leaseColumns+")")
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- psqlFiles("up")(t, db.URL) }()
	whileWaiting(t, db, func() {
		_, err := second.Exec(t.Context(), trapped("pgxlock_epoch", epochColumns))
		must(t, err)
		_, err = first.Exec(t.Context(), "rollback")
		must(t, err)
	})
	if err := <-done; err == nil || !strings.Contains(err.Error(), "pgxlock_epoch (owned by "+role+")") {
		t.Errorf("got %v", err)
	}
	expect(t, db.Pool, false, "select is_called from ran")
	expect(t, db.Pool, 0, "select count(*) from pg_proc where proname = 'acquire_lock'")
}

// A role installs pgxlock itself, and then changes what is its own.
func TestAnotherRolesInstallationIsNeitherRunNorBelieved(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	role, conn := newSquatter(t, db)
	must(t, psqlFiles("up")(t, as(t, db, "role", role)))
	_, err := conn.Exec(t.Context(), `drop table pgxlock_migrations;
		create or replace function repair_lock_tokens() returns boolean language sql as $$ select nextval('public.ran') > 0 $$;
		update pgxlock_epoch set undo = '{"select nextval(''public.ran'')"}'`)
	must(t, err)
	for range 2 { // a program that starts again tries again
		refuse(t, migrations.Up(t.Context(), db.Pool, nil), pgerrcode.InsufficientPrivilege)
	}
	for name, err := range map[string]error{
		"Repair": migrations.Repair(t.Context(), db.Pool, nil),
		"Down":   migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}),
		"psql":   psqlFiles("down")(t, db.URL),
	} {
		if err == nil || !strings.Contains(err.Error(), "belongs to another role") {
			t.Errorf("%s: %v", name, err)
		}
	}
	expect(t, db.Pool, false, "select is_called from ran")
}

// A program may call Up at its start with no right but to lock.
func TestUpIsNothingForARoleThatMayOnlyLock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	role := newRole(t, db)
	db.Exec(t, "grant select, insert, update, delete on distributed_locks to "+role)
	before := catalog(t, db)
	must(t, up(t, as(t, db, "role", role)))
	sameCatalog(t, catalog(t, db), before)
}
