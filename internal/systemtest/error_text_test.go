package systemtest_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// wantOneLine checks that the text fits into one line of a log.
func wantOneLine(t *testing.T, err error, words ...string) {
	t.Helper()
	e, ok := errors.AsType[*pgxlock.Error](err)
	if !ok {
		t.Errorf("%v is no *Error", err)
		return
	}
	text := e.Error()
	if strings.ContainsAny(text, "\n\r\v\f\u0085\u2028\u2029") {
		t.Errorf("more than one line: %q", text)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%q does not say %q", text, word)
		}
	}
}

func TestTextOfAnErrorIsOneLine(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const breaks = "one\ntwo\r\nthree\vfour\ffive\u0085six\u2028seven\u2029eight"
	for _, err := range []error{
		&pgxlock.Error{Op: "acquire", Kind: pgxlock.KindLease, Key: breaks, Err: pgxlock.ErrNotAcquired},
		&pgxlock.Error{Op: "acquire", Kind: pgxlock.KindLease, Key: "k", Holder: breaks, RetryAfter: time.Second, Err: pgxlock.ErrNotAcquired},
		&pgxlock.Error{Op: "acquire", Kind: pgxlock.KindLease, Key: "k", Err: &pgconn.PgError{Severity: "ERROR", Code: "P0001", Message: breaks}},
		&pgxlock.Error{Op: "renew", Kind: pgxlock.KindLease, Err: errors.Join(errors.New(breaks), errors.New(breaks))},
		&pgxlock.Error{Op: "renew", Kind: pgxlock.KindLease, Err: &pgxlock.Error{Op: "hold", Key: breaks, Holder: breaks, Err: errors.New(breaks)}},
	} {
		wantOneLine(t, err)
	}

	db := testkit.Migrated(t)
	const owner, key = "first line\nsecond line", "upper\nlower"
	testkit.Acquire(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: owner}), key)
	others := testkit.NewLocker(t, db, nil)
	_, err := others.TryAcquire(t.Context(), key)
	wantOneLine(t, err, "first line second line", `"upper\nlower"`)
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("a held lease: %v", err)
	}
	db.Exec(t, `create function refuse() returns trigger language plpgsql as $$ begin
		raise exception E'not\nhere';
	end $$`)
	db.Exec(t, "create trigger refuse before insert on distributed_locks for each row execute function refuse()")
	_, err = others.TryAcquire(t.Context(), "other")
	wantOneLine(t, err, "not here")
}
