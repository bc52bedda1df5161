// An older program meets a newer schema, while programs are rolled out or after one was rolled
// back.

package migrations_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// newNewer makes a database with the version after ours.
func newNewer(t *testing.T) *pgtest.DB {
	t.Helper()
	text, err := os.ReadFile("../testdata/future.sql")
	must(t, err)
	db := atVersion(t, newest)
	db.Exec(t, string(text))
	return db
}

func TestUpDoesNothingOnANewerSchema(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newNewer(t)
	expect(t, db.Pool, true, "select acquire_lock('k', 'a', 600)")
	want := catalog(t, db)
	role := newRole(t, db)
	for name, url := range map[string]string{"its owner": db.URL, "a role that may only lock": as(t, db, "role", role)} {
		for _, mark := range []string{marks(newest+1, false), marks(newest+1, true)} { // a dirty one is the newer program's
			v, dirty, _ := strings.Cut(mark, " ")
			db.Exec(t, fmt.Sprintf("update pgxlock_migrations set version = %s, dirty = %s", v, dirty))
			if err := up(t, url); err != nil {
				t.Errorf("Up as %s: %v", name, err)
			}
			expect(t, db.Pool, mark, versionTable)
		}
	}
	sameCatalog(t, catalog(t, db), want)
	version(t, db.Pool, newest+1)
	expect(t, db.Pool, false, "select acquire_lock('k', 'b')")
}

// The repair after a pg_upgrade does not wait for the newer program.
func TestUpRepairsTokensOnANewerSchema(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newNewer(t)
	db.Exec(t, "update pgxlock_epoch set system_identifier = 7")
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	expect(t, db.Pool, true, "select acquire_lock('k', 'a')")
	version(t, db.Pool, newest+1)
}

func TestOlderProgramTakesNothingOfANewerSchemaBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := newNewer(t)
	want := catalog(t, db)
	says := fmt.Sprintf("the schema has version %d, and this program knows up to %d: use a newer one", newest+1, newest)
	// Whatever the mark says: it is golang-migrate's, or what somebody forced.
	for _, mark := range []string{marks(newest+1, false), marks(newest+1, true), marks(newest, false), marks(newest, true)} {
		v, dirty, _ := strings.Cut(mark, " ")
		db.Exec(t, fmt.Sprintf("update pgxlock_migrations set version = %s, dirty = %s", v, dirty))
		for name, err := range map[string]error{
			"Down":         migrations.Down(t.Context(), db.Pool, nil),
			"Down, forced": migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}),
			"Repair":       migrations.Repair(t.Context(), db.Pool, nil),
		} {
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%s, marked %s: %v", name, mark, err)
			}
		}
		expect(t, db.Pool, mark, versionTable)
		sameCatalog(t, catalog(t, db), want)
	}
	db.Exec(t, fmt.Sprintf("update pgxlock_migrations set version = %d, dirty = false", newest+1))
	for _, file := range append(upFiles, downFiles...) {
		if err := psql(t, db.URL, "-f", file); err == nil || !strings.Contains(err.Error(), "later version") {
			t.Errorf("%s: %v", file, err)
		}
	}
	sameCatalog(t, catalog(t, db), want)
}

// A newer program's migrator is at it when an older program starts.
func TestUpWaitsForANewerMigrator(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	future, err := os.ReadFile("../testdata/future.sql")
	must(t, err)
	for have := range upFiles {
		db := atVersion(t, uint(have))
		tx, err := db.Pool.Begin(t.Context())
		must(t, err)
		for _, name := range upFiles[have:] {
			text, err := migrations.FS.ReadFile(name)
			must(t, err)
			_, err = tx.Exec(t.Context(), string(text))
			must(t, err)
		}
		_, err = tx.Exec(t.Context(), string(future))
		must(t, err)
		done := make(chan error, 1)
		go func() { done <- migrations.Up(t.Context(), db.Pool, nil) }()
		pgtest.Until(t, "Up waits, or ends", func() bool {
			return len(done) > 0 || ask[bool](t, db.Pool, "select exists (select from pg_locks where not granted and database = (select oid from pg_database where datname = current_database()))")
		})
		must(t, tx.Commit(t.Context()))
		err = <-done
		if lockTimeout(err) { // this machine let it wait for as long as it does
			err = migrations.Up(t.Context(), db.Pool, nil)
		}
		if err != nil {
			t.Errorf("from version %d: %v", have, err)
		}
		expect(t, db.Pool, int(newest)+1, "select pgxlock_version()::int")
	}
}

// All that changes the schema or its rights excludes each other by one lock, which carries the
// mark of pgxlock's own: nobody is to be evicted from it.
func TestSchemaChangesHoldTheSameInternalLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	tx, err := db.Pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	const key = "pgxlock_own_key(false, decode('00', 'hex') || 'migrate' || decode('00', 'hex') || 'public')"
	change := func(what, sql string) {
		t.Helper()
		_, err := tx.Exec(t.Context(), sql)
		must(t, err)
		var holds, marked bool // the repair of tokens takes a second one
		must(t, tx.QueryRow(t.Context(), `select bool_or(k.space = 1 and k.number = `+key+`), bool_and(pgxlock_is_own_key(k.space, k.number))
			from pg_locks, lateral (select objsubid::int, classid::bigint << 32 | objid::bigint) k (space, number) where locktype = 'advisory' and pid = pg_backend_pid()`).Scan(&holds, &marked))
		if !holds || !marked {
			t.Errorf("%s: it holds the lock: %v; only locks of pgxlock's own: %v", what, holds, marked)
		}
	}
	for _, name := range upFiles {
		text, err := migrations.FS.ReadFile(name)
		must(t, err)
		change(name, string(text))
	}

	// Up takes it before it looks at anything.
	done := make(chan error, 1)
	go func() { done <- migrations.Up(t.Context(), db.Pool, nil) }()
	pid := int32(0)
	pgtest.Until(t, "Up waits", func() bool {
		pid = ask[int32](t, db.Pool, "select coalesce(min(pid), 0) from pg_stat_activity where wait_event = 'advisory' and datname = current_database()")
		return pid != 0
	})
	// Only now: the view reads a backend's statement before it reads what the backend waits for.
	if waits := ask[string](t, db.Pool, "select query from pg_stat_activity where pid = $1", pid); !strings.HasPrefix(waits, "-- Waits for golang-migrate's command") {
		t.Errorf("Up waits in %.60s", waits)
	}
	must(t, tx.Commit(t.Context()))
	must(t, <-done)

	tx, err = db.Pool.Begin(t.Context())
	must(t, err)
	change("soften_locks", "select soften_locks()")
	expect(t, db.Pool, 0, "select count(*)::int from lock_holders where kind = 'advisory'")
	must(t, tx.Rollback(t.Context()))
}
