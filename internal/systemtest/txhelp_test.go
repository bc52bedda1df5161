package systemtest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What tests of locks in transactions have in common.

// way is one of the functions that lock in a transaction.
type way int

const (
	byLockTx way = iota
	byLockAllTx
	byLockSQLTx
)

func (w way) String() string { return [...]string{"LockTx", "LockAllTx", "LockSQLTx"}[w] }

// eachWay runs the test once for each function that locks, one after the other: they may share a
// database.
func eachWay(t *testing.T, test func(t *testing.T, w way)) {
	t.Helper()
	for _, w := range []way{byLockTx, byLockAllTx, byLockSQLTx} {
		t.Run(w.String(), func(t *testing.T) { test(t, w) })
	}
}

// txn is a transaction of pgx or of database/sql. It is rolled back when the
// test is over.
type txn struct {
	t   *testing.T
	way way
	pgx pgx.Tx
	sql *sql.Tx
}

func (w way) begin(t *testing.T, db *pgtest.DB) *txn { return w.beginTx(t, db, "") }

// beginTx begins with an isolation level; "" is the default.
func (w way) beginTx(t *testing.T, db *pgtest.DB, level pgx.TxIsoLevel) *txn {
	t.Helper()
	x := &txn{t: t, way: w}
	if w != byLockSQLTx {
		x.pgx = testkit.Begin(t, db, pgx.TxOptions{IsoLevel: level})
		return x
	}
	levels := map[pgx.TxIsoLevel]sql.IsolationLevel{
		"": sql.LevelDefault, pgx.ReadCommitted: sql.LevelReadCommitted,
		pgx.RepeatableRead: sql.LevelRepeatableRead, pgx.Serializable: sql.LevelSerializable,
	}
	handle := stdlib.OpenDBFromPool(db.Pool)
	tx, err := handle.BeginTx(context.WithoutCancel(t.Context()), &sql.TxOptions{Isolation: levels[level]})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = tx.Rollback()
		if err := handle.Close(); err != nil {
			t.Error(err)
		}
	})
	x.sql = tx
	return x
}

func (x *txn) lock(ctx context.Context, key string, opts ...pgxlock.LockTxOption) error {
	switch x.way {
	case byLockSQLTx:
		return pgxlock.LockSQLTx(ctx, x.sql, key, opts...)
	case byLockAllTx:
		return pgxlock.LockAllTx(ctx, x.pgx, []string{key}, opts...)
	default:
		return pgxlock.LockTx(ctx, x.pgx, key, opts...)
	}
}

// must locks, which must work.
func (x *txn) must(key string, opts ...pgxlock.LockTxOption) {
	x.t.Helper()
	if err := x.lock(x.t.Context(), key, opts...); err != nil {
		x.t.Fatal(err)
	}
}

// wants locks, which must end with that error.
func (x *txn) wants(want error, key string, opts ...pgxlock.LockTxOption) {
	x.t.Helper()
	if err := x.lock(x.t.Context(), key, opts...); !errors.Is(err, want) {
		x.t.Errorf("%v %q %v: %v, want %v", x.way, key, opts, err, want)
	}
}

// async locks in another goroutine.
func (x *txn) async(key string, opts ...pgxlock.LockTxOption) <-chan error {
	result := make(chan error, 1)
	go func() { result <- x.lock(x.t.Context(), key, opts...) }()
	return result
}

func (x *txn) try(sql string) (err error) {
	if x.way == byLockSQLTx {
		_, err = x.sql.ExecContext(x.t.Context(), sql)
	} else {
		_, err = x.pgx.Exec(x.t.Context(), sql)
	}
	return err
}

func (x *txn) exec(sql string) {
	x.t.Helper()
	if err := x.try(sql); err != nil {
		x.t.Fatalf("%v\n%s", err, sql)
	}
}

// value returns the one value, made a text, that a query yields.
func (x *txn) value(sql string) (v string) {
	x.t.Helper()
	sql = "select (" + sql + ")::text"
	var err error
	if x.way == byLockSQLTx {
		err = x.sql.QueryRowContext(x.t.Context(), sql).Scan(&v)
	} else {
		err = x.pgx.QueryRow(x.t.Context(), sql).Scan(&v)
	}
	if err != nil {
		x.t.Fatalf("%v\n%s", err, sql)
	}
	return v
}

func (x *txn) commit() {
	x.t.Helper()
	var err error
	if x.way == byLockSQLTx {
		err = x.sql.Commit()
	} else {
		err = x.pgx.Commit(x.t.Context())
	}
	if err != nil {
		x.t.Fatalf("commit: %v", err)
	}
}

func (x *txn) rollback() {
	x.t.Helper()
	var err error
	if x.way == byLockSQLTx {
		err = x.sql.Rollback()
	} else {
		err = x.pgx.Rollback(x.t.Context())
	}
	if err != nil {
		x.t.Fatalf("rollback: %v", err)
	}
}

// end gives the connection back, whatever became of it.
func (x *txn) end() {
	if x.way == byLockSQLTx {
		_ = x.sql.Rollback()
	} else {
		_ = x.pgx.Rollback(x.t.Context())
	}
}

// usable checks that the transaction was not aborted.
func (x *txn) usable() {
	x.t.Helper()
	if err := x.try("select 1"); err != nil {
		x.t.Errorf("the transaction is not usable any more: %v", err)
	}
}

// state is what a session's settings and locks are, one per line. To ask for it
// locks the views, so that what a second call returns can be compared with what
// the first one did.
func (x *txn) state() string {
	x.t.Helper()
	return x.settings() + "\n" + x.value(`select string_agg(concat_ws(' ', locktype, relation::regclass, transactionid, classid, objid, objsubid, mode, granted), E'\n'
		order by locktype, relation, transactionid::text, classid, objid, objsubid, mode) from pg_locks where pid = pg_backend_pid()`)
}

// settings are all of a session's, one per line, but for those of a library that a statement
// loaded.
func (x *txn) settings() string {
	x.t.Helper()
	return x.value(`select string_agg(name || ' = ' || setting, E'\n' order by name) from pg_settings where not (name like '%.%' and source = 'default')`)
}

// lockLine is how state shows an advisory lock.
func lockLine(key string, mode pgxlock.Mode) string {
	id := uint64(pgxlock.AdvisoryID(key))
	name := map[pgxlock.Mode]string{pgxlock.Exclusive: "ExclusiveLock", pgxlock.Shared: "ShareLock"}[mode]
	return fmt.Sprintf("advisory %d %d 1 %s t", id>>32, id&0xffffffff, name)
}

// changed returns the lines in which two texts differ.
func changed(before, after string) (lines []string) {
	old, now := strings.Split(before, "\n"), strings.Split(after, "\n")
	for _, line := range old {
		if !slices.Contains(now, line) {
			lines = append(lines, "- "+line)
		}
	}
	for _, line := range now {
		if !slices.Contains(old, line) {
			lines = append(lines, "+ "+line)
		}
	}
	return lines
}

// wantChanged checks that a session's state differs in these lines only.
func wantChanged(t *testing.T, before, after string, want ...string) {
	t.Helper()
	if got := changed(before, after); !slices.Equal(got, want) {
		t.Errorf("changed: %q, want %q", got, want)
	}
}

// untilWaiting waits until that many of the database's sessions wait for a lock.
func untilWaiting(t *testing.T, db *pgtest.DB, n int) {
	t.Helper()
	pgtest.Until(t, fmt.Sprint(n, " sessions wait for a lock"), func() bool {
		return testkit.Query[int](t, db, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock'`) == n
	})
}

// traffic counts what pgx calls and what goes over the network.
type traffic struct {
	calls atomic.Int64 // of Query, Exec, SendBatch, Prepare
	trips atomic.Int64 // requests, each of which was preceded by a reply

	failed atomic.Int64 // errors of the server, which it writes to its log as well
}

func (c *traffic) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.calls.Add(1)
	return ctx
}
func (c *traffic) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (c *traffic) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.calls.Add(1)
	return ctx
}
func (c *traffic) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (c *traffic) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// metered returns the database with a count of its traffic.
func metered(t *testing.T, db *pgtest.DB) (*traffic, *pgtest.DB) {
	t.Helper()
	c := &traffic{}
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.Tracer = c
		config.ConnConfig.OnPgError = func(*pgconn.PgConn, *pgconn.PgError) bool {
			c.failed.Add(1)
			return true
		}
		dial := config.ConnConfig.DialFunc
		config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &meteredConn{Conn: conn, traffic: c}, nil
		}
	})
	return c, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

type meteredConn struct {
	net.Conn
	traffic *traffic

	mu    sync.Mutex
	asked bool // the last that went over it was a request
}

func (c *meteredConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	if !c.asked {
		c.traffic.trips.Add(1)
	}
	c.asked = true
	c.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *meteredConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.mu.Lock()
		c.asked = false
		c.mu.Unlock()
	}
	return n, err
}

// during returns what f caused.
func (c *traffic) during(f func()) (calls, trips int64) {
	calls, trips = c.calls.Load(), c.trips.Load()
	f()
	return c.calls.Load() - calls, c.trips.Load() - trips
}

// quietServer returns a server on which nobody commits but the test: above READ
// COMMITTED each commit counts, in whichever database it is.
func quietServer(t *testing.T) *pgtest.DB {
	t.Helper()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"autovacuum": "off"}})
	url := server.URL("postgres")
	return &pgtest.DB{Pool: pgtest.Pool(t, url, func(c *pgxpool.Config) { c.MaxConns = 20 }), URL: url, Name: "postgres"}
}

// wantServerError checks that a call ended with that SQLSTATE, of pgx's type,
// and was not mistaken for a busy key.
func wantServerError(t *testing.T, err error, state string) {
	t.Helper()
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code != state {
		t.Errorf("%v, want SQLSTATE %s", err, state)
	}
	if errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("%v: mistaken for busy", err)
	}
	if deadlock := state == "40P01"; errors.Is(err, pgxlock.ErrDeadlock) != deadlock {
		t.Errorf("%v is ErrDeadlock: %t", err, !deadlock)
	}
	wantOneLine(t, err, state)
}
