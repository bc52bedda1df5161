package systemtest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// Engines that speak PostgreSQL's protocol and have its advisory lock functions, but no locks
// behind them.

// wantNoLocks checks that an error refuses an engine for good, and names it.
func wantNoLocks(t *testing.T, what string, err error, engine string) {
	t.Helper()
	if !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("%s: %v, want ErrUnsupported", what, err)
		return
	}
	for _, other := range []error{pgxlock.ErrSchema, pgxlock.ErrUnavailable, pgxlock.ErrNotAcquired} {
		if errors.Is(err, other) {
			t.Errorf("%s: %v matches %v", what, err, other)
		}
	}
	wantOneLine(t, err, engine, "use PostgreSQL", "docs/engines.md")
}

func TestTransactionLockIsRefusedWhereTheServerKeepsNone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	testkit.KeepNoLocks(t, db)
	db = elsewhere(t, db, rand.Text(), nil)
	eachWay(t, func(t *testing.T, w way) {
		for _, key := range []string{"k", pgxlock.RawKey(7), pgxlock.RawKey2(7, 8)} {
			for name, opts := range map[string][]pgxlock.LockTxOption{
				"": nil, "NoWait": {pgxlock.NoWait}, "MaxWait": {testkit.LongWait}, "Shared": {pgxlock.Shared},
				"AllowStaleSnapshot": {pgxlock.AllowStaleSnapshot(true)},
			} {
				x := w.begin(t, db)
				wantNoLocks(t, fmt.Sprint(w, " ", key, " ", name), x.lock(t.Context(), key, opts...), "PostgreSQL 1")
				x.usable()
				x.end()
			}
		}
		x := w.beginTx(t, db, pgx.RepeatableRead)
		wantNoLocks(t, w.String()+" on a snapshot", x.lock(t.Context(), "k"), "PostgreSQL 1")
		x.end()
	})
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	wantNoLocks(t, "many keys", pgxlock.LockAllTx(t.Context(), tx, []string{"a", "b"}, pgxlock.NoWait), "PostgreSQL 1")
}

// A database that was restored on such an engine has the schema, so that only the Locker can notice.
func TestLockerIsRefusedWhereTheServerKeepsNoLocks(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	testkit.KeepNoLocks(t, db)
	limiter, err := ratelimit.New(db.Pool, hourly, 3, nil)
	if err != nil {
		t.Fatal(err)
	}
	runner, err := once.New(db.Pool, time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	leases, sessions := testkit.NewLocker(t, db, nil), testkit.NewAdvisory(t, db, nil)
	tokens := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true})
	one := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{OneConnection: true})
	for range 2 { // the second one connects again
		for what, call := range map[string]func(context.Context) error{
			"a lease":                func(ctx context.Context) error { _, err := leases.TryAcquire(ctx, "k"); return err },
			"a lease, OneConnection": func(ctx context.Context) error { _, err := one.TryAcquire(ctx, "k2"); return err },
			"a lease, waiting": func(ctx context.Context) error {
				_, err := leases.Acquire(ctx, "k3", pgxlock.MaxWait(time.Minute))
				return err
			},
			"an advisory lock":         func(ctx context.Context) error { _, err := sessions.TryAcquire(ctx, "k"); return err },
			"an advisory lock, Tokens": func(ctx context.Context) error { _, err := tokens.TryAcquire(ctx, "k"); return err },
			"a limit":                  func(ctx context.Context) error { _, err := limiter.Allow(ctx, "k"); return err },
			"a run": func(ctx context.Context) error {
				_, err := runner.Do(ctx, "k", func(context.Context, once.Run) error { return nil })
				return err
			},
		} {
			wantNoLocks(t, what, call(t.Context()), "PostgreSQL 1")
		}
	}
	if rows := testkit.Rows(t, db); len(rows) != 0 {
		t.Errorf("%v is held", rows)
	}
	if err := errors.Join(limiter.Close(t.Context()), runner.Close(t.Context())); err != nil {
		t.Error(err)
	}
	wantFinding(t, examine(t, db, nil), "advisory", statusError, "grants advisory locks and does not keep them", "docs/engines.md")
}

// An engine names itself at connect, which costs nothing.
func TestEngineWithoutLocksIsNamed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, stub := range map[string]func(*testing.T, *pgtest.DB){
		"locks that are always granted": testkit.KeepNoLocks,
		"functions that are missing":    withoutTransactionLocks,
	} {
		db := testkit.Migrated(t)
		stub(t, db)
		pool := db.NewPool(t, func(c *pgxpool.Config) {
			c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
			c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
				return &cockroach{Conn: &movedConn{conn, &net.UnixAddr{Name: rand.Text(), Net: "unix"}}}, err
			}
		})
		as := &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
		const engine = "CockroachDB CCL v25.2.1"
		tx := testkit.Begin(t, as, pgx.TxOptions{})
		wantNoLocks(t, name+": LockTx", pgxlock.LockTx(t.Context(), tx, "k"), engine)
		_, err := testkit.NewLocker(t, as, nil).TryAcquire(t.Context(), "k")
		wantNoLocks(t, name+": a lease", err, engine)
		_, err = testkit.NewAdvisory(t, as, nil).TryAcquire(t.Context(), "k")
		wantNoLocks(t, name+": an advisory lock", err, engine)
	}
}

// A cockroach is a connection to a PostgreSQL that calls itself a CockroachDB.
type cockroach struct {
	net.Conn
	said *bytes.Reader
}

func (c *cockroach) Read(b []byte) (int, error) {
	if c.said == nil {
		const status = "crdb_version\x00CockroachDB CCL v25.2.1\x00"
		c.said = bytes.NewReader(append(binary.BigEndian.AppendUint32([]byte{'S'}, uint32(len(status)+4)), status...))
	}
	if c.said.Len() > 0 {
		return c.said.Read(b)
	}
	return c.Conn.Read(b)
}

// withoutTransactionLocks makes the database one of an engine that has no advisory locks of transactions.
func withoutTransactionLocks(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.Exec(t, `set allow_system_table_mods = on;
		alter function pg_catalog.pg_advisory_xact_lock(bigint) rename to missing;
		alter function pg_catalog.pg_try_advisory_xact_lock(bigint) rename to missing_try;
		set allow_system_table_mods = off`)
}

// LockTx needs no schema, so that the advice to install one would lead nowhere.
func TestMissingPartOfPostgreSQLIsNoMissingSchema(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	withoutTransactionLocks(t, db)
	db = elsewhere(t, db, rand.Text(), nil)
	eachWay(t, func(t *testing.T, w way) {
		x := w.begin(t, db)
		err := x.lock(t.Context(), "k")
		wantNoLocks(t, w.String(), err, "the server lacks a part of PostgreSQL")
		wantServerError(t, err, "42883")
		x.end()
	})
}

// The server is asked once for each database of a process, and no lock costs more after that.
func TestKeptLocksAreLookedForOncePerDatabase(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	const sent = "Whether the server knows of a lock"
	var asked atomic.Int32
	count := testkit.OnStatement(sent, func() { asked.Add(1) })
	place := rand.Text()
	pools := []*pgtest.DB{elsewhere(t, db, place, count), elsewhere(t, db, place, count)}
	for _, as := range append(pools, pools...) {
		for _, opts := range [][]pgxlock.LockTxOption{nil, {pgxlock.NoWait}, {testkit.LongWait}, {pgxlock.Shared}} {
			x := byLockTx.begin(t, as)
			x.must("k", opts...)
			x.commit()
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("pgx: the server was asked %d times, want once", n)
	}
	for i := range int32(2) {
		asked.Store(0)
		handle := stdlib.OpenDBFromPool(pools[i].Pool)
		for range 3 {
			inSQLTx(t, handle, func(tx *sql.Tx) error { return pgxlock.LockSQLTx(t.Context(), tx, "k") })
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("database/sql: the server was asked %d times, want once for each sql.DB", n)
		}
		if err := handle.Close(); err != nil {
			t.Error(err)
		}
	}
}

func inSQLTx(t *testing.T, handle *sql.DB, do func(*sql.Tx) error) {
	t.Helper()
	tx, err := handle.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(do(tx), tx.Commit()); err != nil {
		t.Error(err)
	}
}

// elsewhere returns the database at an address that no other test has used: databases are used
// again, and this process knows of each address whether its server keeps locks.
func elsewhere(t *testing.T, db *pgtest.DB, place string, tracer pgx.QueryTracer) *pgtest.DB {
	t.Helper()
	address := &net.UnixAddr{Name: place, Net: "unix"}
	return &pgtest.DB{URL: db.URL, Name: db.Name, Pool: db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer, c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = tracer, nil, nil
		c.ConnConfig.DialFunc = func(ctx context.Context, network, host string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, host)
			return &movedConn{conn, address}, err
		}
	})}
}

// A movedConn ends at another address than it does.
type movedConn struct {
	net.Conn
	address net.Addr
}

func (c *movedConn) RemoteAddr() net.Addr { return c.address }

// One database that keeps locks says nothing of another one of the same process and server.
func TestKeptLocksOfAnotherDatabaseDoNotCount(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	good, bad := pgtest.New(t), pgtest.New(t)
	testkit.KeepNoLocks(t, bad)
	place := rand.Text() // one server
	good, bad = elsewhere(t, good, place, nil), elsewhere(t, bad, place, nil)
	eachWay(t, func(t *testing.T, w way) {
		x := w.begin(t, good)
		x.must("k")
		x.end()
		y := w.begin(t, bad)
		wantNoLocks(t, w.String(), y.lock(t.Context(), "k"), "PostgreSQL 1")
		y.end()
	})
}

// A role that may do nothing but connect can lock, with tables and functions of its own in front of the server's.
func TestRoleWithoutRightsCanLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role := "pgxlock_test_" + strings.ToLower(rand.Text())
	db.Exec(t, "create role "+role+"; create schema "+role+" authorization "+role)
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.WithoutCancel(t.Context()), "drop owned by "+role+" cascade; drop role "+role); err != nil {
			t.Error(err)
		}
	})
	as := &pgtest.DB{URL: db.URL, Name: db.Name, Pool: db.NewPool(t, func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "set role "+role+"; set search_path = "+role+", pg_catalog")
			return err
		}
	})}
	as.Exec(t, "create function pg_backend_pid() returns int language sql return 0; create view pg_locks as select 1 as pid where false")
	eachWay(t, func(t *testing.T, w way) {
		x := w.begin(t, as)
		x.must("k")
		x.end()
	})
}

// wantWorker checks that an error refuses a worker of Citus as a standby is refused, and gives no
// advice that leads nowhere.
func wantWorker(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, pgxlock.ErrReadOnly) || errors.Is(err, pgxlock.ErrSchema) || errors.Is(err, pgxlock.ErrUnavailable) {
		t.Errorf("%s: %v, want ErrReadOnly alone", what, err)
		return
	}
	if text := err.Error(); !strings.Contains(text, "Citus worker") || !strings.Contains(text, "connect to the coordinator") || strings.Contains(text, "migrat") {
		t.Errorf("%s: %v", what, err)
	}
}

func TestCitusWorkerIsRefused(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, of := range map[string]func(*testing.T) *pgtest.DB{"installed": testkit.Migrated, "bare": func(t *testing.T) *pgtest.DB { return pgtest.New(t) }} {
		db := of(t)
		testkit.Citus(t, db, 7, true)
		db = elsewhere(t, db, rand.Text(), nil)
		eachWay(t, func(t *testing.T, w way) {
			x := w.begin(t, db)
			wantWorker(t, name, x.lock(t.Context(), "k", pgxlock.NoWait))
			x.usable()
			x.end()
		})
		leases, sessions := testkit.NewLocker(t, db, nil), testkit.NewAdvisory(t, db, nil)
		for range 2 {
			_, err := leases.TryAcquire(t.Context(), "k")
			wantWorker(t, name+": a lease", err)
			_, err = sessions.TryAcquire(t.Context(), "k")
			wantWorker(t, name+": an advisory lock", err)
		}
		findings := examine(t, db, nil)
		wantFinding(t, findings, "nodes", statusError, "Citus worker", "connect to the coordinator")
		if len(findings) != 1 || strings.Contains(fmt.Sprint(findings), "migrate") {
			t.Errorf("%s: %v", name, findings)
		}
		if name == "bare" {
			_, err := pgxlock.PurgeClaims(t.Context(), db.Pool, time.Hour)
			wantWorker(t, "PurgeClaims", err)
			shot := testkit.Snapshot(t, testkit.NewMonitor(t, db, nil))
			if missing := strings.Join(shot.Missing, " "); !strings.Contains(missing, "connect to the coordinator") || strings.Contains(missing, "migrate") {
				t.Errorf("a Monitor says %q", missing)
			}
			err = migrations.Up(t.Context(), db.Pool, nil)
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "25006" || !strings.Contains(err.Error(), "connect to the coordinator") {
				t.Errorf("Up: %v", err)
			}
			if n := testkit.Query[int](t, db, "select count(*) from pg_class where relnamespace = 'public'::regnamespace"); n != 0 {
				t.Errorf("Up made %d relations", n)
			}
		}
	}
}

// A Locker that is given all nodes of a cluster finds the coordinator among them.
func TestCitusCoordinatorIsFoundAmongWorkers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	coordinator, worker := testkit.Migrated(t), testkit.Migrated(t)
	testkit.Citus(t, worker, 1, true)
	testkit.Citus(t, coordinator, 0, false)
	own := coordinator.Pool.Config().ConnConfig
	const behind = 1 // the port of the worker is that much higher
	pool := coordinator.NewPool(t, testkit.Behind(&pgconn.FallbackConfig{Host: own.Host, Port: own.Port + behind}), func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			to, ofWorker := strings.CutSuffix(address, fmt.Sprint(own.Port+behind))
			if !ofWorker {
				return (&net.Dialer{}).DialContext(ctx, network, address)
			}
			conn, err := (&net.Dialer{}).DialContext(ctx, network, to+fmt.Sprint(own.Port))
			return &renamed{conn, coordinator.Name, worker.Name}, err
		}
	})
	db := &pgtest.DB{Pool: pool, URL: coordinator.URL, Name: coordinator.Name}
	for name, make := range testkit.WaitingKinds {
		testkit.Release(t, testkit.Acquire(t, make(t, db, "one-of-the-nodes"), name))
	}
	findings := examine(t, db, nil)
	wantFinding(t, findings, "nodes", statusOK, "the coordinator of Citus")
}

// renamed is a connection on which another database is asked for, with a name of the same length.
type renamed struct {
	net.Conn
	from, to string
}

func (c *renamed) Write(b []byte) (int, error) {
	return c.Conn.Write(bytes.ReplaceAll(b, []byte(c.from), []byte(c.to)))
}

func TestCitusCoordinatorIsSoundWithAWarning(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	testkit.Citus(t, db, 0, true)
	testkit.Release(t, testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k"))
	testkit.UseAdvisory(t, testkit.NewAdvisory(t, db, nil), db, "k")
	as := elsewhere(t, db, rand.Text(), nil)
	eachWay(t, func(t *testing.T, w way) {
		x := w.begin(t, as)
		x.must("k")
		x.end()
	})
	wantFinding(t, examine(t, db, nil), "nodes", statusWarning, "1 worker with metadata", "lock on the coordinator")
	db.Exec(t, "set allow_system_table_mods = on; update pg_catalog.pg_dist_node set hasmetadata = false; set allow_system_table_mods = off")
	wantFinding(t, examine(t, db, nil), "nodes", statusOK, "the coordinator of Citus")
}

// Tables of those names in another schema, which any role may make, are not Citus'.
func TestCatalogsOfCitusCountInPgCatalogAlone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `create table pg_dist_local_group as select 7 as groupid; create table pg_dist_node as select 1 as groupid, true as hasmetadata;
		create function hasmetadata(pg_dist_node) returns boolean language sql return 1 / 0 > 0`)
	as := elsewhere(t, db, rand.Text(), nil)
	x := byLockTx.begin(t, as)
	x.must("k")
	x.end()
	testkit.Release(t, testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k"))
	testkit.UseAdvisory(t, testkit.NewAdvisory(t, db, nil), db, "k")
	wantFinding(t, examine(t, db, nil), "nodes", statusOK, "no other server is known")
}

func TestDoctorFindsASubscriptionThatWritesOurTables(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, "create table theirs ()")
	subscription := "pgxlock_test_" + strings.ToLower(rand.Text())
	db.Exec(t, "create subscription "+subscription+" connection 'dbname=nowhere' publication p with (connect = false, slot_name = none)")
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.WithoutCancel(t.Context()), "drop subscription "+subscription); err != nil {
			t.Error(err)
		}
	})
	subscribe := func(table string) {
		db.Exec(t, "insert into pg_subscription_rel (srsubid, srrelid, srsubstate) select oid, '"+table+"'::regclass, 'r' from pg_subscription where subname = '"+subscription+"'")
	}
	subscribe("theirs")
	wantFinding(t, examine(t, db, nil), "nodes", statusOK, "no other server is known")
	subscribe("distributed_locks")
	wantFinding(t, examine(t, db, nil), "nodes", statusWarning, "subscription "+subscription+" writes pgxlock's tables", "on one server")
}
