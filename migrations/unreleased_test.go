package migrations_test

import (
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// The set of files before the first release had a function of this name, and recorded a
// later version than there is now.
func TestDatabaseFromBeforeTheFirstReleaseIsRefusedAndLeftAlone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `
		create table distributed_locks (lock_name varchar(255) primary key, holder_id varchar(255) not null, acquired_at timestamptz not null default now(),
			expires_at timestamptz not null, metadata jsonb default '{}', fencing_token bigint not null default 0);
		create table pgxlock_epoch (singleton boolean primary key);
		create table pgxlock_migrations (version bigint primary key, dirty boolean not null);
		create function pgxlock_schema_version() returns bigint language sql immutable return 9::bigint;
		insert into distributed_locks values ('k', 'A', now(), now() + interval '1 hour'); insert into pgxlock_migrations values (9, false)`)
	before := catalog(t, db)
	_, versionErr := migrations.Version(t.Context(), db.Pool, nil)
	errs := map[string]error{
		"Up":      migrations.Up(t.Context(), db.Pool, nil),
		"Down":    migrations.Down(t.Context(), db.Pool, &migrations.Config{Force: true}),
		"Repair":  migrations.Repair(t.Context(), db.Pool, nil),
		"Version": versionErr,
		"psql":    psql(t, db.URL, "-f", upFiles[0]),
	}
	for name, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "from before its first release, which cannot be upgraded") || !strings.Contains(err.Error(), "emove it with the program") {
			t.Errorf("%s: %v", name, err)
		}
	}
	sameCatalog(t, catalog(t, db), before)
	expect(t, db.Pool, "A 9", "select string_agg(holder_id || ' ' || version, ',') from distributed_locks, pgxlock_migrations")
}
