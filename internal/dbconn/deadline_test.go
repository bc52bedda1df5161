package dbconn_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// newSession returns a session that needs no schema. What it sends while the hole is open is
// lost, and so are the answers.
func newSession(t *testing.T, db *pgtest.DB, hole *blackHole) *dbconn.Session {
	t.Helper()
	over, end := context.WithCancel(context.Background())
	t.Cleanup(end) // else pgx waits 15 s for an answer to the request to cancel that was lost
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
			if err == nil {
				context.AfterFunc(over, func() { _ = conn.Close() })
				hole.conns.Store(conn, nil)
			}
			return &swallowingConn{conn, hole}, err
		}
	})
	s := &dbconn.Session{Dialer: dbconn.Dialer{Name: "test", Config: pool.Config()}}
	t.Cleanup(s.Close)
	return s
}

type blackHole struct {
	open  atomic.Bool
	timed bool // its connections have deadlines
	conns sync.Map
}

// end closes the hole, and the connections that it has swallowed.
func (h *blackHole) end() {
	h.open.Store(false)
	h.conns.Range(func(conn, _ any) bool { return conn.(net.Conn).Close() == nil || true })
}

type swallowingConn struct {
	net.Conn
	hole *blackHole
}

func (c *swallowingConn) SetDeadline(until time.Time) error {
	if c.hole.timed {
		return c.Conn.SetDeadline(until)
	}
	return errors.New("not supported") // as on a connection through an SSH client
}

func (c *swallowingConn) Write(b []byte) (int, error) {
	if c.hole.open.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// pidOf runs an exchange, and returns which backend answered.
func pidOf(s *dbconn.Session, patience time.Duration) (pid int, err error) {
	err = s.DoWithin(patience, func(ctx context.Context, q dbconn.Querier, _ bool) error {
		return q.Row(ctx, "select pg_backend_pid()").Scan(&pid)
	})
	return pid, err
}

func TestExchangeEndsAtItsDeadlineWithoutAWatcher(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, timed := range []bool{true, false} {
		t.Run(fmt.Sprint("the connection has deadlines: ", timed), func(t *testing.T) { endsAtItsDeadline(t, db, timed) })
	}
}

func endsAtItsDeadline(t *testing.T, db *pgtest.DB, timed bool) {
	t.Helper()
	hole := blackHole{timed: timed}
	s := newSession(t, db, &hole)
	if _, err := pidOf(s, dbconn.Timeout); err != nil {
		t.Fatal(err)
	}
	hole.open.Store(true)
	_, err := pidOf(s, 50*time.Millisecond)
	if !errors.Is(err, lockerr.ErrNoAnswer) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want ErrNoAnswer", err)
	}
	hole.end()
	if _, err := pidOf(s, time.Minute); err != nil { // it waited for the attempt that was swallowed
		_, err = pidOf(s, time.Minute)
		if err != nil {
			t.Errorf("once the network is back: %v", err)
		}
	}
}

func TestConnectionOutlivesTheDeadlinesOfItsExchanges(t *testing.T) {
	t.Parallel()
	s := newSession(t, pgtest.New(t), &blackHole{timed: true})
	first, err := pidOf(s, dbconn.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	var until time.Time
	if err := s.DoWithin(time.Millisecond, func(ctx context.Context, _ dbconn.Querier, _ bool) error {
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
