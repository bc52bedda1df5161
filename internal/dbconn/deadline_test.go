package dbconn_test

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// newSession returns a session that needs no schema. What it sends while silent is true is
// lost, and so are the answers.
func newSession(t *testing.T, db *pgtest.DB, silent *atomic.Bool) *dbconn.Session {
	t.Helper()
	over, end := context.WithCancel(context.Background())
	t.Cleanup(end) // else pgx waits 15 s for an answer to the request to cancel that was lost
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
			if err == nil {
				context.AfterFunc(over, func() { _ = conn.Close() })
			}
			return &swallowingConn{conn, silent}, err
		}
	})
	s := &dbconn.Session{Dialer: dbconn.Dialer{Name: "test", Config: pool.Config()}, Place: &dbconn.Installation{Schema: "public"}}
	t.Cleanup(s.Close)
	return s
}

type swallowingConn struct {
	net.Conn
	silent *atomic.Bool
}

func (c *swallowingConn) Write(b []byte) (int, error) {
	if c.silent.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// pidOf runs an exchange, and returns which backend answered.
func pidOf(s *dbconn.Session, patience time.Duration) (pid int, err error) {
	err = s.Do(patience, func(ctx context.Context, q dbconn.Querier, _ bool) error {
		return q.Row(ctx, "select pg_backend_pid()").Scan(&pid)
	})
	return pid, err
}

func TestExchangeEndsAtItsDeadlineWithoutAWatcher(t *testing.T) {
	t.Parallel()
	var silent atomic.Bool
	s := newSession(t, pgtest.New(t), &silent)
	if _, err := pidOf(s, dbconn.Timeout); err != nil {
		t.Fatal(err)
	}
	silent.Store(true)
	_, err := pidOf(s, 50*time.Millisecond)
	if !errors.Is(err, lockerr.ErrNoAnswer) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want ErrNoAnswer", err)
	}
	silent.Store(false)
	if _, err := pidOf(s, dbconn.Timeout); err != nil {
		t.Errorf("once the network is back: %v", err)
	}
}

func TestConnectionOutlivesTheDeadlinesOfItsExchanges(t *testing.T) {
	t.Parallel()
	s := newSession(t, pgtest.New(t), new(atomic.Bool))
	first, err := pidOf(s, dbconn.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	var until time.Time
	if err := s.Do(time.Millisecond, func(ctx context.Context, _ dbconn.Querier, _ bool) error {
		until, _ = ctx.Deadline()
		for ctx.Err() == nil { // sends nothing
			time.Sleep(time.Until(until))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if next, err := pidOf(s, dbconn.Timeout); err != nil || next != first {
		t.Errorf("backend %d answers, want %d, which did before: %v", next, first, err)
	}
}
