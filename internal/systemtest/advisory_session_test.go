package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// An Advisory Locker has one session (I8), which waits without a transaction (I9),
// and is made as the pool makes its connections, but is not one of them.

func TestAdvisoryLocksTakeNothingFromTheCallersPool(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.NewPool(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	locks := testkit.NewAdvisory(t, &pgtest.DB{Pool: pool}, nil)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	testkit.UseAdvisory(t, locks, db, "k")
	lock := testkit.Acquire(t, locks, "k")
	if err := pgxlock.LockTx(t.Context(), tx, "k", pgxlock.NoWait); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("the caller's own transaction was granted what the Locker holds: %v", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if n := pool.Stat().TotalConns(); n != 1 {
		t.Errorf("the caller's pool has %d connections", n)
	}
}

// CREATE INDEX CONCURRENTLY waits for every transaction with an older snapshot,
// whatever that does.
func TestIndexIsBuiltConcurrentlyWhileOthersWaitForALock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, pgtest.New(t), 10)
	db.Exec(t, "create table written as select generate_series(1, 1000) as n")
	locks, others := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, nil)
	held := testkit.Acquire(t, locks, "k")
	var waiting sync.WaitGroup
	for range 200 {
		waiting.Go(func() {
			if err := others.Do(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil }); err != nil {
				t.Error(err)
			}
		})
	}
	for i := range 3 {
		db.Exec(t, fmt.Sprintf("create index concurrently index_%d on written (n)", i))
	}
	if err := errors.Join(held.Err(), held.Release(t.Context())); err != nil {
		t.Error(err)
	}
	waiting.Wait()
}

func TestPoolsAfterConnectIsHonouredByAdvisoryLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	through := func(configure func(*pgxpool.Config)) *pgtest.DB {
		return &pgtest.DB{Pool: db.NewPool(t, configure), URL: db.URL, Name: db.Name}
	}

	t.Run("AfterConnect has the first word, ours is the last", func(t *testing.T) {
		pool := through(func(c *pgxpool.Config) {
			c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "set role pg_monitor; set idle_session_timeout = '5s'; set statement_timeout = 5000; set default_transaction_read_only = on")
				return err
			}
		})
		locks := testkit.NewAdvisory(t, pool, &pgxlock.AdvisoryConfig{Owner: "afterwards"})
		testkit.UseAdvisory(t, locks, db, t.Name())
		if role := testkit.Query[string](t, db, "select current_user"); role == "pg_monitor" {
			t.Error("the pool of the test has the role as well: nothing was tested")
		}
	})
	t.Run("a silent host leaves time for the next", func(t *testing.T) {
		silent, err := net.Listen("tcp", "127.0.0.1:0") // the kernel takes the connection, nobody answers
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = silent.Close() })
		host := &pgconn.FallbackConfig{Host: "127.0.0.1", Port: uint16(silent.Addr().(*net.TCPAddr).Port)}
		locks := testkit.NewAdvisory(t, through(testkit.Behind(host)), nil)
		testkit.UntilConnected(t, locks)
		testkit.UseAdvisory(t, locks, db, t.Name())
	})
}

// What roles are set to for the sake of their other programs neither costs a lock
// nor the session.
func TestRoleSettingsCostNoAdvisoryLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Controlled(t, pgtest.New(t))
	use := func(t *testing.T, settings map[string]string) {
		t.Helper()
		testkit.Set(t, db, settings)
		locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "patient"})
		testkit.UseAdvisory(t, locks, db, "k")
		lock := testkit.Acquire(t, locks, "held")
		before := testkit.Backends(t, db, "patient")
		pgtest.Until(t, "the session has been idle for longer than the timeouts", func() bool {
			return testkit.Query[bool](t, db, `select bool_and(state = 'idle' and clock_timestamp() - state_change > '150 ms') is not false
				from pg_stat_activity where datname = current_database() and application_name = 'pgxlock patient'`)
		})
		testkit.WantFree(t, db, "held", false)
		if after := testkit.Backends(t, db, "patient"); !slices.Equal(before, after) {
			t.Errorf("backends %v, and now %v", before, after)
		}
		if err := errors.Join(lock.Err(), lock.Renew(t.Context()), lock.Release(t.Context()), locks.Close(t.Context())); err != nil {
			t.Error(err)
		}
		pgtest.Until(t, "the session is gone", func() bool { return len(testkit.Backends(t, db, "patient")) == 0 })
	}
	for name, value := range testkit.Hostile {
		t.Run(name, func(t *testing.T) { use(t, map[string]string{name: value}) })
	}
	t.Run("all", func(t *testing.T) { use(t, testkit.Together()) })
}

// A role may search a schema before pg_catalog that others can write.
func TestSchemaBeforePgCatalogRunsNothingForAdvisoryLocks(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Controlled(t, pgtest.New(t))
	db.Exec(t, "create schema strange")
	for signature, result := range map[string]string{
		"pg_try_advisory_lock(bigint)": "boolean", "pg_try_advisory_lock_shared(bigint)": "boolean",
		"pg_try_advisory_lock(int, int)": "boolean", "pg_try_advisory_lock_shared(int, int)": "boolean",
		"pg_advisory_unlock(bigint)": "boolean", "pg_advisory_unlock_shared(bigint)": "boolean",
		"pg_is_in_recovery()": "boolean", "pg_backend_pid()": "int", "current_setting(text)": "text",
		"set_config(text, text, boolean)": "text", "unnest(anyarray)": "setof anyelement", "clock_timestamp()": "timestamptz",
		"pg_terminate_backend(int, bigint)": "boolean", "regexp_replace(text, text, text)": "text",
	} {
		db.Exec(t, "create function strange."+signature+" returns "+result+` language plpgsql as $$ begin raise exception 'hijacked'; end $$`)
	}
	for _, operator := range []string{"= (int, int)", "= (oid, oid)", "= (text, text)", "= (name, name)", ">> (bigint, int)", "<< (bigint, int)", "| (bigint, bigint)", "* (bigint, bigint)", "+ (bigint, bigint)", "|| (text, text)"} {
		symbol, types, _ := strings.Cut(operator, " ")
		left, right, _ := strings.Cut(strings.Trim(types, "()"), ", ")
		name := "strange.operator_" + fmt.Sprintf("%x", symbol)
		result := map[string]string{"=": "boolean", "||": "text"}[symbol]
		if result == "" {
			result = "bigint"
		}
		db.Exec(t, "create function "+name+types+" returns "+result+" language plpgsql as $$ begin raise exception 'hijacked'; end $$")
		db.Exec(t, "create operator strange."+symbol+" (leftarg = "+left+", rightarg = "+right+", function = "+name+")")
	}
	db.Exec(t, "create view strange.pg_stat_activity as select 1 / (random() * 0)::int as pid; create view strange.pg_locks as select 1 / (random() * 0)::int as pid")
	testkit.Set(t, db, map[string]string{"search_path": "strange, pg_catalog"})
	if _, err := db.Connect(t).Exec(t.Context(), "select pg_is_in_recovery()"); err == nil {
		t.Fatal("what is strange is not found: nothing is tested")
	}
	locks := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "hijacked"})
	testkit.UseAdvisory(t, locks, db, "k")
	lost := testkit.Acquire(t, locks, "lost")
	testkit.Terminate(t, db, "hijacked") // the next session looks after this one
	pgtest.Until(t, "the lock is lost", func() bool { return lost.Err() != nil })
	testkit.UseAdvisory(t, locks, db, "k")
}
