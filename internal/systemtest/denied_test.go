package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// denials are connections that the server refuses for good: how, and the words of the remedy.
var denials = map[string]struct {
	configure   func(*pgx.ConnConfig)
	state, word string
}{
	"a wrong password":     {func(c *pgx.ConnConfig) { c.Password = "guess" }, "28P01", "password"},
	"a user without LOGIN": {func(c *pgx.ConnConfig) { c.User = "denied_login" }, "28000", "user"},
	"a missing database":   {func(c *pgx.ConnConfig) { c.Database = "there_is_none" }, "3D000", "database"},
	"a missing right":      {func(c *pgx.ConnConfig) { c.User = "denied_connect" }, "42501", "GRANT CONNECT"},
	"an unknown setting":   {func(c *pgx.ConnConfig) { c.RuntimeParams["no_such_setting"] = "1" }, "42704", "connection string"},
	"a fixed setting":      {func(c *pgx.ConnConfig) { c.RuntimeParams["ssl_min_protocol_version"] = "TLSv1.2" }, "55P02", "connection string"},
}

// deniedOn returns the database, connected to so that the server refuses it.
func deniedOn(t *testing.T, db *pgtest.DB, configure func(*pgx.ConnConfig)) *pgtest.DB {
	t.Helper()
	pool := db.NewPool(t, func(c *pgxpool.Config) { configure(c.ConnConfig) })
	return &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

// withPasswords returns a server of the test's own, with pgxlock, that asks for passwords.
func withPasswords(t *testing.T) *pgtest.DB {
	t.Helper()
	url := pgtest.Private(t, pgserver.Config{TCP: true}).TCPURL("postgres")
	db := &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	return db
}

func TestDeniedConnectionIsNamedAndNotUnavailable(t *testing.T) {
	t.Parallel()
	var db *pgtest.DB
	if testing.Short() {
		db = testkit.Migrated(t)
	} else {
		db = withPasswords(t)
		password := db.Pool.Config().ConnConfig.Password
		db.Exec(t, fmt.Sprintf("create role denied_login nologin password '%s'; create role denied_connect login password '%s'", password, password))
		db.Exec(t, "revoke connect on database postgres from public")
	}
	for name, denial := range denials {
		if name != "a missing database" && testing.Short() {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := deniedOn(t, db, denial.configure)
			leases, sessions, monitor := testkit.NewLocker(t, db, nil), testkit.NewAdvisory(t, db, nil), testkit.NewMonitor(t, db, nil)
			limiter, err := ratelimit.New(db.Pool, hourly, 3, nil)
			if err != nil {
				t.Fatal(err)
			}
			runner, err := once.New(db.Pool, time.Hour, nil)
			if err != nil {
				t.Fatal(err)
			}
			nothing := func(context.Context, *pgxlock.Lock) error { return nil }
			for what, call := range map[string]func() error{
				"a lease":      func() error { _, err := leases.Acquire(t.Context(), "k"); return err },
				"its try":      func() error { _, err := leases.TryAcquire(t.Context(), "k"); return err },
				"its leader":   func() error { return leases.Lead(t.Context(), "k", nothing) },
				"a session":    func() error { _, err := sessions.Acquire(t.Context(), "k"); return err },
				"its TryDo":    func() error { _, err := sessions.TryDo(t.Context(), "k", nothing); return err },
				"its leader 2": func() error { return sessions.Lead(t.Context(), "k", nothing) },
				"a limit":      func() error { _, err := limiter.Allow(t.Context(), "k"); return err },
				"a run": func() error {
					_, err := runner.Do(t.Context(), "k", func(context.Context, once.Run) error { return nil })
					return err
				},
				"runs": func() error {
					return runner.Run(t.Context(), "k", func(context.Context, once.Run) error { return nil })
				},
				"a purge":     func() error { _, err := pgxlock.PurgeClaims(t.Context(), db.Pool, time.Hour); return err },
				"a snapshot":  func() error { _, err := monitor.Snapshot(t.Context()); return err },
				"a diagnosis": func() error { _, err := doctor.Check(t.Context(), db.Pool, nil); return err },
			} {
				err := call()
				pgErr, ok := errors.AsType[*pgconn.PgError](err)
				if !ok || pgErr.Code != denial.state || errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, pgxlock.ErrNotAcquired) {
					t.Errorf("%s: %v, want SQLSTATE %s and no ErrUnavailable", what, err, denial.state)
				} else if advice := strings.SplitN(err.Error(), ";", 2); len(advice) != 2 || !strings.Contains(advice[1], denial.word) {
					t.Errorf("%s: %v does not say what to do about the %s", what, err, denial.word)
				}
			}
			if err := errors.Join(limiter.Close(t.Context()), runner.Close(t.Context())); err != nil {
				t.Error(err)
			}
		})
	}
}

// Credentials that stop being right do not let a wait go on for ever.
func TestDeniedConnectionEndsAWaitAtOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := withPasswords(t)
	type observer = func(context.Context, pgxlock.Event)
	for kind, newOne := range map[string]func(*testing.T, *pgtest.DB, observer) *pgxlock.Locker{
		"lease": func(t *testing.T, db *pgtest.DB, observe observer) *pgxlock.Locker {
			return testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Observe: observe})
		},
		"advisory": func(t *testing.T, db *pgtest.DB, observe observer) *pgxlock.Locker {
			return testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Observe: observe})
		},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			role := "waits_" + kind
			db.Exec(t, fmt.Sprintf("create role %s superuser login password 'right'", role))
			held := testkit.Acquire(t, newOne(t, db, nil), "k")
			busy := make(chan struct{}, 100)
			locks := newOne(t, deniedOn(t, db, func(c *pgx.ConnConfig) { c.User, c.Password = role, "right" }), func(_ context.Context, e pgxlock.Event) {
				if e.Op == pgxlock.EventBusy {
					busy <- struct{}{}
				}
			})
			waits := acquireLater(t.Context(), locks, "k")
			<-busy
			db.Exec(t, fmt.Sprintf("alter role %s password 'changed'", role))
			db.Exec(t, "select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", role)
			got := pgtest.Receive(t, "the wait ends", waits)
			pgErr, ok := errors.AsType[*pgconn.PgError](got.err)
			if !ok || pgErr.Code != "28P01" || errors.Is(got.err, pgxlock.ErrUnavailable) || errors.Is(got.err, pgxlock.ErrNotAcquired) {
				t.Errorf("Acquire: %v", got.err)
			}
			testkit.Release(t, held)
		})
	}
}
