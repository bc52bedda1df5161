package systemtest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/doctor"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// Pgpool-II sends to a standby what only reads. Locks of the primary are not known there, and
// what the last holder wrote may not have arrived.

// behindBalancer runs the test behind Pgpool-II, with its defaults and with settings by which it
// balances more. What it may send to a standby goes to the standby. direct leads to the primary.
func behindBalancer(t *testing.T, test func(t *testing.T, defaults bool, direct, through *pgtest.DB)) {
	t.Helper()
	server, direct := privateServer(t, nil)
	standby := pgtest.Standby(t, server, pgserver.Config{})
	for name, settings := range map[string]map[string]string{
		"defaults":   nil,
		"comments":   {"allow_sql_comments": "on"}, // also a statement that begins with a comment is balanced
		"statements": {"allow_sql_comments": "on", "statement_level_load_balance": "on"},
	} {
		t.Run(name, func(t *testing.T) {
			url := pgtest.Balancer(t, server, standby, settings).URL("postgres")
			test(t, settings == nil, direct, &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"})
			untilOnlyHeld(t, direct)
		})
	}
}

// askedOnStandby is a query that only reads: true if a standby answers.
const askedOnStandby = "select current_setting('primary_conninfo') <> ''"

// wantPrimary checks that what the transaction reads comes from the primary.
func wantPrimary(ctx context.Context, t *testing.T, what string, tx pgx.Tx) error {
	t.Helper()
	var standby bool
	err := tx.QueryRow(ctx, askedOnStandby).Scan(&standby)
	if standby {
		t.Errorf("%s: the transaction reads from a standby, which may not have what the last holder wrote", what)
	}
	return err
}

func TestTransactionsBehindABalancerReadThePrimaryOnceTheyHaveALock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	behindBalancer(t, func(t *testing.T, _ bool, _, through *pgtest.DB) {
		ctx := t.Context()
		locks := testkit.NewLocker(t, through, nil)
		for _, mode := range []pgx.QueryExecMode{
			pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
		} {
			lock := testkit.Acquire(t, locks, mode.String())
			kinds := map[string]func(tx pgx.Tx) error{
				"LockTx":         func(tx pgx.Tx) error { return pgxlock.LockTx(ctx, tx, "k") },
				"LockTx, Shared": func(tx pgx.Tx) error { return pgxlock.LockTx(ctx, tx, "k", pgxlock.Shared) },
				"LockTx, bound":  func(tx pgx.Tx) error { return pgxlock.LockTx(ctx, tx, "k", testkit.LongWait) },
				"LockAllTx":      func(tx pgx.Tx) error { return pgxlock.LockAllTx(ctx, tx, []string{"k", "l"}) },
				"lock_tx":        func(tx pgx.Tx) error { _, err := tx.Exec(ctx, "select lock_tx('k')"); return err },
				"ClaimTx":        func(tx pgx.Tx) error { _, err := pgxlock.ClaimTx(ctx, tx, t.Name()+mode.String()); return err },
				"Fence":          func(tx pgx.Tx) error { return lock.Fence(ctx, tx) },
			}
			for _, name := range slices.Sorted(maps.Keys(kinds)) {
				pool := pgtest.Pool(t, through.URL, func(c *pgxpool.Config) { c.MaxConns, c.ConnConfig.DefaultQueryExecMode = 1, mode })
				var standby bool
				if err := pool.QueryRow(ctx, askedOnStandby).Scan(&standby); err != nil || !standby {
					t.Fatalf("%s: nothing is balanced, so that the test shows nothing: %v", mode, err)
				}
				for range 2 { // the second time all is prepared
					err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
						return errors.Join(kinds[name](tx), wantPrimary(ctx, t, fmt.Sprint(mode, ", ", name), tx))
					})
					if err != nil {
						t.Errorf("%s, %s: %v", mode, name, err)
					}
				}
				pool.Close()
			}
			testkit.Release(t, lock)
		}
	})
}

func TestLocksBehindABalancerAreThoseOfThePrimary(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	behindBalancer(t, func(t *testing.T, defaults bool, direct, through *pgtest.DB) {
		ctx := t.Context()
		if err := migrations.Up(ctx, through.Pool, nil); err != nil {
			t.Error(err)
		}
		findings, err := doctor.Check(ctx, through.Pool, nil)
		if i := slices.IndexFunc(findings, func(f doctor.Finding) bool { return f.Check == "primary" }); i < 0 || findings[i].Status != doctor.StatusOK || err != nil {
			t.Errorf("the doctor: %v, %v", findings, err)
		}

		locks, others := testkit.NewLocker(t, through, &pgxlock.LeaseConfig{Renew: 100 * time.Millisecond}), testkit.NewLocker(t, direct, nil)
		lease := testkit.Acquire(t, locks, "lease")
		testkit.WantBusy(t, others, "lease")
		if err := lease.Renew(ctx); err != nil {
			t.Error(err)
		}
		holders, err := locks.Holders(ctx, "lease")
		if len(holders) != 1 || err != nil {
			t.Errorf("%v, %v", holders, err)
		}
		err = locks.DoTx(ctx, through.Pool, "dotx", func(ctx context.Context, tx pgx.Tx, _ *pgxlock.Lock) error { return wantPrimary(ctx, t, "DoTx", tx) })
		if err != nil {
			t.Error(err)
		}
		led := errors.New("led")
		if err := locks.Lead(ctx, "leader", func(context.Context, *pgxlock.Lock) error { return led }); !errors.Is(err, led) {
			t.Error(err)
		}

		// The lock table of the primary, and the queues, are in what a Monitor reads.
		held := testkit.Acquire(t, testkit.NewAdvisory(t, direct, nil), "advisory")
		waits := testkit.Waits(t, others, "lease", testkit.LongWait)
		testkit.UntilQueued(t, direct, "lease", 1)
		mon := testkit.NewMonitor(t, through, &monitor.Config{Names: []string{"advisory"}})
		shot := testkit.Snapshot(t, mon)
		if len(testkit.HoldersOf(shot, "lease")) != 1 || len(testkit.HoldersOf(shot, "advisory")) != 1 || len(testkit.WaitersFor(shot, "lease")) != 1 || len(shot.Missing) > 0 {
			t.Errorf("%+v", shot)
		}
		for _, lock := range []*pgxlock.Lock{held, lease} {
			if !evict(t, mon, holder(t, mon, lock.Key())) {
				t.Errorf("%s: it was not the holder", lock.Key())
			}
			wantEvicted(t, lock)
		}
		testkit.Release(t, pgtest.Receive(t, "the waiter has the lease", waits))

		handle, err := sql.Open("pgx", through.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer handle.Close()
		tx, err := handle.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = pgxlock.LockSQLTx(ctx, tx, "sql")
		testkit.WantFree(t, direct, "sql", false)
		if err := errors.Join(err, tx.Rollback()); err != nil {
			t.Error(err)
		}

		runner, err := once.New(through.Pool, time.Hour, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []bool{true, false} {
			if ran, err := runner.Do(ctx, t.Name(), func(context.Context, once.Run) error { return nil }); ran != want || err != nil {
				t.Errorf("run: %t, want %t: %v", ran, want, err)
			}
		}
		limiter, err := ratelimit.New(through.Pool, hourly, 1, nil)
		if err != nil {
			t.Fatal(err)
		}
		allows(t, limiter, t.Name(), 1, true, false)
		if err := errors.Join(runner.Close(ctx), limiter.Close(ctx)); err != nil {
			t.Error(err)
		}
		if _, err := pgxlock.PurgeClaims(ctx, through.Pool, time.Hour); err != nil {
			t.Error(err)
		}

		// A lock session is refused where its statements do not all reach one backend.
		_, err = testkit.NewAdvisory(t, through, nil).TryAcquire(ctx, "session")
		if !errors.Is(err, pgxlock.ErrPooler) {
			t.Errorf("%v, want ErrPooler", err)
		}
		for _, tokens := range []bool{false, true} {
			lock, err := testkit.NewAdvisory(t, through, &pgxlock.AdvisoryConfig{SessionPooler: true, Tokens: tokens}).TryAcquire(ctx, "session")
			switch {
			case err == nil:
				testkit.WantFree(t, direct, "session", false)
				testkit.Release(t, lock)
			case defaults || !errors.Is(err, pgxlock.ErrPooler):
				t.Error(err)
			}
		}
	})
}
