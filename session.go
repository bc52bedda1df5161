package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// ioTimeout bounds an exchange with the server, so that a dead network is
// noticed.
const ioTimeout = 5 * time.Second

// connectTimeout is what a new connection may take at least, whatever the
// patience: to begin again would only take longer.
const connectTimeout = 2 * time.Second

// errNotReplicated means that a commit was not waited for.
var errNotReplicated = errors.New("the wait for a synchronous standby was cancelled: the commit may not survive a failover")

// A session is a connection of our own to the server: made as the caller's pool
// makes its own, but never from it and never given to it, so that neither an
// exhausted pool nor the settings of a role can cost a lock. It connects when it
// is needed, and again when it broke.
type session struct {
	dialer
	place *installation

	mu            sync.Mutex // held during an exchange
	conn          *pgx.Conn
	unfinished    backendID // the backend of the last connection, unless it was closed in peace
	direct        bool      // conn talks to the server itself, not to a pooler
	otherDefaults bool      // the role's transactions are not as ours must be
	notReplicated bool      // a notice said so
	closed        bool
}

// An exchange is what a session runs: it may be run twice.
type exchange func(ctx context.Context, q querier, again bool) error

// do runs fn on the connection. If the connection breaks, fn's outcome is
// unknown; then the backend that may still be at it is ended first (not behind a
// pooler, where what arrives late is left to its TTL), and fn runs once more on a
// new one, with again = true. The error is what the server said, or what kept us
// from talking to it within patience.
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
	return noAnswer(err)
}

// noAnswer returns err so that it does not match context.DeadlineExceeded, if the deadline
// that it tells of was ours. Of several hosts one may be silent, and another say something:
// that stays.
func noAnswer(err error) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &noAnswerError{err, append(lockerr.Without(err, context.DeadlineExceeded), lockerr.ErrNoAnswer)}
}

type noAnswerError struct {
	why  error
	rest []error // the parts of why that are not our deadline, and lockerr.ErrNoAnswer
}

func (e *noAnswerError) Error() string   { return fmt.Sprintf("%v: %v", lockerr.ErrNoAnswer, e.why) }
func (e *noAnswerError) Unwrap() []error { return e.rest }

// As finds the error of an attempt to connect, which tells of each host. Unwrap leaves it
// out because it wraps our deadline.
func (e *noAnswerError) As(target any) bool {
	failed, ok := target.(**pgconn.ConnectError)
	return ok && errors.As(e.why, failed)
}

func (s *session) once(ctx context.Context, patience time.Duration, fn exchange, again bool) error {
	if err := s.connect(ctx, patience); err != nil {
		return err
	}
	s.notReplicated = false
	err := fn(ctx, querier{s.conn, s.direct, s.otherDefaults}, again)
	if state := lockerr.SQLState(err); !s.direct && (state == lockerr.StateReadOnly || state == lockerr.StateUnsupported) {
		closeQuietly(s.conn)                                        // the pooler leads to a standby now: choose a server anew
		return s.noPrimary(fmt.Errorf("%w (%v)", lockerr.ErrReadOnly, err)) //nolint:errorlint // by the server's own code it would be final
	}
	if err != nil {
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
		return lockerr.ErrClosed
	}
	if s.conn != nil && !s.conn.IsClosed() {
		return nil
	}
	s.conn = nil

	conn, err := s.dial(ctx, patience, func(notice *pgconn.Notice) {
		if cancelledReplication(notice) {
			s.notReplicated = true // s.mu is held
		}
	})
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

// setUp prepares a new connection.
func (s *session) setUp(ctx context.Context, conn *pgx.Conn) error {
	q := querier{conn: conn} // until we know
	backend, asOurs, err := whoServes(ctx, q)
	if err != nil {
		return err
	}
	s.otherDefaults = !asOurs
	// Behind a pooler a setting would reach the clients that get the server
	// connection next, so that they are made for each statement; and the backend is
	// not ours to end.
	s.direct = backend.serves(conn)
	if !s.direct {
		s.unfinished = backendID{}
		return s.place.find(ctx, q)
	}
	const local = false
	if err := q.exec(ctx, statements.ConnSession.Text(), local); err != nil {
		return err
	}
	if err := s.place.find(ctx, q); err != nil { // as long as search_path is the role's
		return err
	}
	if err := q.exec(ctx, statements.ConnSearchPath.Text(), local); err != nil {
		return err
	}
	if err := s.unfinished.end(ctx, q); err != nil {
		return err
	}
	s.unfinished = backend
	return nil
}

// close ends the connection; after that do returns lockerr.ErrClosed.
func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.conn != nil {
		closeQuietly(s.conn)
	}
}
