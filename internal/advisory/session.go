package advisory

import (
	"context"
	"errors"
	"io"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A session is the connection of the lock session, which holds the advisory locks. It sends
// function calls and statements of the simple protocol, because the server receives each of
// these whole or not at all. The server does not end a session for silence between the
// parts of an extended query: a client that froze there would keep its locks.
// https://www.postgresql.org/docs/current/protocol-flow.html
type session struct {
	conn      *pgx.Conn
	net       net.Conn
	writer    io.Writer          // net: messages are built here, and the frontend would copy them
	frontend  *pgproto3.Frontend // reads
	readable  func() bool        // whether there is something to read; nil: nobody can tell, or should look
	session   int64              // a random number that it chose
	backend   int32              // the pid of its backend
	made      time.Duration      // the time before the last statement that set it up
	functions functions          // for a message with few requests; nil: it uses many, because the connection may not end in the backend
	many      [3]string          // the parts of the statement for many requests, around the functions and the locks
	patience  time.Duration      // the least time that an answer may take
	until     time.Time          // the deadline that is set; at most a quarter later
}

// send sends a message. The connection cannot be used after an error.
func (s *session) send(m *message) error {
	if now := time.Now(); s.until.Sub(now) < s.patience { // setting a deadline each time would cost more than the rest
		s.until = now.Add(s.patience * 5 / 4)
		if err := s.net.SetDeadline(s.until); err != nil {
			return err
		}
	}
	_, err := s.writer.Write(m.bytes)
	return err
}

// receive reads the answer. After a timeout it can be called again, and continues where it
// stopped.
func (s *session) receive(m *message) error {
	for {
		received, err := s.frontend.Receive()
		if err != nil {
			return err
		}
		switch received := received.(type) {
		case *pgproto3.DataRow:
			if m.batch {
				m.answer(received.Values, s.backend)
			} else {
				m.keep(received.Values)
			}
		case *pgproto3.ErrorResponse:
			pgErr := pgconn.ErrorResponseToPgError(received)
			if fatal(pgErr) {
				return pgErr
			}
			if m.err == nil {
				m.err = pgErr
			}
		case *pgproto3.NoticeResponse:
			warning := pgconn.ErrorResponseToPgError((*pgproto3.ErrorResponse)(received))
			if fatal(warning) {
				return warning
			}
			m.lazy = m.lazy || dbconn.CancelledReplication((*pgconn.Notice)(warning))
		case *pgproto3.FunctionCallResponse:
			m.returned(received.Result)
		case *pgproto3.ReadyForQuery:
			if m.parts--; m.parts == 0 {
				return nil
			}
		}
	}
}

// listen reads until the deadline, or until the session has ended.
func (s *session) listen() error {
	for {
		received, err := s.frontend.Receive()
		if err != nil {
			return err
		}
		switch received := received.(type) {
		case *pgproto3.ErrorResponse:
			return pgconn.ErrorResponseToPgError(received)
		case *pgproto3.NoticeResponse:
			if warning := pgconn.ErrorResponseToPgError((*pgproto3.ErrorResponse)(received)); fatal(warning) {
				return warning
			}
		}
	}
}

// fatal reports whether the session has ended with this message of the server. A server that
// stops immediately says so in a warning.
func fatal(err *pgconn.PgError) bool {
	switch err.SeverityUnlocalized {
	case "FATAL", "PANIC":
		return true
	}
	return lockerr.SessionEnded(err.Code)
}

// interrupt makes a read end with a timeout now.
func (s *session) interrupt() { _ = s.net.SetReadDeadline(time.Unix(1, 0)) }

// readFor makes a read end with a timeout after d; 0: never.
func (s *session) readFor(d time.Duration) {
	s.until = time.Time{} // so that the next message sets it again
	var deadline time.Time
	if d > 0 {
		deadline = time.Now().Add(d)
	}
	_ = s.net.SetReadDeadline(deadline)
}

// resume undoes an interrupt, and reports whether the deadline itself has passed.
func (s *session) resume() (over bool) {
	_ = s.net.SetReadDeadline(s.until)
	return !time.Now().Before(s.until)
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

// close ends the session; whether the server receives that does not matter.
func (s *session) close() {
	_ = s.net.SetDeadline(time.Now().Add(time.Second))
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.conn.Close(ctx)
}
