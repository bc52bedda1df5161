package systemtest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// What tests of advisory locks have in common.

// wantLost checks that a lock is lost in every respect, and for good.
func wantLost(t *testing.T, lock *pgxlock.Lock) {
	t.Helper()
	pgtest.Receive(t, lock.Key()+" is lost", lock.Lost())
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
