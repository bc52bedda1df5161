package testkit

import (
	"context"
	"errors"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// Sharing returns the holders that share a lease now, as the server knows them.
func Sharing(t *testing.T, db *pgtest.DB, key string) []string {
	t.Helper()
	return Query[[]string](t, db, "select array(select holder_id::text from lock_shares where lock_name = $1 and state = 'live' order by acquired_at)", key)
}

// WantNoShare fails the test if any kind of shared try is granted the lock.
func WantNoShare(t *testing.T, who string, locks *pgxlock.Locker, key string) {
	t.Helper()
	refused := func(call string, lock *pgxlock.Lock, err error) {
		t.Helper()
		if !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%s: %s passes a writer that waits: %v", who, call, err)
		}
		if lock != nil {
			Release(t, lock)
		}
	}
	lock, err := locks.TryAcquire(t.Context(), key, pgxlock.Shared)
	refused("TryAcquire", lock, err)
	lock, err = locks.Acquire(t.Context(), key, pgxlock.Shared, pgxlock.NoWait)
	refused("Acquire with NoWait", lock, err)
	ran, err := locks.TryDo(t.Context(), key, func(context.Context, *pgxlock.Lock) error { return nil }, pgxlock.Shared)
	if ran || err != nil {
		t.Errorf("%s: TryDo passes a writer that waits: %t, %v", who, ran, err)
	}
	all, err := locks.AcquireAll(t.Context(), []string{"a free key", key, "z free key"}, pgxlock.Shared, pgxlock.NoWait)
	refused("AcquireAll with NoWait", nil, err)
	if e, ok := errors.AsType[*pgxlock.Error](err); ok && e.Key != key {
		t.Errorf("%s: AcquireAll names %q", who, e.Key)
	}
	if err := all.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// WantShare fails the test unless a shared try is granted the lock, which it then releases.
func WantShare(t *testing.T, locks *pgxlock.Locker, key string) {
	t.Helper()
	lock, err := locks.TryAcquire(t.Context(), key, pgxlock.Shared)
	if err != nil {
		t.Errorf("no writer waits: %v", err)
		return
	}
	Release(t, lock)
}
