// Package lockerr says what errors mean: those of the server, the network and the driver,
// and the sentinels of package pgxlock, which Typed adds to them. Code that depends on what
// an error means asks here, so that no two places disagree.
//
//	Unreachable  no server could be asked: try again later
//	Denied       the server refuses the connection, or a right, until somebody changes something
//	Transient    the same call may succeed later: Unreachable, and what passes by itself
//
// No error is both Unreachable and Denied. The SQLSTATEs are those of
// https://www.postgresql.org/docs/current/errcodes-appendix.html.
//
// The package exports more than 25 names because sentinels and SQLSTATEs are names: one list
// of each is the point of it.
package lockerr

import (
	"context"
	"crypto/tls"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Pages that errors, advice and help point to: a user of the program or the module need not
// have its source.
const (
	docs          = "https://github.com/pgxlock/pgxlock/blob/main/docs/"
	ManualDoctor  = docs + "doctor.md"
	ManualEngines = docs + "engines.md"
	ManualInstall = docs + "install.md"
	ManualRights  = docs + "rights.md"
	ManualTrust   = docs + "trust.md"
)

// States yields the SQLSTATEs of all errors of the server that err wraps, whichever driver
// they came through: an attempt to connect to several hosts has one for each.
func States(err error) iter.Seq[string] {
	return func(yield func(string) bool) { walk(err, yield) }
}

func walk(err error, yield func(string) bool) bool {
	if e, ok := err.(interface{ SQLState() string }); ok && e.SQLState() != "" && !yield(e.SQLState()) {
		return false
	}
	switch e := err.(type) { //nolint:errorlint // the tree is walked here
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return walk(inner, yield)
		}
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			if !walk(inner, yield) {
				return false
			}
		}
	}
	return true
}

// Without returns the parts of err that do not match target: whole ones where that is
// possible.
func Without(err, target error) (parts []error) {
	if !errors.Is(err, target) {
		return []error{err}
	}
	switch e := err.(type) { //nolint:errorlint // the tree is walked here
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return Without(inner, target)
		}
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			parts = append(parts, Without(inner, target)...)
		}
	}
	return parts
}

// SessionEnded reports whether the server ends a session with that SQLSTATE: terminated by
// an operator, by a shutdown or crash, with its database, or by one of the timeouts that end
// sessions.
func SessionEnded(state string) bool {
	switch state {
	case "57P01", "57P02", "57P04", "57P05", "25P03", "25P04":
		return true
	}
	return false
}

// Unreachable reports whether no server could be asked, and nothing else is known: none
// answered, or the one that did has no free connection, starts or stops; or the connection
// broke, or the server ended it.
func Unreachable(err error) bool {
	for _, known := range []error{ErrNotAcquired, ErrLost, ErrReadOnly, ErrPooler, errors.ErrUnsupported} {
		if errors.Is(err, known) {
			return false
		}
	}
	if Denied(err) || lacksSchema(err) { // which ends a session that cannot release what it took
		return false
	}
	for _, ours := range []error{ErrSessionEnded, ErrNoAnswer, ErrGrantLost} {
		if errors.Is(err, ours) {
			return true
		}
	}
	return silent(err)
}

// silent reports whether no server answered, or the connection to it broke.
func silent(err error) bool {
	if connecting(err) { // whatever else a server says then, it does not let anybody in now
		return !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
	}
	for state := range States(err) { // the first one counts
		return SessionEnded(state) || strings.HasPrefix(state, "08") || state == "57P03" || state == "53300"
	}
	_, network := errors.AsType[*net.OpError](err) // not net.Error, which every errno of a file is as well
	return network || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, driver.ErrBadConn)
}

// Denied reports whether the server refuses the connection for what it was given, or the
// role a right: the same call fails again until somebody changes that. Of several hosts one
// that says so is enough: they are one cluster, and TLS and plain attempts, or IPv4 and IPv6,
// are several, too.
func Denied(err error) bool { return Remedy(err) != "" }

// A RefusedError says which right a role lacks.
type RefusedError struct {
	Err  error
	Lack string // what gives it the right
}

func (e *RefusedError) Error() string { return e.Err.Error() + "; " + e.Lack }

// Unwrap returns what was refused.
func (e *RefusedError) Unwrap() error { return e.Err }

// Remedy returns what gives the role the right.
func (e *RefusedError) Remedy() string { return e.Lack }

// Grant is the Remedy of a right that the role lacks on something of pgxlock's.
const Grant = "as the owner, SELECT grant_locks('<role>', 'application'), or 'monitoring' or 'administration', gives a role its rights: see " + ManualRights

// Remedy says what to do about an error that is Denied; "" of any other.
func Remedy(err error) string {
	if known, ok := errors.AsType[interface {
		error
		Remedy() string
	}](err); ok { // it knows which right
		return known.Remedy()
	}
	for state := range States(err) {
		switch {
		case state == "28P01":
			return "check the user and the password"
		case strings.HasPrefix(state, "28"):
			return "check the user, the role's LOGIN, and the server's pg_hba.conf"
		case strings.HasPrefix(state, "3D"):
			return "create the database, or correct its name in the connection string"
		case state == "42501" && connecting(err) && raisedIn(err, "call_string_check_hook"): // of the setting role
			return "GRANT that role to the user, or leave it out of the connection string"
		case state == "42501" && connecting(err):
			return "GRANT CONNECT ON DATABASE to the role"
		case state == "42501" && raisedIn(err, "check_enable_rls"): // row-level security
			return "it could hide who holds a lock: DISABLE ROW LEVEL SECURITY on that table, or see " + ManualRights + "#row-level-security"
		case state == "42501":
			return Grant
		case (strings.HasPrefix(state, "22") || strings.HasPrefix(state, "42") || state == "55P02") && connecting(err) && !errors.Is(err, errors.ErrUnsupported):
			return "the server refuses a setting of the connection string; correct it, or leave it out"
		}
	}
	return ""
}

// raisedIn reports whether that routine of the server raised the error.
func raisedIn(err error, routine string) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Routine == routine
}

// Untrusted reports whether a server answered whose certificate is not trusted.
func Untrusted(err error) bool {
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	return untrusted
}

// connecting reports whether err is why no connection could be made.
func connecting(err error) bool {
	_, failed := errors.AsType[*pgconn.ConnectError](err)
	return failed
}

// Transient reports whether the same call may succeed later: no server could be asked, or it
// is short of something, or only a standby can be reached, which may be promoted. An error
// without an SQLSTATE that is not known to be permanent is transient.
func Transient(err error) bool {
	for _, final := range []error{ErrSchema, ErrClosed, ErrPooler, ErrMaxLocks, errors.ErrUnsupported} {
		if errors.Is(err, final) {
			return false
		}
	}
	if errors.Is(err, ErrUnavailable) || Unreachable(err) {
		return true
	}
	if Denied(err) {
		return false
	}
	if silent(err) {
		return true
	}
	for state := range States(err) { // the first one counts
		for _, passes := range []string{"08", "53", "57", "55P03"} { // connection, resources, operator, a migration's locks
			if strings.HasPrefix(state, passes) {
				return true
			}
		}
		return false
	}
	return true
}

// TooSlow reports whether the server did not end a statement in time, by its clock or by ours:
// there was a connection.
func TooSlow(err error) bool {
	return !connecting(err) && (SQLState(err) == StateCanceled || errors.Is(err, ErrNoAnswer))
}

// errLocked is why the server gave up a statement of ours: it waited for a lock that another
// session has, on a table of ours or on a row that was locked by hand.
var errLocked = errors.New("another session keeps a table or a row of pgxlock locked")

// Locked makes an error of a statement of ours match ErrUnavailable if the statement waited for
// another session's lock until lock_timeout, or until the server ended a deadlock. Both are over
// when that session ends its transaction, as maintenance of a table does.
func Locked(err error) error {
	if state := SQLState(err); state == StateLockNotAvailable || state == StateDeadlock {
		return &lockedError{err}
	}
	return err
}

// A lockedError matches ErrUnavailable and does not say so: the database could be reached.
type lockedError struct{ err error }

func (e *lockedError) Error() string   { return errLocked.Error() + ": " + e.err.Error() }
func (e *lockedError) Unwrap() []error { return []error{ErrUnavailable, errLocked, e.err} }

// IsLocked reports whether Locked found the error to be of that kind.
func IsLocked(err error) bool { return errors.Is(err, errLocked) }

// SQLState returns the SQLSTATE of the server's error that err wraps, whichever
// driver it came through; "" if there is none.
func SQLState(err error) string {
	if e, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return e.SQLState()
	}
	return ""
}

// Refused reports whether err is the server's word that nothing was done. A
// FATAL error may come after a commit.
func Refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.SeverityUnlocalized == "ERROR"
}

// Spoilt reports whether err may be about one entry only: bad input, a token that
// does not fit its row, or more locks than the server has room for.
func Spoilt(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && Refused(err) && (strings.HasPrefix(pgErr.Code, "22") || pgErr.Code == StateTokensNeedRepair || pgErr.Code == StateOutOfMemory)
}

// ContextError returns ctx's error with its cause.
func ContextError(ctx context.Context) error {
	if err, cause := ctx.Err(), context.Cause(ctx); !errors.Is(cause, err) {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return ctx.Err()
}

// WithContextError makes sure that err, if there is one, says so if ctx has ended: lib/pq, and
// pgx where it is told to send requests to cancel, only say that the server cancelled.
func WithContextError(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil || errors.Is(err, ctx.Err()) {
		return err
	}
	return fmt.Errorf("%w: %w", ContextError(ctx), err)
}
