package systemtest_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// Whatever is asked of a server that is not there, the error says so, and nothing else.
func TestServerThatIsNotThereIsUnavailableToEveryCall(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, "postgres://me@127.0.0.1:1/db")
	db := &pgtest.DB{Pool: pool}
	limiter, err := ratelimit.New(pool, hourly, 3, nil)
	if err != nil {
		t.Fatal(err)
	}
	runner, err := once.New(pool, time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	leases, sessions, monitor := testkit.NewLocker(t, db, nil), testkit.NewAdvisory(t, db, nil), testkit.NewMonitor(t, db, nil)
	for what, call := range map[string]func(context.Context) error{
		"a lease": func(ctx context.Context) error { _, err := leases.TryAcquire(ctx, "k"); return err },
		"its wait": func(ctx context.Context) error {
			_, err := leases.Acquire(ctx, "k", testkit.LongWait)
			return err
		},
		"Holders":   func(ctx context.Context) error { _, err := leases.Holders(ctx, "k"); return err },
		"a session": func(ctx context.Context) error { _, err := sessions.TryAcquire(ctx, "k"); return err },
		"a limit":   func(ctx context.Context) error { _, err := limiter.Allow(ctx, "k"); return err },
		"a run": func(ctx context.Context) error {
			_, err := runner.Do(ctx, "k", func(context.Context, once.Run) error { return nil })
			return err
		},
		"a purge":    func(ctx context.Context) error { _, err := pgxlock.PurgeClaims(ctx, pool, time.Hour); return err },
		"a snapshot": func(ctx context.Context) error { _, err := monitor.Snapshot(ctx); return err },
		"reaping":    func(ctx context.Context) error { _, err := monitor.Reap(ctx, 0); return err },
		"evicting": func(ctx context.Context) error {
			_, err := monitor.Evict(ctx, pgxlock.Holder{Kind: pgxlock.KindLease, Key: "k", ID: "A", Token: 1}, "why")
			return err
		},
	} {
		if err := call(t.Context()); !errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, pgxlock.ErrNotAcquired) || errors.Is(err, pgxlock.ErrLost) || strings.Count(err.Error(), "cannot be reached") != 1 {
			t.Errorf("%s: %v", what, err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := call(ended); err == nil || errors.Is(err, pgxlock.ErrUnavailable) {
			t.Errorf("%s, of a caller who has left: %v", what, err)
		}
	}
	if err := errors.Join(limiter.Close(t.Context()), runner.Close(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestServerThatCrashedIsUnavailableUntilItIsBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	monitor := testkit.NewMonitor(t, &pgtest.DB{Pool: pgtest.Pool(t, db.URL, func(c *pgxpool.Config) { c.MaxConns = 1 })}, nil)
	testkit.Snapshot(t, monitor)
	terms, led := make(chan context.Context), make(chan error, 1)
	leader := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: 2 * time.Second})
	go func() {
		led <- leader.Lead(t.Context(), "leader", func(work context.Context, _ *pgxlock.Lock) error {
			select {
			case terms <- work:
			case <-work.Done():
			}
			<-work.Done()
			return context.Cause(work)
		})
	}()
	first := <-terms
	if err := server.Crash(); err != nil {
		t.Fatal(err)
	}
	<-first.Done() // the outage is longer than the TTL
	for range 2 {  // on the connection that broke, and on a new one
		if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("Renew: %v", err)
		}
		if _, err := monitor.Snapshot(t.Context()); !errors.Is(err, pgxlock.ErrUnavailable) {
			t.Errorf("Snapshot: %v", err)
		}
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "it is there again", func() bool { return lock.Renew(t.Context()) == nil })
	testkit.Release(t, lock)
	select {
	case <-terms:
	case err := <-led:
		t.Errorf("Lead has ended with the outage: %v", err)
	case <-time.After(pgtest.Patience):
		t.Error("nobody leads after the outage")
	}
}

// Maintenance may keep a table locked for longer than a statement waits for it.
func TestAcquireWaitsForALockedTable(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, nil)
	testkit.Acquire(t, locks, "warm")
	maintenance := testkit.Begin(t, db, pgx.TxOptions{})
	if _, err := maintenance.Exec(t.Context(), "lock table distributed_locks in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	acquired := make(chan error, 2)
	go func() {
		_, err := locks.Acquire(t.Context(), "one")
		acquired <- err
	}()
	go func() {
		_, err := locks.AcquireAll(t.Context(), []string{"two", "three"}, testkit.LongWait)
		acquired <- err
	}()
	for _, call := range []func(pgxlock.MaxWait) error{
		func(pgxlock.MaxWait) error { _, err := locks.TryAcquire(t.Context(), "try"); return err },
		func(wait pgxlock.MaxWait) error {
			_, err := testkit.NewLocker(t, db, nil).Acquire(t.Context(), "late", wait)
			return err
		},
	} {
		var err error
		var pgErr *pgconn.PgError
		for tries := 0; pgErr == nil && tries < 5; tries++ { // again where a busy machine ends the call before the server has said why
			if err = call(pgxlock.MaxWait(4 * time.Second << tries)); !errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, pgxlock.ErrDeadlock) {
				t.Fatalf("%v, want ErrUnavailable", err)
			}
			errors.As(err, &pgErr)
		}
		if pgErr == nil || pgErr.Code != "55P03" {
			t.Errorf("%v, want it because of a 55P03", err)
		}
	}
	if len(acquired) > 0 {
		t.Fatalf("a wait has ended: %v", <-acquired)
	}
	testkit.Rollback(t, maintenance)
	for range 2 {
		if err := pgtest.Receive(t, "a grant", acquired); err != nil {
			t.Error(err)
		}
	}
}
