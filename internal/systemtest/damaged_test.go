package systemtest_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// damages are what somebody may drop beside what locks need.
var damages = map[string]string{
	"every table": `do $$ declare t text; begin
		for t in select tablename from pg_tables where schemaname = 'public' loop execute 'drop table if exists ' || t || ' cascade'; end loop; end $$`, // as golang-migrate's drop does
	"the table of tickets":  "drop table pgxlock_waiters cascade",
	"the table of leases":   "drop table distributed_locks cascade",
	"the sequence":          "drop sequence pgxlock_tokens cascade",
	"a function":            "drop function pgxlock_next_tokens(bigint) cascade",
	"the table of sessions": "drop table pgxlock_advisory_locks cascade",
}

func TestEveryCallOnADamagedSchemaSaysErrSchemaAndUpMendsIt(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			leases, sessions := testkit.NewLocker(t, db, nil), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true})
			for _, locks := range []*pgxlock.Locker{leases, sessions} {
				testkit.Release(t, testkit.Acquire(t, locks, "k"))
			}
			db.Exec(t, damage)
			calls := map[string]func(ctx context.Context) error{
				"lease":         func(ctx context.Context) error { return acquireAndRelease(ctx, leases.TryAcquire, "k") },
				"wait":          func(ctx context.Context) error { return acquireAndRelease(ctx, leases.Acquire, "k") },
				"advisory":      func(ctx context.Context) error { return acquireAndRelease(ctx, sessions.TryAcquire, "k") },
				"advisory wait": func(ctx context.Context) error { return acquireAndRelease(ctx, sessions.Acquire, "k") },
				"a fresh Locker": func(ctx context.Context) error {
					return acquireAndRelease(ctx, testkit.NewLocker(t, db, nil).TryAcquire, "k")
				},
				"shared": func(ctx context.Context) error {
					return acquireAndRelease[pgxlock.AcquireOption](ctx, leases.TryAcquire, "s", pgxlock.Shared)
				},
			}
			failed := 0
			for call, do := range calls {
				ctx, cancel := context.WithTimeout(t.Context(), pgtest.Patience)
				err := do(ctx)
				cancel()
				if err == nil {
					continue // it needs nothing of what is gone
				}
				failed++
				if !errors.Is(err, pgxlock.ErrSchema) || !strings.Contains(err.Error(), "pgxlock migrate up") {
					t.Errorf("%s: %v", call, err)
				}
			}
			if failed == 0 {
				t.Error("nothing failed")
			}
			if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
				t.Fatal(err)
			}
			for call, do := range calls {
				if err := do(t.Context()); err != nil {
					t.Errorf("%s, after Up: %v", call, err)
				}
			}
		})
	}
}

// acquireAndRelease acquires a lock and releases it.
func acquireAndRelease[O any](ctx context.Context, acquire func(context.Context, string, ...O) (*pgxlock.Lock, error), key string, opts ...O) error {
	lock, err := acquire(ctx, key, opts...)
	if err != nil {
		return err
	}
	return lock.Release(ctx)
}
