package pgxlock_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// What tests of advisory locks have in common.

func advisory(t *testing.T, pool *pgxpool.Pool, cfg *pgxlock.AdvisoryConfig) *pgxlock.Locker {
	t.Helper()
	locks, err := pgxlock.NewAdvisory(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

// newAdvisory returns a Locker that is closed when the test is over.
func newAdvisory(t *testing.T, db *pgtest.DB, cfg *pgxlock.AdvisoryConfig) *pgxlock.Locker {
	t.Helper()
	locks := advisory(t, db.Pool, cfg)
	t.Cleanup(func() {
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return locks
}

// sqlKey is a key as the arguments of PostgreSQL's functions.
func sqlKey(key string) string {
	if raw, ok := strings.CutPrefix(key, "\x00#"); ok && strings.Contains(raw, ",") {
		return raw
	}
	return strconv.FormatInt(pgxlock.AdvisoryID(key), 10)
}

// heldBy returns how many advisory locks the sessions of that owner have, without
// the one that each has for itself.
func heldBy(t *testing.T, db *pgtest.DB, owner string) int {
	t.Helper()
	return query[int](t, db, `select coalesce(sum(n - 1), 0) from (select count(*) as n from pg_locks l join pg_stat_activity a using (pid)
		where locktype = 'advisory' and granted and a.datname = current_database() and application_name = 'pgxlock ' || $1 group by pid) x`, owner)
}

// useAdvisory acquires, renews and releases, and asks the server on the way who has
// the lock.
func useAdvisory(t *testing.T, locks *pgxlock.Locker, db *pgtest.DB, key string) {
	t.Helper()
	for _, mode := range []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared} {
		lock := acquire(t, locks, key, mode)
		if err := lock.Renew(t.Context()); err != nil {
			t.Errorf("Renew: %v", err)
		}
		wantFree(t, db, key, false)
		if found, err := locks.Holders(t.Context(), key); err != nil || len(found) != 1 || found[0].Owner != lock.Holder() || found[0].Mode != mode {
			t.Errorf("Holders: %+v, %v", found, err)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Errorf("Release: %v", err)
		}
		wantFree(t, db, key, true)
	}
	all, err := locks.AcquireAll(t.Context(), []string{key, "another", pgxlock.RawKey2(1, 2)}, pgxlock.NoWait)
	if err != nil {
		t.Errorf("AcquireAll: %v", err)
	}
	if err := all.Release(t.Context()); err != nil {
		t.Errorf("Release of all: %v", err)
	}
}

// wantLost checks that a lock is lost in every respect, and for good.
func wantLost(t *testing.T, lock *pgxlock.Lock) {
	t.Helper()
	select {
	case <-lock.Lost():
	case <-time.After(30 * time.Second):
		t.Errorf("%s: Lost has not fired", lock.Key())
	}
	work, cancel := lock.Context(t.Context())
	defer cancel()
	for what, err := range map[string]error{
		"Err": lock.Err(), "Renew": lock.Renew(t.Context()), "Release": lock.Release(t.Context()),
		"a second Release": lock.Release(t.Context()), "a context's cause": context.Cause(work),
	} {
		if !errors.Is(err, pgxlock.ErrLost) || errors.Is(err, pgxlock.ErrReleased) {
			t.Errorf("%s: %s: %v, want ErrLost", lock.Key(), what, err)
		}
		wantOneLine(t, err)
	}
	if work.Err() == nil {
		t.Errorf("%s: its context goes on", lock.Key())
	}
}

// wantSQLState checks that the server said that.
func wantSQLState(t *testing.T, err error, state string) {
	t.Helper()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != state {
		t.Errorf("%v, want SQLSTATE %s", err, state)
	}
}
