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

// ioTimeout bounds an exchange with the server, so that a dead network is
// noticed.
const ioTimeout = 5 * time.Second

// connectTimeout is what a new connection may take at least, whatever the
// patience: to begin again would only take longer.
const connectTimeout = 2 * time.Second

// errNoAnswer means that the server was not heard of in time. It does not match
// context.DeadlineExceeded: no deadline of a caller has passed.
var errNoAnswer = errors.New("no answer from the server in time")

// errNotReplicated means that a commit was not waited for.
var errNotReplicated = errors.New("the wait for a synchronous standby was cancelled: the commit may not survive a failover")

// A session is a connection of our own to the server: made as the caller's pool
// makes its own, but never from it and never given to it, so that neither an
// exhausted pool nor the settings of a role can cost a lock. It connects when it
// is needed, and again when it broke.
type session struct {
	name   string
	config *pgxpool.Config
	place  *installation

	mu            sync.Mutex // held during an exchange
	conn          *pgx.Conn
	unfinished    backendID // the backend of the last connection, unless it was closed in peace
	direct        bool      // conn talks to the server itself, not to a pooler
	notReplicated bool      // a notice said so
	closed        bool
}

// backendID names a server process for good: a pid alone is used again.
type backendID struct {
	pid     int32
	started int64 // microseconds since 1970; 0: not known
}

// An exchange is what a session runs: it may be run twice.
type exchange func(ctx context.Context, q querier, again bool) error

// do runs fn on the connection. If the connection breaks, fn's outcome is
// unknown; then the backend that may still be at it is ended first, and fn runs
// once more on a new one, with again = true. The error is what the server said,
// or what kept us from talking to it within patience.
func (s *session) do(patience time.Duration, fn exchange) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	connected := s.conn != nil && !s.conn.IsClosed()
	if !connected {
		patience = max(patience, connectTimeout)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	first, stop := ctx, context.CancelFunc(func() {})
	if connected { // if it died in silence, it must leave time for a second one
		first, stop = context.WithTimeout(ctx, patience*2/5)
	}
	err := s.once(first, patience, fn, false)
	stop()
	if err != nil && s.conn != nil && s.conn.IsClosed() && ctx.Err() == nil {
		err = s.once(ctx, patience, fn, true)
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w (%v)", errNoAnswer, err) //nolint:errorlint // the deadline was ours
	}
	return err
}

func (s *session) once(ctx context.Context, patience time.Duration, fn exchange, again bool) error {
	if err := s.connect(ctx, patience); err != nil {
		return err
	}
	s.notReplicated = false
	if err := fn(ctx, querier{s.conn, s.direct}, again); err != nil {
		return err
	}
	if s.notReplicated {
		return errNotReplicated
	}
	return nil
}

// reached reports whether the last exchange got an answer of the server.
func (s *session) reached() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn != nil && !s.conn.IsClosed()
}

// connect makes sure that there is a connection.
func (s *session) connect(ctx context.Context, patience time.Duration) error {
	if s.closed {
		return ErrClosed
	}
	if s.conn != nil && !s.conn.IsClosed() {
		return nil
	}
	s.conn = nil

	config := s.config.ConnConfig.Copy()
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = s.name
	}
	if s.config.BeforeConnect != nil {
		if err := s.config.BeforeConnect(ctx, config); err != nil {
			return fmt.Errorf("the pool's BeforeConnect: %w", err)
		}
	}
	config.ValidateConnect = both(config.ValidateConnect, requirePrimary)
	config.OnNotice = s.listen(config.OnNotice)
	config.StatementCacheCapacity = max(config.StatementCacheCapacity, 16)
	// Of several hosts a silent one must leave time for the others.
	share := patience / time.Duration(len(config.Fallbacks)+2)
	if config.ConnectTimeout <= 0 || config.ConnectTimeout > share {
		config.ConnectTimeout = share
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	if err := s.setUp(ctx, conn); err != nil {
		closeQuietly(conn)
		return err
	}
	s.conn = conn
	return nil
}

// setUp prepares a new connection. The caller's hook comes first, so that our
// settings stand.
func (s *session) setUp(ctx context.Context, conn *pgx.Conn) error {
	if s.config.AfterConnect != nil {
		if err := s.config.AfterConnect(ctx, conn); err != nil {
			return fmt.Errorf("the pool's AfterConnect: %w", err)
		}
	}
	q := querier{conn, false} // until we know
	var backend backendID
	if err := q.row(ctx, statement("backend", "")).Scan(&backend.pid, &backend.started); err != nil {
		return err
	}
	// A pooler shows another pid than it announced. Behind it a setting would
	// reach the clients that get the server connection next, and the backend is
	// not ours to end.
	s.direct = uint32(backend.pid) == conn.PgConn().PID()
	if !s.direct {
		s.unfinished = backendID{}
		return s.place.find(ctx, q)
	}
	if err := q.exec(ctx, statement("session", "")); err != nil {
		return err
	}
	if err := s.place.find(ctx, q); err != nil { // as long as search_path is the role's
		return err
	}
	if err := q.exec(ctx, statement("search_path", "")); err != nil {
		return err
	}
	if s.unfinished.started != 0 {
		ended := true // there is no row if it has gone by itself
		err := q.row(ctx, statement("terminate", ""), s.unfinished.pid, s.unfinished.started).Scan(&ended)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("end the backend of the broken connection: %w", err)
		}
		if !ended {
			return fmt.Errorf("the backend of the broken connection, pid %d, does not end", s.unfinished.pid)
		}
	}
	s.unfinished = backend
	return nil
}

// listen looks for the notice of a commit that was not waited for, and passes
// every notice on.
func (s *session) listen(theirs pgconn.NoticeHandler) pgconn.NoticeHandler {
	return func(conn *pgconn.PgConn, notice *pgconn.Notice) {
		// Our statements give no warning; one that a user's trigger raises has a context.
		if notice.Code == stateWarning && notice.SeverityUnlocalized == "WARNING" && notice.Where == "" {
			s.notReplicated = true // s.mu is held
		}
		if theirs != nil {
			theirs(conn, notice)
		}
	}
}

// close ends the connection; after that do returns ErrClosed.
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

// querier runs statements on a session. A pooler may hand each to another
// server connection, where a prepared statement would be missing.
type querier struct {
	conn   *pgx.Conn
	direct bool
}

func (q querier) args(args []any) []any {
	mode := pgx.QueryExecModeExec
	if q.direct {
		mode = pgx.QueryExecModeCacheStatement
	}
	return append([]any{mode}, args...)
}

func (q querier) query(ctx context.Context, sql string, args ...any) pgx.Rows {
	rows, _ := q.conn.Query(ctx, sql, q.args(args)...) // the rows carry the error
	return rows
}

func (q querier) row(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.conn.QueryRow(ctx, sql, q.args(args)...)
}

func (q querier) exec(ctx context.Context, sql string, args ...any) error {
	_, err := q.conn.Exec(ctx, sql, q.args(args)...)
	return err
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
