package testkit

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// AcquireSQL is in the statements that acquire leases.
const AcquireSQL = "pgxlock_acquire_"

// Counter counts statements, and the entries that they carry: one, or an array.
type Counter struct {
	Sql string

	mu         sync.Mutex
	statements int
	entries    int
	first      time.Time
}

// TraceQueryStart counts.
func (c *Counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, c.Sql) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.statements++; c.first.IsZero() {
			c.first = time.Now()
		}
		if strings.Contains(data.SQL, "_one(") {
			c.entries++
			return ctx
		}
		for _, arg := range data.Args {
			if array, ok := arg.([]byte); ok {
				_, n, _ := dbconn.ReadArray(array)
				c.entries += n
				break
			}
			if names, ok := arg.([]string); ok {
				c.entries += len(names)
				break
			}
		}
	}
	return ctx
}

// TraceQueryEnd does nothing: pgx wants both.
func (c *Counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Counts returns how many statements were sent, with how many entries, and how long ago the first one was.
func (c *Counter) Counts() (statements, entries int, since time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.statements, c.entries, time.Since(c.first)
}

// Counted returns the database with a counter of statements that contain sql.
func Counted(t *testing.T, db *pgtest.DB, sql string) (*Counter, *pgtest.DB) {
	t.Helper()
	c := &Counter{Sql: sql}
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.Tracer = c })
	return c, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

// Calls counts the calls of an SQL function by sessions that have reported them.
func Calls(t *testing.T, db *pgtest.DB, function string) func() int64 {
	t.Helper()
	return func() int64 {
		return Query[int64](t, db, "select coalesce(sum(calls), 0)::bigint from pg_stat_user_functions where funcname = $1", function)
	}
}

// UntilGone waits until the connections of closed Lockers have ended: then the server has
// counted what they called.
func UntilGone(t *testing.T, db *pgtest.DB, owners ...string) {
	t.Helper()
	for _, owner := range owners {
		pgtest.Until(t, owner+" is gone", func() bool { return len(Backends(t, db, owner)) == 0 })
	}
}

// EachStatement is a tracer that pgx calls with each statement before it sends it.
type EachStatement func(sql string)

// OnStatement is a tracer that calls do before pgx sends a statement that contains sql.
func OnStatement(sql string, do func()) EachStatement {
	return func(sent string) {
		if strings.Contains(sent, sql) {
			do()
		}
	}
}

// TraceQueryStart calls the function.
func (f EachStatement) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	f(data.SQL)
	return ctx
}

// TraceQueryEnd does nothing: pgx wants both.
func (EachStatement) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
