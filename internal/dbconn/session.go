package dbconn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// Timeout bounds an exchange with the server, so that a dead network is
// noticed.
const Timeout = 5 * time.Second

// ErrNotReplicated means that the wait for a synchronous standby was cancelled: the outcome of what
// was committed is unknown. To ask again is to commit again, so the answer to that was replicated.
var ErrNotReplicated = errors.New("the wait for a synchronous standby was cancelled: the commit may not survive a failover")

// A Session is one connection of our own to the server. It connects when it is needed, and
// again when the connection broke.
//
//	none ──call──▶ connecting ──▶ connected ──▶ broken or idle ──▶ none
//	                   │
//	                   └▶ failed: the calls that wait for the attempt fail
//
// There is one attempt to connect at a time, in a goroutine. It outlives the calls that wait for
// it, and serves the next one: a server that is slow to accept connections has one process
// for each attempt, and to give up after half of the time would only double its work.
type Session struct {
	Dialer
	Place *Installation
	Async bool                 // acquires and releases on it commit without waiting for the disk
	Again func()               // called when the connection was made anew; mu is held. nil: nothing is called
	Idle  time.Duration        // closes the connection after so long without an exchange; 0: never
	Most  func() time.Duration // how long an attempt to connect that begins now may last; nil, or 0: as Dial says

	attempts Attempts
	unsynced atomic.Bool // a notice said that a commit was not replicated

	mu            sync.Mutex // held during an exchange, never while connecting
	conn          *pgx.Conn
	cluster       cluster  // where it ends
	attempt       *attempt // in flight; nil: none
	unfinished    Backend  // the backend of the last connection, unless it was closed in peace
	Direct        bool     // conn talks to the server itself, not to a pooler
	otherDefaults bool     // the role's transactions are not as ours must be
	connected     bool     // at least once
	closed        bool
	pace          time.Duration // how long the attempt took that made conn, or the last exchange on it
	used          time.Time     // when the last exchange ended
	idling        *time.Timer   // looks whether the connection is idle; nil: none is to be closed
}

// An attempt to connect.
type attempt struct {
	cancel context.CancelFunc
	done   chan struct{} // closed when it is over
	err    error         // why it failed, once done is closed
}

// An Exchange is what a Session runs. It may run twice: again is true the second time.
type Exchange func(ctx context.Context, q Querier, again bool) error

// Do runs fn on the connection, for at most patience, or for twice as long as the server took for
// its last answer if that is more and no renewal shares the connection: a busy server needs as
// long for the next one. wait bounds how long Do waits for the connection, if there is none;
// with Now it does not. If the connection breaks,
// fn's outcome is unknown; then the backend that may still be at it is ended first (not behind
// a pooler, where what arrives late is left to its TTL), and fn runs once more on a new one,
// with again = true. The error is what the server said, or what kept us from talking to it;
// [ErrConnecting] if wait has ended before.
func (s *Session) Do(wait context.Context, patience time.Duration, fn Exchange) error {
	first := patience * 2 / 5 // if the connection died in silence, it must leave time for a second exchange
	fresh, err := s.lockConnected(wait)
	if err != nil {
		return err
	}
	if fresh {
		first = patience
	}
	broke, err := s.exchange(first, fn, false)
	if broke {
		if _, err := s.lockConnected(wait); err != nil {
			return err
		}
		_, err = s.exchange(patience, fn, true)
	}
	return NoAnswer(err)
}

// exchange runs fn once, and unlocks s.mu. broke reports whether the connection has ended.
func (s *Session) exchange(left time.Duration, fn Exchange, again bool) (broke bool, err error) {
	defer s.mu.Unlock()
	if s.Most == nil { // nothing on it is about to expire
		left = max(left, min(2*s.pace, DialTime))
	}
	began := time.Now()
	err = s.once(left, fn, again)
	s.used = time.Now()
	s.pace = s.used.Sub(began)
	if s.Idle > 0 && s.idling == nil {
		s.idling = time.AfterFunc(s.Idle, s.closeIdle)
	}
	return err != nil && s.conn.IsClosed(), err
}

// DoWithin is Do for a call that waits for the connection as long as for the answer.
func (s *Session) DoWithin(patience time.Duration, fn Exchange) error {
	var wait clock.Deadline
	wait.Start(context.Background(), patience, lockerr.ErrNoAnswer)
	defer wait.Stop()
	return s.Do(&wait, patience, fn)
}

// lockConnected locks s.mu when there is a connection, for which it waits until wait ends.
// fresh reports whether there was none at first.
func (s *Session) lockConnected(wait context.Context) (fresh bool, err error) {
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return fresh, lockerr.ErrClosed
		}
		if s.conn != nil && !s.conn.IsClosed() && s.Place.elsewhere(s.cluster) {
			CloseQuietly(s.conn) // its name leads elsewhere now
			s.unfinished = Backend{}
		}
		if s.conn != nil && !s.conn.IsClosed() {
			return fresh, nil
		}
		a := s.beginLocked()
		s.mu.Unlock()
		fresh = true
		select {
		case <-a.done:
			if a.err != nil {
				return fresh, a.err
			}
		case <-wait.Done():
			return fresh, s.attempts.left(wait)
		}
	}
}

// Begin reports whether there is a connection. If not, it begins an attempt to make one, unless one is
// in flight.
func (s *Session) Begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	connected := s.conn != nil && !s.conn.IsClosed()
	if !connected && !s.closed {
		s.beginLocked()
	}
	return connected
}

// beginLocked returns the attempt in flight, or begins one.
func (s *Session) beginLocked() *attempt {
	if s.attempt != nil {
		return s.attempt
	}
	s.attempts.Dialer = s.Dialer
	ctx, cancel := context.WithCancel(context.Background())
	s.attempt = &attempt{cancel: cancel, done: make(chan struct{})}
	go s.connect(ctx, s.attempt, s.unfinished)
	return s.attempt
}

// connect makes an attempt, which ends the backend old first.
func (s *Session) connect(ctx context.Context, a *attempt, old Backend) {
	defer a.cancel()
	dial := Dial{Place: s.Place, Heard: func(notice *pgconn.Notice) {
		if CancelledReplication(notice) {
			s.unsynced.Store(true)
		}
	}}
	if s.Most != nil {
		dial.Most = s.Most()
	}
	began := time.Now()
	conn, err := s.attempts.Connect(ctx, dial, func(ctx context.Context, c *Conn) error { return s.setUp(ctx, c, old) })
	s.mu.Lock()
	defer s.mu.Unlock()
	defer close(a.done)
	s.attempt = nil
	if err == nil && s.closed {
		CloseQuietly(conn.Conn)
		err = lockerr.ErrClosed
	}
	if a.err = err; err != nil {
		return
	}
	s.conn, s.cluster, s.Direct, s.otherDefaults = conn.Conn, conn.cluster, conn.Direct(), conn.OtherDefaults
	s.pace = time.Since(began)
	s.unfinished = Backend{}
	if s.Direct {
		s.unfinished = conn.Backend
	}
	if s.connected && s.Again != nil {
		s.Again()
	}
	s.connected = true
}

// setUp makes a new connection ready.
func (s *Session) setUp(ctx context.Context, c *Conn, old Backend) error {
	// Behind a pooler a setting would reach the clients that get the server
	// connection next, so that they are made for each statement; and the backend is
	// not ours to end.
	if c.Direct() {
		_, err := c.Own(ctx, Own{Place: s.Place, Session: OwnSession(), Async: s.Async, Old: old})
		if c.switched = errors.Is(err, lockerr.ErrPooler); !c.switched {
			return err
		}
	}
	_, err := s.Place.choose(c)
	return err
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

// once runs fn once. s.mu is held.
func (s *Session) once(left time.Duration, fn Exchange, again bool) error {
	ctx := newDeadline(left)
	ctx.guard(s.conn)
	s.unsynced.Store(false)
	err := fn(ctx, Querier{Conn: s.conn, Direct: s.Direct, OtherDefaults: s.otherDefaults, Async: s.Async, Tracer: s.Config.ConnConfig.Tracer}, again)
	if state := lockerr.SQLState(err); !s.Direct && (state == lockerr.StateReadOnly || state == lockerr.StateUnsupported) {
		CloseQuietly(s.conn)                                                // the pooler leads to a standby now: choose a server anew
		return s.noPrimary(fmt.Errorf("%w (%v)", lockerr.ErrReadOnly, err)) //nolint:errorlint // by the server's own code it would be final
	}
	if err != nil {
		return err
	}
	if s.unsynced.Load() {
		return ErrNotReplicated
	}
	return nil
}

// Explain is that of [Attempts].
func (s *Session) Explain(err error) error { return s.attempts.Explain(err) }

// Reached reports whether the last exchange got an answer from the server.
func (s *Session) Reached() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn != nil && !s.conn.IsClosed()
}

// Close ends the connection, and the attempt to make one. Do then returns [lockerr.ErrClosed].
func (s *Session) Close() {
	s.mu.Lock()
	s.closed = true
	if s.idling != nil {
		s.idling.Stop()
	}
	if s.conn != nil {
		CloseQuietly(s.conn)
	}
	a := s.attempt
	s.mu.Unlock()
	if a != nil {
		a.cancel()
		<-a.done
	}
}
