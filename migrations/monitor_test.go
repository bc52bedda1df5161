package migrations_test

import (
	"testing"

	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The monitor knows what golang-migrate locks, no matter who runs it.
func TestTheMonitorKnowsTheLockOfGolangMigrate(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	must(t, migrations.Up(t.Context(), db.Pool, nil))
	driver, err := new(migratepgx.Postgres).Open(migrateURL(db.URL, "schema_migrations"))
	must(t, err)
	must(t, driver.Lock())
	monitor, err := pgxlock.NewMonitor(db.Pool, nil)
	must(t, err)
	shot, err := monitor.Snapshot(t.Context())
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
