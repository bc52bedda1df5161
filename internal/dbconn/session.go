package dbconn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Timeout bounds an exchange with the server, so that a dead network is
// noticed.
const Timeout = 5 * time.Second

// connectTimeout is what a new connection may take at least, whatever the
// patience: to begin again would only take longer.
const connectTimeout = 2 * time.Second

// ErrNotReplicated means that the wait for a synchronous standby was cancelled.
var ErrNotReplicated = errors.New("the wait for a synchronous standby was cancelled: the commit may not survive a failover")

// A Session is one connection of our own to the server. It connects when it is needed, and
// again when the connection broke.
type Session struct {
	Dialer
	Place *Installation
	Async bool          // acquires and releases on it commit without waiting for the disk
	Again func()        // called when the connection was made anew; mu is held. nil: nothing is called
	Idle  time.Duration // closes the connection after so long without an exchange; 0: never

	mu            sync.Mutex // held during an exchange
	conn          *pgx.Conn
	unfinished    Backend // the backend of the last connection, unless it was closed in peace
	Direct        bool    // conn talks to the server itself, not to a pooler
	otherDefaults bool    // the role's transactions are not as ours must be
	notReplicated bool    // a notice said so
	connected     bool    // at least once
	closed        bool
	used          time.Time   // when the last exchange ended
	idling        *time.Timer // looks whether the connection is idle; nil: none is to be closed
}

// An Exchange is what a Session runs. It may run twice: again is true the second time.
type Exchange func(ctx context.Context, q Querier, again bool) error

// Do runs fn on the connection. If the connection breaks, fn's outcome is
// unknown; then the backend that may still be at it is ended first (not behind a
// pooler, where what arrives late is left to its TTL), and fn runs once more on a
// new one, with again = true. The error is what the server said, or what kept us
// from talking to it within patience.
func (s *Session) Do(patience time.Duration, fn Exchange) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	connected := s.conn != nil && !s.conn.IsClosed()
	if !connected {
		patience = max(patience, connectTimeout)
	}
	begun, first := time.Now(), patience
	if connected { // if it died in silence, it must leave time for a second one
		first = patience * 2 / 5
	}
	err := s.once(first, patience, fn, false)
	if err != nil && s.conn != nil && s.conn.IsClosed() {
		if left := patience - time.Since(begun); left > 0 {
			err = s.once(left, patience, fn, true)
		}
	}
	s.used = time.Now()
	if s.Idle > 0 && s.idling == nil && s.conn != nil {
		s.idling = time.AfterFunc(s.Idle, s.closeIdle)
	}
	return NoAnswer(err)
}

// closeIdle closes the connection if it is idle, else looks again when it may be.
func (s *Session) closeIdle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if left := s.Idle - time.Since(s.used); left > 0 {
		s.idling.Reset(left)
		return
	}
	s.idling = nil
	if s.conn == nil || s.conn.IsClosed() {
		return // what its backend may still be at is ended by the next connection
	}
	CloseQuietly(s.conn)
	s.conn, s.unfinished = nil, Backend{}
}

// NoAnswer returns err so that it does not match context.DeadlineExceeded, if that deadline
// was ours. Of several hosts one may be silent, and another say something:
// that stays.
func NoAnswer(err error) error {
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

// once runs fn once, within the time that is left of patience.
func (s *Session) once(left, patience time.Duration, fn Exchange, again bool) error {
	ctx := newDeadline(left)
	if err := s.connect(ctx.until, patience); err != nil {
		return err
	}
	ctx.guard(s.conn)
	s.notReplicated = false
	err := fn(ctx, Querier{Conn: s.conn, Direct: s.Direct, OtherDefaults: s.otherDefaults, Async: s.Async, Tracer: s.Config.ConnConfig.Tracer}, again)
	if state := lockerr.SQLState(err); !s.Direct && (state == lockerr.StateReadOnly || state == lockerr.StateUnsupported) {
		CloseQuietly(s.conn)                                                // the pooler leads to a standby now: choose a server anew
		return s.noPrimary(fmt.Errorf("%w (%v)", lockerr.ErrReadOnly, err)) //nolint:errorlint // by the server's own code it would be final
	}
	if err != nil {
		return err
	}
	if s.notReplicated {
		return ErrNotReplicated
	}
	return nil
}

// Reached reports whether the last exchange got an answer from the server.
func (s *Session) Reached() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn != nil && !s.conn.IsClosed()
}

// connect makes sure that there is a connection.
func (s *Session) connect(until time.Time, patience time.Duration) error {
	if s.closed {
		return lockerr.ErrClosed
	}
	if s.conn != nil && !s.conn.IsClosed() {
		return nil
	}
	s.conn = nil
	ctx, cancel := context.WithDeadline(context.Background(), until)
	defer cancel()

	conn, err := s.Dial(ctx, patience, func(notice *pgconn.Notice) {
		if CancelledReplication(notice) {
			s.notReplicated = true // s.mu is held
		}
	})
	if err != nil {
		return err
	}
	if err := s.setUp(ctx, conn); err != nil {
		CloseQuietly(conn)
		return err
	}
	s.conn = conn
	if s.connected && s.Again != nil {
		s.Again()
	}
	s.connected = true
	return nil
}

// setUp prepares a new connection.
func (s *Session) setUp(ctx context.Context, conn *pgx.Conn) error {
	q := Querier{Conn: conn} // until we know
	backend, asOurs, err := WhoServes(ctx, q)
	if err != nil {
		return err
	}
	s.otherDefaults = !asOurs
	// Behind a pooler a setting would reach the clients that get the server
	// connection next, so that they are made for each statement; and the backend is
	// not ours to end.
	s.Direct = backend.Serves(conn)
	if !s.Direct {
		s.unfinished = Backend{}
		return Outlast(ctx, func() error { return s.Place.Find(ctx, q) })
	}
	if err := Prepare(ctx, q, s.Place, s.Async); err != nil {
		return err
	}
	if err := s.unfinished.End(ctx, q); err != nil {
		return err
	}
	s.unfinished = backend
	return nil
}

// Close ends the connection. Do then returns [lockerr.ErrClosed].
func (s *Session) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.idling != nil {
		s.idling.Stop()
	}
	if s.conn != nil {
		CloseQuietly(s.conn)
	}
}
