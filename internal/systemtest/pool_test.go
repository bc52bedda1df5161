package systemtest_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// A program on database/sql makes a pool for its Locker only.
func TestPoolThatOnlyALockerHasNeverConnects(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pool := unconnected(t)
		locks, err := pgxlock.NewLeaseLocker(pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour) // the pool checks its connections each minute
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// connectTracer records how connections are made.
type connectTracer struct {
	pgx.QueryTracer // nil: pgx asks for the interface of a query tracer, too

	mu      sync.Mutex
	configs []*pgx.ConnConfig
}

func (c *connectTracer) TraceConnectStart(ctx context.Context, data pgx.TraceConnectStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.configs = append(c.configs, data.ConnConfig)
	return ctx
}

func (c *connectTracer) TraceConnectEnd(context.Context, pgx.TraceConnectEndData) {}

func (c *connectTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (c *connectTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestLockerConnectsAsItsPoolDoes(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	seen := new(connectTracer)
	var dialled atomic.Int32
	var user string
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		user = c.ConnConfig.User
		c.ConnConfig.Tracer, c.ConnConfig.Password = seen, "geheim"
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dialled.Add(1)
			return dial(ctx, network, addr)
		}
		c.ConnConfig.RuntimeParams["application_name"] = "billing"
		c.ConnConfig.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) { t.Error("the pool got a notification of the Locker") }
	})
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}, &pgxlock.LeaseConfig{Backoff: testkit.Seldom})
	others := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	granted := testkit.Waits(t, locks, "k")
	testkit.UntilQueued(t, db, "k", 1)
	testkit.Release(t, others)
	lock := <-granted // by a notification
	if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	// One for requests, one for renewals, and one that listens.
	if dials := dialled.Load(); dials < 3 || len(seen.configs) < 3 {
		t.Errorf("%d connections by the pool's DialFunc, %d seen by its Tracer, want 3", dials, len(seen.configs))
	}
	for i, got := range seen.configs {
		if got.Password != "geheim" || got.User != user || got.RuntimeParams["application_name"] != "billing" {
			t.Errorf("connection %d: %q %q", i, got.User, got.RuntimeParams)
		}
	}
}
