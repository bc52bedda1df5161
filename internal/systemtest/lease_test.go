package systemtest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What SQL wrote need not be a lease of this package.
func TestHolderOfALeaseWithoutExpiryHasNoTimes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, nil)
	for range 2 { // before and when it is known that leases can be shared
		db.Exec(t, `insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at) values ('closed', 'ops', '-infinity', 'infinity')
			on conflict do nothing`)
		found, err := locks.Holders(t.Context(), "closed")
		if err != nil || len(found) != 1 || found[0].ID != "ops" || !found[0].Since.IsZero() || !found[0].Expires.IsZero() {
			t.Fatalf("%+v, %v", found, err)
		}
		lock, err := locks.TryAcquire(t.Context(), "other", pgxlock.Shared)
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestLeaseIsHeldFencedAndReleased(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks, others := testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, nil)
	lock, err := locks.Acquire(t.Context(), "order:42", pgxlock.Metadata("pod-7"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = others.TryAcquire(t.Context(), "order:42")
	busy, ok := errors.AsType[*pgxlock.Error](err)
	if !ok || !errors.Is(err, pgxlock.ErrNotAcquired) || busy.Holder != lock.Holder() || busy.RetryAfter <= 0 {
		t.Fatalf("a held lease: %v", err)
	}
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return lock.Fence(t.Context(), tx) })
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := lock.Context(t.Context())
	defer cancel()
	if err := lock.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(lock.Err(), pgxlock.ErrReleased) || !errors.Is(context.Cause(ctx), pgxlock.ErrReleased) || ctx.Err() == nil {
		t.Fatalf("after release: %v, %v, %v", lock.Err(), context.Cause(ctx), ctx.Err())
	}
	next, err := others.Acquire(t.Context(), "order:42", pgxlock.MaxWait(pgtest.Patience))
	if err != nil {
		t.Fatal(err)
	}
	if next.Token() <= lock.Token() {
		t.Fatalf("token %d after %d", next.Token(), lock.Token())
	}
}

func TestServerTakesTheLongestTTL(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	const longest = 100 * 360 * 24 * time.Hour // PostgreSQL counts 360 days to a year
	for name, cfg := range map[string]*pgxlock.LeaseConfig{"of the lock": nil, "of the Locker": {TTL: longest}} {
		locks, err := pgxlock.NewLeaseLocker(db.Pool, cfg)
		if err != nil {
			t.Fatal(err)
		}
		lock, err := locks.Acquire(t.Context(), name, pgxlock.TTL(longest))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
