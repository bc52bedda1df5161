package golangmigrate_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/golang-migrate/migrate/v4/database"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/adapters/golangmigrate"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
)

// After a file that fails, golang-migrate reads none of those that it has prefetched: the
// goroutine that buffers each of them waits for a reader for good.
func TestMain(m *testing.M) {
	pgtest.Main(m, "github.com/golang-migrate/migrate/v4.(*Migration).Buffer")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// installed fails the test unless that version is, and nothing of it is marked dirty.
func installed(t *testing.T, pool *pgxpool.Pool, want uint) {
	t.Helper()
	status, err := migrations.Version(t.Context(), pool, nil)
	must(t, err)
	var marks string
	must(t, pool.QueryRow(t.Context(), "select coalesce(string_agg(version || ' ' || dirty, ', '), '') from pgxlock_migrations").Scan(&marks))
	wanted := fmt.Sprint(want, " false")
	if want == 0 {
		wanted = ""
	}
	if status.Installed != want || marks != wanted {
		t.Errorf("version %d is installed, and marked %q; want %d", status.Installed, marks, want)
	}
}

// newest is the newest version.
func newest(t *testing.T, pool *pgxpool.Pool) uint {
	t.Helper()
	status, err := migrations.Version(t.Context(), pool, nil)
	must(t, err)
	return status.Newest
}

func TestUpAndMigrationsUpSeeWhatTheOtherInstalled(t *testing.T) {
	t.Parallel()
	ours := func(ctx context.Context, pool *pgxpool.Pool) error { return migrations.Up(ctx, pool, nil) }
	for name, ups := range map[string][]func(context.Context, *pgxpool.Pool) error{
		"Up first":            {golangmigrate.Up, golangmigrate.Up, ours, golangmigrate.Up},
		"migrations.Up first": {ours, golangmigrate.Up, ours},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			for _, up := range ups {
				must(t, up(t.Context(), db.Pool))
				installed(t, db.Pool, newest(t, db.Pool))
			}
			db.Exec(t, "select acquire_lock('k', 'a', 600)")
			m, err := golangmigrate.New(t.Context(), db.Pool)
			must(t, err)
			if err := m.Down(); err == nil || !strings.Contains(err.Error(), "live leases") {
				t.Errorf("down with a live lease: %v", err)
			}
			must(t, migrations.Repair(t.Context(), db.Pool, nil)) // golang-migrate left its mark
			db.Exec(t, "select release_lock('k', 'a')")
			must(t, m.Down())
			installed(t, db.Pool, 0)
			sourceErr, databaseErr := m.Close()
			must(t, errors.Join(sourceErr, databaseErr))
			must(t, golangmigrate.Up(t.Context(), db.Pool)) // the pool is open still
			installed(t, db.Pool, newest(t, db.Pool))
		})
	}
}

// A file that migrations.Up could not run leaves no mark in golang-migrate's way.
func TestUpGoesOnAfterAMigrationsUpThatFailed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "create function soften_locks() returns text language sql as $$ select ''::text $$")
	const says = "cannot change return type of existing function"
	if err := migrations.Up(t.Context(), db.Pool, nil); err == nil || !strings.Contains(err.Error(), says) {
		t.Fatalf("migrations.Up: %v", err)
	}
	if err := golangmigrate.Up(t.Context(), db.Pool); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("Up: %v", err)
	}
	db.Exec(t, "drop function soften_locks()")
	must(t, migrations.Repair(t.Context(), db.Pool, nil))
	must(t, golangmigrate.Up(t.Context(), db.Pool))
	installed(t, db.Pool, newest(t, db.Pool))
}

func TestUpThatCannotMakeItsVersionTableKeepsNoConnection(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "create type pgxlock_migrations as enum ('in the way')")
	if err := golangmigrate.Up(t.Context(), db.Pool); err == nil || !strings.Contains(err.Error(), "pgxlock_migrations") {
		t.Errorf("Up: %v", err)
	}
	if taken := db.Pool.Stat().AcquiredConns(); taken != 0 {
		t.Errorf("%d connections of the pool are taken", taken)
	}
}

func TestUpWithoutAPoolOrTimeChangesNothing(t *testing.T) {
	t.Parallel()
	if err := golangmigrate.Up(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "the pool is nil") {
		t.Errorf("without a pool: %v", err)
	}
	db := pgtest.New(t)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := golangmigrate.Up(cancelled, db.Pool); !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: %v", err)
	}
	var there bool
	must(t, db.Pool.QueryRow(t.Context(), "select to_regclass('pgxlock_migrations') is not null").Scan(&there))
	if there {
		t.Error("there is a version table")
	}
}

func TestKeyOfMigratorsIsGolangMigratesOwn(t *testing.T) {
	t.Parallel()
	for _, of := range [][3]string{{"app", "public", "schema_migrations"}, {"/app", "A \"b\", c", migrations.Table}, {"", "", ""}} {
		want, err := database.GenerateAdvisoryLockId(of[0], of[1], of[2])
		must(t, err)
		if got := fmt.Sprint(lockkey.OfMigrators(of[0], of[1], of[2])); got != want {
			t.Errorf("%q: %s, want %s", of, got, want)
		}
	}
}

// driver is golang-migrate's, by a connection string, as its command has it.
func driver(t *testing.T, db *pgtest.DB, table string) database.Driver {
	t.Helper()
	_, rest, _ := strings.Cut(db.URL, "://")
	separator := "?"
	if strings.Contains(rest, "?") {
		separator = "&"
	}
	d, err := new(migratepgx.Postgres).Open("pgx5://" + rest + separator + "x-migrations-table=" + table)
	must(t, err)
	return d
}

// The monitor knows what golang-migrate locks, no matter who runs it.
func TestMonitorKnowsTheLockOfGolangMigrate(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	driver := driver(t, db, "schema_migrations")
	must(t, driver.Lock())
	locks, err := monitor.New(db.Pool, nil)
	must(t, err)
	shot, err := locks.Snapshot(t.Context())
	must(t, err)
	labels := ""
	for _, h := range shot.Holders {
		labels += h.Label
	}
	if labels != `golang-migrate, with table "public"."schema_migrations"` {
		t.Errorf("%q: %+v", labels, shot.Holders)
	}
	must(t, driver.Unlock())
	must(t, driver.Close())
}

// migrations.Up takes the lock of golang-migrate's command, whose key its library makes in
// another way.
func TestUpWaitsForGolangMigratesCommand(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	driver := driver(t, db, migrations.Table)
	must(t, driver.Lock())
	done := make(chan error, 1)
	go func() { done <- migrations.Up(t.Context(), db.Pool, nil) }()
	pgtest.Until(t, "Up waits", func() (waits bool) {
		select {
		case err := <-done:
			t.Fatalf("Up did not wait: %v", err)
		default:
		}
		must(t, db.Pool.QueryRow(t.Context(), "select exists (select from pg_stat_activity where wait_event = 'advisory' and datname = current_database())").Scan(&waits))
		return waits
	})
	must(t, driver.Unlock())
	must(t, <-done)
	must(t, driver.Close())
}
