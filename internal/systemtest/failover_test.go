package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// Between the end of a primary and the promotion of a standby there is no primary.
func TestFailoverIsUnavailableUntilAStandbyIsPromoted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	primary, db := privateServer(t, nil)
	standby := pgtest.Standby(t, primary, pgserver.Config{})
	pgtest.Until(t, "the standby has the migrations", func() bool {
		return testkit.Query[bool](t, testkit.On(t, "", standby), "select to_regprocedure('pgxlock_acquire_batch(text[], text[], bigint[], text[], bigint[])') is not null")
	})
	pgtest.Until(t, "all has reached it", func() bool {
		return testkit.Query[bool](t, db, "select coalesce(bool_and(replay_lsn >= pg_current_wal_lsn()), false) from pg_stat_replication")
	})
	if err := primary.Crash(); err != nil {
		t.Fatal(err)
	}

	both, alone := testkit.On(t, "", primary, standby), testkit.On(t, "", standby)
	for what, place := range map[string]struct {
		db      *pgtest.DB
		several bool
	}{
		"several hosts":            {both, true},
		"several hosts, any":       {testkit.On(t, "target_session_attrs=any", standby, primary), true},
		"one host":                 {alone, false},
		"one host, read-write":     {testkit.On(t, "target_session_attrs=read-write", standby), false},
		"one host, named twice":    {testkit.On(t, "", standby, standby), false},
		"several, read-write only": {testkit.On(t, "target_session_attrs=read-write", primary, standby), true},
	} {
		leases, sessions := testkit.NewLocker(t, place.db, nil), testkit.NewAdvisory(t, place.db, nil)
		limiter, err := ratelimit.New(place.db.Pool, hourly, 3, nil)
		if err != nil {
			t.Fatal(err)
		}
		runner, err := once.New(place.db.Pool, time.Hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		for name, call := range map[string]func() error{
			"a lease":   func() error { _, err := leases.Acquire(t.Context(), "k"); return err },
			"its try":   func() error { _, err := leases.TryAcquire(t.Context(), "k"); return err },
			"its keys":  func() error { _, err := leases.AcquireAll(t.Context(), []string{"k", "l"}); return err },
			"Holders":   func() error { _, err := leases.Holders(t.Context(), "k"); return err },
			"a session": func() error { _, err := sessions.Acquire(t.Context(), "k"); return err },
			"its a try": func() error { _, err := sessions.TryAcquire(t.Context(), "k"); return err },
			"a limit":   func() error { _, err := limiter.Allow(t.Context(), "k"); return err },
			"a run": func() error {
				_, err := runner.Do(t.Context(), "k", func(context.Context, once.Run) error { return nil })
				return err
			},
		} {
			err := call()
			if !errors.Is(err, pgxlock.ErrReadOnly) || errors.Is(err, pgxlock.ErrUnavailable) != place.several || errors.Is(err, pgxlock.ErrNotAcquired) || errors.Is(err, pgxlock.ErrLost) {
				t.Errorf("%s, %s: %v", what, name, err)
			}
		}
		findings, err := doctor.Check(t.Context(), place.db.Pool, nil)
		if unavailable := errors.Is(err, pgxlock.ErrUnavailable); unavailable != place.several || !unavailable && (err != nil || len(findings) != 1) {
			t.Errorf("%s, Doctor: %v, %v", what, findings, err)
		}
		if err := errors.Join(limiter.Close(t.Context()), runner.Close(t.Context())); err != nil {
			t.Error(err)
		}
	}

	leases, sessions := testkit.NewLocker(t, both, nil), testkit.NewAdvisory(t, both, nil)
	led := make(chan error, 2)
	for _, locks := range []*pgxlock.Locker{leases, sessions} {
		go func() {
			led <- locks.Lead(t.Context(), fmt.Sprint("leader ", locks.Kind()), func(context.Context, *pgxlock.Lock) error { return nil })
		}()
	}
	promote(t, standby)
	for range 2 {
		if err := <-led; err != nil {
			t.Errorf("a candidate does not outlast a failover: %v", err)
		}
	}
}
