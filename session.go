package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A session is a connection of our own to the server: made as the caller's pool
// makes its own, but never from it and never given to it, so that neither an
// exhausted pool nor the settings of a role can cost a lock. It connects when it
// is needed, and again when it broke.
type session struct {
	name    string
	config  *pgxpool.Config
	prepare func(context.Context, *pgx.Conn) error // once per connection, before it is used

	mu     sync.Mutex
	conn   *pgx.Conn
	served backendID // by whom conn is served, or the last one was
	closed bool
}

// backendID names a server process for good: a pid alone is used again.
type backendID struct {
	pid     int32
	started *time.Time // nil: not to be seen
}

// do runs fn on the connection. If the connection breaks, fn's outcome is
// unknown; then the backend that may still be at it is ended first, and fn runs
// once more on a new one, with again = true. The error is what the server said,
// or what kept us from talking to it.
func (s *session) do(ctx context.Context, fn func(ctx context.Context, conn *pgx.Conn, again bool) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for again := false; ; again = true {
		err := s.connect(ctx)
		if err == nil {
			err = fn(ctx, s.conn, again)
		}
		if err == nil || again || s.conn == nil || !s.conn.IsClosed() || ctx.Err() != nil {
			return err
		}
	}
}

// connect makes sure that there is a connection.
func (s *session) connect(ctx context.Context) error {
	if s.closed {
		return ErrClosed
	}
	if s.conn != nil && !s.conn.IsClosed() {
		return nil
	}
	broken := s.conn != nil
	s.conn = nil

	config := s.config.ConnConfig.Copy()
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = s.name
	}
	config.ValidateConnect = both(config.ValidateConnect, requirePrimary)
	if s.config.BeforeConnect != nil {
		if err := s.config.BeforeConnect(ctx, config); err != nil {
			return fmt.Errorf("the pool's BeforeConnect: %w", err)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	if err := s.setUp(ctx, conn, broken); err != nil {
		closeQuietly(conn)
		return err
	}
	s.conn = conn
	return nil
}

// setUp prepares a new connection. The caller's hook comes first, so that our
// settings stand.
func (s *session) setUp(ctx context.Context, conn *pgx.Conn, broken bool) error {
	if s.config.AfterConnect != nil {
		if err := s.config.AfterConnect(ctx, conn); err != nil {
			return fmt.Errorf("the pool's AfterConnect: %w", err)
		}
	}
	if broken && s.served.started != nil {
		if _, err := conn.Exec(ctx, statement("terminate", ""), s.served.pid, *s.served.started); err != nil {
			return fmt.Errorf("end the backend of the broken connection: %w", err)
		}
	}
	var served backendID
	if err := conn.QueryRow(ctx, statement("backend", "")).Scan(&served.pid, &served.started); err != nil {
		return err
	}
	s.served = served
	return s.prepare(ctx, conn)
}

// direct reports whether conn talks to the server itself. A pooler shows another
// pid; behind it a setting would stay with a connection that others get next.
func (s *session) direct(conn *pgx.Conn) bool {
	return uint32(s.served.pid) == conn.PgConn().PID()
}

// close ends the connection; what the server gets from us after that is
// ErrClosed.
func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.conn != nil {
		closeQuietly(s.conn)
	}
}

// closeQuietly says goodbye to the server, which need not hear it.
func closeQuietly(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// requirePrimary refuses a standby while the address is still being chosen, so
// that a connection string with several hosts leads to the primary.
func requirePrimary(ctx context.Context, conn *pgconn.PgConn) error {
	result := conn.ExecParams(ctx, statement("primary", ""), nil, nil, nil, nil).Read()
	if result.Err != nil {
		return result.Err
	}
	if len(result.Rows) != 1 || len(result.Rows[0]) != 1 {
		return errors.New("the server does not say whether it is a standby")
	}
	if string(result.Rows[0][0]) != "f" {
		return fmt.Errorf("%w: the server is in recovery; connect to the primary", ErrReadOnly)
	}
	return nil
}

// both runs the caller's check of a new connection, if any, and ours.
func both(theirs, ours pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
	if theirs == nil {
		return ours
	}
	return func(ctx context.Context, conn *pgconn.PgConn) error {
		if err := theirs(ctx, conn); err != nil {
			return err
		}
		return ours(ctx, conn)
	}
}
