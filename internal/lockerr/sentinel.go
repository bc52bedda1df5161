package lockerr

import (
	"context"
	"errors"
	"fmt"
)

// The sentinels of package pgxlock, whose documentation they carry.
var (
	ErrNotAcquired   = errors.New("pgxlock: not acquired")
	ErrLost          = errors.New("pgxlock: lock lost")
	ErrReleased      = errors.New("pgxlock: lock already released")
	ErrClosed        = errors.New("pgxlock: closed")
	ErrDeadlock      = errors.New("pgxlock: deadlock")
	ErrStaleSnapshot = errors.New("pgxlock: the transaction's snapshot is older than the lock")
	ErrReadOnly      = errors.New("pgxlock: read-only: a standby, or a read-only transaction; connect to the primary, in read-write mode")
	ErrPooler        = errors.New("pgxlock: advisory locks do not work through a pooler in transaction or statement mode")
	ErrLimited       = errors.New("pgxlock: rate limit exceeded")
	ErrOtherRequest  = errors.New("pgxlock: the key was claimed for another request")
	ErrEvicted       = errors.New("pgxlock: evicted")
	ErrMaxLocks      = errors.New("pgxlock: lock limit reached")
	ErrUnavailable   = errors.New("pgxlock: the database cannot be reached")
	ErrSchema        = errors.New("pgxlock: schema missing or out of date; run migrations.Up or pgxlock migrate up")
)

// Causes that a caller finds only inside of others.
var (
	// ErrNoAnswer means that no answer came from the server in time. It does not match
	// context.DeadlineExceeded: no deadline of a caller has passed.
	ErrNoAnswer = errors.New("no answer from the server in time")

	// ErrGrantLost means that the lock was lost before the call could return it.
	// It is not ErrLost, which is for a lock that a caller had.
	ErrGrantLost = errors.New("the lock was lost before the call could return it")

	// ErrSessionEnded means that the session that holds advisory locks has ended.
	ErrSessionEnded = errors.New("the session that holds the locks has ended")

	// ErrRowLocked is why a renewal is tried again soon: another transaction, as one that renews
	// a share, has locked the row of the lease.
	ErrRowLocked = errors.New("the row of the lease is locked by another transaction")
)

// ErrWorker is what a worker of Citus is refused with. As a standby it is no place to lock.
var ErrWorker = fmt.Errorf("%w: the server is a Citus worker, where a lock excludes no caller on another node: connect to the coordinator", ErrReadOnly)

// errNilContext is what a call returns that was given no context.
var errNilContext = errors.New("the context is nil; pass context.Background() if nothing cancels the call")

// MissingContext returns an error if ctx is nil.
func MissingContext(ctx context.Context) error {
	if ctx == nil {
		return errNilContext
	}
	return nil
}

// The SQLSTATEs that are told apart. LK is ours; the rest is in
// https://www.postgresql.org/docs/current/errcodes-appendix.html.
const (
	StateNotHeld           = "LK001"
	StateStaleSnapshot     = "LK002"
	StateTokensNeedRepair  = "LK003"
	StateTokensUsedUp      = "2200H" // the numbers of an epoch of tokens
	StateReadOnly          = "25006"
	StateUnsupported       = "0A000" // of conn/read_write.sql: the server is a standby
	StateSyntax            = "42601" // of ours: the server is no PostgreSQL
	StateNoRights          = "42501"
	StateSerialization     = "40001"
	StateDeadlock          = "40P01"
	StateLockNotAvailable  = "55P03" // lock_timeout
	StateNoTransaction     = "25P01"
	StateAborted           = "25P02"
	StateCanceled          = "57014" // statement_timeout
	StateOutOfMemory       = "53200" // of the lock table, too
	StateUndefinedTable    = "42P01"
	StateUndefinedFunction = "42883"
	StateUndefinedObject   = "42704" // the row type of a table of ours, too
	StateInvalidSchema     = "3F000"
	StateNoStatement       = "26000" // of EXECUTE: there is no such prepared statement
	StateInvalidParameter  = "22023" // of our functions: an argument is wrong
)
