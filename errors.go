package pgxlock

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// What can go wrong, for errors.Is. Errors of this package wrap one of these, or
// the error of the server or the network as it came, or say which argument is
// wrong, in an [*Error].
//
// Try again later after ErrNotAcquired, ErrLimited and ErrUnavailable. After
// ErrStaleSnapshot, and SQLSTATE 40001 or 40P01, begin the transaction again; after
// ErrLost, do the work anew under a new lock. The others stay until something is
// changed: the program, the connection string, a right, or the schema.
var (
	// ErrNotAcquired: somebody else holds the key. After a wait that ended with
	// its context the error matches the context's error as well. A server that
	// cannot be reached is never reported as busy.
	ErrNotAcquired = errors.New("pgxlock: not acquired")

	// ErrLost: the lock is, or may be, no longer ours. It is never the error of a call
	// that returns no lock.
	ErrLost = errors.New("pgxlock: lock lost")

	// ErrReleased: the lock was given back by Release.
	ErrReleased = errors.New("pgxlock: lock already released")

	// ErrClosed: Close was called, of the Locker, the [Limiter] or the [Once].
	ErrClosed = errors.New("pgxlock: closed")

	// ErrDeadlock: the wait would not end. The context comes from a lock on the
	// same key, so that it would be for ourselves (a context from
	// context.WithoutCancel comes from it, too); it comes from a lock for which the
	// holder of the key waits in the end; the transaction holds the key shared; or
	// the server found a circle of transactions that wait for each other
	// (SQLSTATE 40P01). After the second and the last one, release what is held, or roll
	// back, and try again.
	ErrDeadlock = errors.New("pgxlock: deadlock")

	// ErrStaleSnapshot: the transaction's snapshot is older than the lock. Begin
	// the transaction again; one to be fenced, after the lock was acquired.
	ErrStaleSnapshot = errors.New("pgxlock: the transaction's snapshot is older than the lock")

	// ErrReadOnly: the server is a standby, or the transaction is read-only. If none of
	// several hosts is a primary, as during a failover, the error also matches
	// ErrUnavailable.
	ErrReadOnly = errors.New("pgxlock: read-only: a standby, or a read-only transaction; connect to the primary, in read-write mode")

	// ErrPooler: a pooler is in between that gives the server's end of a connection
	// to others, with the locks that it holds.
	ErrPooler = errors.New("pgxlock: session locks do not work through a pooler in transaction or statement mode")

	// ErrLimited: more than the limit of a [Limiter] allows. RetryAfter in the [*Error]
	// says after how long it would not be. After a wait that ended with its context
	// the error matches the context's error as well.
	ErrLimited = errors.New("pgxlock: limited")

	// ErrMaxLocks: the Locker has as many locks as AdvisoryConfig.MaxLocks allows.
	ErrMaxLocks = errors.New("pgxlock: the Locker has as many locks as it may")

	// ErrUnavailable: no server answered, or not in time; it has no free connection, starts
	// or stops; none of several hosts is a primary; or the connection broke, or the server
	// ended it. The same call may succeed later. Every call that asks the server may return it: those of
	// Lockers, Limiters, Onces, claims and Monitors. What the call was to do may have been
	// done, but that an acquire that fails holds nothing; a lock that is held stays so until
	// [ErrLost] says otherwise. A call whose context has ended returns the context's error
	// instead.
	//
	// A user, password, database, right or setting that the server refuses is not
	// ErrUnavailable, because it stays refused: the error wraps the server's, with its
	// SQLSTATE (28P01, 28000, 3D000, 42501), and says what to change. It ends every wait.
	ErrUnavailable = errors.New("pgxlock: the database cannot be reached")

	// ErrSchema: the tables and functions are missing, out of date, or in need
	// of the repair that migrations.Up does.
	ErrSchema = errors.New("pgxlock: schema missing or out of date; run migrations.Up or pgxlock migrate up")
)

// Error says what was attempted, on which key, and why it failed. Every call that can fail
// returns one, except that an error of a callback comes back as it is. Err, and all
// that it wraps, are found by errors.Is and errors.As.
type Error struct {
	Op   string // "acquire", "renew", "fence", ...
	Key  string // empty where no single key is concerned
	Kind Kind   // of the lock; 0 for a claim, a limit and a run

	// Holder and RetryAfter tell of whoever is in the way, with ErrNotAcquired:
	// its holder id, which begins with its owner, and how long its lease may
	// last at most if it is not renewed. Both are zero if it was just acquiring.
	// With ErrLimited RetryAfter is when as many events could happen at once, if
	// nobody else takes any meanwhile.
	Holder     string
	RetryAfter time.Duration

	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("pgxlock: " + e.Op)
	if e.Key != "" {
		b.WriteString(" " + lockkey.Shown(e.Key))
	}
	b.WriteString(": " + strings.TrimPrefix(oneline.Join(e.Err.Error()), "pgxlock: "))
	if e.Holder != "" {
		fmt.Fprintf(&b, " (held by %s", oneline.Join(e.Holder))
		if e.RetryAfter > 0 {
			fmt.Fprintf(&b, " for up to %s", e.RetryAfter.Round(time.Millisecond))
		}
		b.WriteString(")")
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// The SQLSTATEs that we tell apart. LK is ours; the rest is in
// https://www.postgresql.org/docs/current/errcodes-appendix.html.
const (
	stateNotHeld           = "LK001"
	stateStaleSnapshot     = "LK002"
	stateTokensNeedRepair  = "LK003"
	stateReadOnly          = "25006"
	stateUnsupported       = "0A000" // of set_transaction.sql: the server is a standby
	stateNoRights          = "42501"
	stateSerialization     = "40001"
	stateDeadlock          = "40P01"
	stateLockNotAvailable  = "55P03" // lock_timeout
	stateAborted           = "25P02"
	stateCanceled          = "57014" // statement_timeout
	stateOutOfMemory       = "53200" // of the lock table, too
	stateUndefinedTable    = "42P01"
	stateUndefinedFunction = "42883"
	stateUndefinedObject   = "42704" // the row type of a table of ours, too
	stateInvalidSchema     = "3F000"
	stateNoStatement       = "26000" // of EXECUTE: there is no such prepared statement
)

// sqlState returns the SQLSTATE of the server's error that err wraps, whichever
// driver it came through; "" if there is none.
func sqlState(err error) string {
	if e, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err); ok {
		return e.SQLState()
	}
	return ""
}

// fail makes the error that a call returns; nil of nil.
func fail(op, key string, kind Kind, err error) error {
	if err == nil {
		return nil
	}
	e := &Error{Op: op, Key: key, Kind: kind, Err: typed(err)}
	if busy, ok := errors.AsType[*busyError](err); ok {
		e.Holder, e.RetryAfter = busy.holder, max(busy.remaining, 0)
	}
	if limited, ok := errors.AsType[*limitedError](err); ok {
		e.RetryAfter = limited.after
	}
	return e
}

// typed adds the sentinel that an error of the server stands for, if any.
func typed(err error) error {
	if errors.Is(err, ErrUnavailable) {
		return err // it was typed before
	}
	if unreachable(err) {
		return as(ErrUnavailable, err)
	}
	if _, said := errors.AsType[*deniedError](err); said {
		return err
	}
	if remedy := lockerr.Remedy(err); remedy != "" {
		return &deniedError{err, remedy}
	}
	if lacksSchema(err) {
		return as(ErrSchema, err)
	}
	var sentinel error
	switch sqlState(err) {
	case stateNotHeld:
		sentinel = ErrLost
	case stateStaleSnapshot:
		sentinel = ErrStaleSnapshot
	case stateReadOnly:
		sentinel = ErrReadOnly
	case stateDeadlock:
		sentinel = ErrDeadlock
	case stateOutOfMemory:
		return &deniedError{err, "the server's lock table may be full: lock fewer keys at a time, or raise its max_locks_per_transaction"}
	case stateAborted:
		return &deniedError{err, "an earlier statement failed: roll back"}
	default:
		return err
	}
	return as(sentinel, err)
}

// lacksSchema reports whether the server misses something that the migrations make, or
// that repair_lock_tokens() mends.
func lacksSchema(err error) bool {
	switch sqlState(err) {
	case stateTokensNeedRepair, stateUndefinedTable, stateUndefinedFunction, stateUndefinedObject, stateInvalidSchema:
		return true
	}
	return false
}

// A deniedError says what to do about what the server refuses.
type deniedError struct {
	err    error
	remedy string
}

func (e *deniedError) Error() string { return e.err.Error() + "; " + e.remedy }
func (e *deniedError) Unwrap() error { return e.err }

// as makes err match a sentinel.
func as(sentinel, err error) error {
	if errors.Is(err, sentinel) {
		return err // it was typed before
	}
	return fmt.Errorf("%w: %w", sentinel, err)
}

// unreachable reports whether no server could be asked, and nothing else is known.
func unreachable(err error) bool {
	for _, known := range []error{ErrNotAcquired, ErrLost, ErrReadOnly, ErrPooler} {
		if errors.Is(err, known) {
			return false
		}
	}
	if lockerr.Denied(err) || lacksSchema(err) { // which ends a session that cannot give back what it took
		return false
	}
	for _, ours := range []error{errSessionEnded, errNoAnswer, errGrantLost} {
		if errors.Is(err, ours) {
			return true
		}
	}
	return lockerr.Unreachable(err)
}

// transient reports whether what failed with err may do better later: the key is busy, no
// server could be asked, or it is short of something, or all that can be reached is a
// standby, which may be promoted.
func transient(err error) bool {
	if _, ok := errors.AsType[*busyError](err); ok {
		return true
	}
	for _, final := range []error{ErrSchema, ErrClosed, ErrPooler, ErrMaxLocks, errors.ErrUnsupported} {
		if errors.Is(err, final) {
			return false
		}
	}
	return errors.Is(err, ErrUnavailable) || unreachable(err) || lockerr.Transient(err)
}
