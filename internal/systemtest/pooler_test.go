package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// behindPoolers runs the test behind each PgBouncer and each of its pool modes,
// with two connections to the server. What it was given to use must be clean
// afterwards: settings, prepared statements, listeners, locks. roleSettings are
// what the role is set to.
func behindPoolers(t *testing.T, roleSettings []string, test func(t *testing.T, mode string, pooler *pgserver.Pooler)) {
	t.Helper()
	server, db := privateServer(t, nil)
	for _, setting := range roleSettings {
		db.Exec(t, "alter role postgres set "+setting)
	}
	db.Exec(t, `alter table distributed_locks add check (lock_name <> 'bad')`)
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		test(t, mode, pooler)
		wantClean(t, mode, pooler, db)
		if log := server.LogTail(); strings.Contains(log, "WARNING") {
			t.Errorf("the server had to warn:\n%s", log)
		}
	})
}

// wantClean looks at the server's connections as somebody else who gets them next.
func wantClean(t *testing.T, mode string, pooler *pgserver.Pooler, db *pgtest.DB) {
	t.Helper()
	const look = `select coalesce(string_agg(name || ' = ' || setting, ', '), '')
	     || coalesce((select ' prepared: ' || string_agg(statement, ', ') from pg_prepared_statements where not starts_with(name, 'PGBOUNCER_')), '')
	     || coalesce((select ' listens: ' || string_agg(channel, ', ') from pg_listening_channels() channel), '')
	     || coalesce((select ' temporary: ' || string_agg(relname, ', ') from pg_class where relpersistence = 't'), '')
	   from pg_settings where source = 'session'
	    and name not in ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings') -- PgBouncer's own
	    and name not in ('transaction_isolation', 'transaction_read_only', 'transaction_deferrable')                  -- new in each transaction`
	seen := map[uint32]bool{}
	for range 2 { // each connection of the pool
		conn := pgtest.Connect(t, pooler.URL("postgres")+"&default_query_exec_mode=exec")
		var left string
		var pid uint32
		if mode != "statement" {
			if _, err := conn.Exec(t.Context(), "begin"); err != nil {
				t.Fatal(err)
			}
		}
		if err := conn.QueryRow(t.Context(), "select pg_backend_pid(), ("+look+"\n)").Scan(&pid, &left); err != nil {
			t.Fatal(err)
		}
		if seen[pid] = true; left != "" {
			t.Errorf("somebody else finds in backend %d: %s", pid, left)
		}
	}
	if mode != "statement" && len(seen) != 2 {
		t.Errorf("looked at %d connections, want both", len(seen))
	}
	// A connection that was closed without an answer may be at its last statement.
	pgtest.Until(t, "no advisory locks and no leases are left", func() bool {
		return testkit.Query[int](t, db, "select count(*) from pg_locks where locktype = 'advisory'") == 0 &&
			testkit.Query[int](t, db, "select count(*) from distributed_locks") == 0
	})
}

func TestLeasesWorkThroughAPoolerInEveryMode(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	// Were one of ours not made, this would show.
	hostile := []string{"default_transaction_read_only = on", "default_transaction_isolation = 'serializable'", "search_path = public, pg_temp"}
	behindPoolers(t, hostile, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		db := &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres")), URL: pooler.URL("postgres"), Name: "postgres"}
		instances := 2
		if mode == "session" {
			instances = 1 // which fills the pool
		}
		var lockers []*pgxlock.Locker
		for range instances {
			locks, err := pgxlock.NewLeaseLocker(db.Pool, &pgxlock.LeaseConfig{TTL: testkit.TTL, Renew: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			lockers = append(lockers, locks)
		}
		var inside [3]atomic.Int32
		var wg sync.WaitGroup
		for worker := range 6 {
			wg.Go(func() {
				for round := range 10 {
					n := (worker + round) % len(inside)
					lock, err := lockers[worker%len(lockers)].Acquire(t.Context(), fmt.Sprint("k", n))
					if err != nil {
						t.Error(err)
						return
					}
					if inside[n].Add(1) != 1 {
						t.Errorf("k%d is held twice", n)
					}
					inside[n].Add(-1)
					if err := lock.Release(t.Context()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()

		all, err := lockers[0].AcquireAll(t.Context(), []string{"a", "b", "c"}, pgxlock.Metadata("through a pooler"))
		if err != nil {
			t.Fatal(err)
		}
		granted, _ := all[0].Deadline()
		pgtest.Until(t, "it is renewed", func() bool {
			now, _ := all[0].Deadline()
			return now.Sub(granted) > 100*time.Millisecond // and not what two readings of the clock differ by
		})
		holders, err := lockers[0].Holders(t.Context(), "b")
		if err != nil || len(holders) != 1 || holders[0].Metadata != "through a pooler" {
			t.Errorf("%v, %v", holders, err)
		}
		if _, err := lockers[len(lockers)-1].TryAcquire(t.Context(), "c"); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Error(err)
		}
		if err := all.Release(t.Context()); err != nil {
			t.Error(err)
		}
		for _, locks := range lockers {
			if err := locks.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
		limiter, err := ratelimit.New(db.Pool, hourly, 3, nil)
		if err != nil {
			t.Fatal(err)
		}
		allows(t, limiter, t.Name(), 3, true, false)
		if err := reserves(t, limiter, t.Name(), 2, 2*time.Hour).Cancel(t.Context()); err != nil {
			t.Error(err)
		}
		reserves(t, limiter, t.Name(), 1, time.Hour)
		if err := limiter.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Where the pooler sees a transaction left open, in statement mode it hangs up.
func TestErrorLeavesNoTransactionOpenBehindAPooler(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	behindPoolers(t, nil, func(t *testing.T, _ string, pooler *pgserver.Pooler) {
		pool := pgtest.Pool(t, pooler.URL("postgres"))
		locks, err := pgxlock.NewLeaseLocker(pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			_, err := locks.Acquire(t.Context(), "bad")
			wantServerError(t, err, "23514")
			lock, err := locks.Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			if err := lock.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// In statement mode there are no transactions, so that there is nothing to lock in.
func TestLocksInTransactionsWorkThroughAPoolerThatKeepsTransactions(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	behindPoolers(t, nil, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		modes := []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeDescribeExec}
		var major, minor int
		_, _ = fmt.Sscanf(pooler.Version, "%d.%d", &major, &minor)
		if mode == "session" || minor >= 21 { // since then it knows prepared statements
			modes = append(modes, pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe)
		}
		if mode != "session" && minor < 21 {
			modes = modes[:2]
		}
		for _, exec := range modes {
			pool := pgtest.Pool(t, pooler.URL("postgres"), func(c *pgxpool.Config) {
				c.MaxConns = 8
				if mode == "session" {
					c.MaxConns = 2 // more would wait for each other
				}
				c.ConnConfig.DefaultQueryExecMode = exec
			})
			if mode == "statement" {
				err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return pgxlock.LockTx(t.Context(), tx, "k") })
				if err == nil || !strings.Contains(err.Error(), "not allowed in statement pooling mode") {
					t.Errorf("a lock in a transaction where there is none: %v", err)
				}
				pool.Close()
				continue
			}
			var inside, firsts atomic.Int32
			var wg sync.WaitGroup
			for worker := range 8 {
				wg.Go(func() {
					for round := range 5 {
						err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
							opts := [][]pgxlock.LockTxOption{nil, {testkit.LongWait}}[worker%2]
							if err := pgxlock.LockTx(t.Context(), tx, "k", opts...); err != nil {
								return err
							}
							if inside.Add(1) != 1 {
								t.Error("held twice")
							}
							defer inside.Add(-1)
							if err := pgxlock.LockAllTx(t.Context(), tx, []string{"a", "k"}, opts...); err != nil {
								return err
							}
							first, err := pgxlock.ClaimTx(t.Context(), tx, fmt.Sprint(mode, pooler.Version, exec, round), testkit.LongWait)
							if first {
								firsts.Add(1)
							}
							return err
						})
						if err != nil {
							t.Errorf("%s: %v", exec, err)
						}
					}
				})
			}
			wg.Wait()
			if firsts.Load() != 5 {
				t.Errorf("%s: %d of 5 keys were claimed, or claimed twice", exec, firsts.Load())
			}
			// A refused wait gives back what it changed, through a pooler as well.
			holder, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
			if err != nil {
				t.Fatal(err)
			}
			if err := pgxlock.LockTx(t.Context(), holder, "k"); err != nil {
				t.Fatal(err)
			}
			err = pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
				if err := pgxlock.LockTx(t.Context(), tx, "k", pgxlock.MaxWait(10*time.Millisecond)); !errors.Is(err, pgxlock.ErrNotAcquired) {
					t.Errorf("%s: %v", exec, err)
				}
				var timeout string
				err := tx.QueryRow(t.Context(), "show lock_timeout").Scan(&timeout)
				if timeout != "0" {
					t.Errorf("%s: lock_timeout is %s", exec, timeout)
				}
				return err
			})
			if err != nil {
				t.Errorf("%s: %v", exec, err)
			}
			_ = holder.Rollback(context.WithoutCancel(t.Context()))
			pool.Close() // the next one needs its connections
		}
	})
}

// The connection to the pooler outlives the server behind it.
func TestPoolerThatLeadsToAStandbyIsLeft(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	standby := pgtest.Standby(t, server, pgserver.Config{})
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		if mode == "session" {
			return // there the connection ends with the server's
		}
		locks := testkit.NewLocker(t, &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres"))}, nil)
		lock := testkit.Acquire(t, locks, "k", pgxlock.TTL(time.Hour))
		if err := pooler.Redirect(standby); err != nil {
			t.Fatal(err)
		}
		// It does so when it comes to it. The test then asks that the error says
		// what to do, and that nothing is lost.
		var err error
		pgtest.Until(t, "the pooler leads to the standby", func() bool {
			err = lock.Renew(t.Context())
			return errors.Is(err, pgxlock.ErrReadOnly) // and not that a connection ended on the way
		})
		wantReadOnly(t, "Renew", err)
		_, err = locks.TryAcquire(t.Context(), "another")
		wantReadOnly(t, "TryAcquire", err)
		if err := pooler.Redirect(server); err != nil {
			t.Fatal(err)
		}
		pgtest.Until(t, "it is renewed on the primary again", func() bool { return lock.Renew(t.Context()) == nil })
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
		untilOnlyHeld(t, db)
	})
}

// An operator pauses a pooler while another server takes over.
func TestLeaseOutlivesAShortPauseOfThePoolerAndIsLostInALongOne(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, _ := privateServer(t, nil)
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		if mode != "transaction" { // in session mode PAUSE waits until the clients have gone
			return
		}
		console := pgtest.Connect(t, pooler.URL("pgbouncer")+"&default_query_exec_mode=simple_protocol")
		command := func(text string) {
			t.Helper()
			if _, err := console.Exec(t.Context(), text); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
		}
		locks := testkit.NewLocker(t, &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres"))}, nil)
		lock, short := testkit.Acquire(t, locks, "k", pgxlock.TTL(time.Hour)), grantedInTime(t, locks, "short", pgxlock.TTL(2*time.Second))
		command("SET server_login_retry = 1") // a request to cancel that the pause ended counts as a failed login
		command("PAUSE")
		renewed := make(chan error, 1)
		go func() { renewed <- lock.Renew(t.Context()) }()
		<-short.Lost()
		command("RESUME")
		if err := <-renewed; err != nil && !errors.Is(err, pgxlock.ErrUnavailable) || lock.Err() != nil {
			t.Errorf("a lease that outlives the pause: Renew: %v, Err: %v", err, lock.Err())
		}
		pgtest.Until(t, "the lost one is free again", func() bool {
			again, err := locks.TryAcquire(t.Context(), "short")
			return err == nil && again.Release(t.Context()) == nil
		})
		testkit.Release(t, lock)
	})
}
