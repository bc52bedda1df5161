package pgxlock

import (
	"cmp"
	"context"
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
	ErrNotAcquired = lockerr.ErrNotAcquired

	// ErrLost: the lock is, or may be, no longer ours. It is never the error of a call
	// that returns no lock.
	ErrLost = lockerr.ErrLost

	// ErrReleased: the lock was given back by Release.
	ErrReleased = lockerr.ErrReleased

	// ErrClosed: Close was called, of the Locker, the Limiter or the Runner (package once).
	ErrClosed = lockerr.ErrClosed

	// ErrDeadlock: the wait would not end. The context comes from a lock on the
	// same key, so that it would be for ourselves (a context from
	// context.WithoutCancel comes from it, too); it comes from a lock for which the
	// holder of the key waits in the end; the transaction holds the key shared; or
	// the server found a circle of transactions that wait for each other
	// (SQLSTATE 40P01). After the second and the last one, release what is held, or roll
	// back, and try again.
	ErrDeadlock = lockerr.ErrDeadlock

	// ErrStaleSnapshot: the transaction's snapshot is older than the lock. Begin
	// the transaction again; one to be fenced, after the lock was acquired.
	ErrStaleSnapshot = lockerr.ErrStaleSnapshot

	// ErrReadOnly: the server is a standby, or the transaction is read-only. If none of
	// several hosts is a primary, as during a failover, the error also matches
	// ErrUnavailable.
	ErrReadOnly = lockerr.ErrReadOnly

	// ErrPooler: a pooler is in between that gives the server's end of a connection
	// to others, with the locks that it holds.
	ErrPooler = lockerr.ErrPooler

	// ErrLimited: more than the limit of a Limiter (package ratelimit) allows. RetryAfter in the [*Error]
	// says after how long it would not be. After a wait that ended with its context
	// the error matches the context's error as well.
	ErrLimited = lockerr.ErrLimited

	// ErrMaxLocks: the Locker has as many locks as AdvisoryConfig.MaxLocks allows.
	ErrMaxLocks = lockerr.ErrMaxLocks

	// ErrEvicted: somebody took the lock away, by [Monitor.Evict] or the SQL functions
	// evict_lock and evict_advisory_lock. It comes with [ErrLost], and the message says who
	// did it, and why.
	ErrEvicted = lockerr.ErrEvicted

	// ErrStillHeld: [Monitor.Evict] asked the session that holds the advisory lock to
	// release it, and the session has not.
	ErrStillHeld = lockerr.ErrStillHeld

	// ErrInternalLock: the advisory lock is one of pgxlock's own, from which nobody can be
	// evicted.
	ErrInternalLock = lockerr.ErrInternalLock

	// ErrUnavailable: no server answered, or not in time; it has no free connection, starts
	// or stops; none of several hosts is a primary; or the connection broke, or the server
	// ended it. The same call may succeed later. Every call that asks the server may return it: those of
	// Lockers, Limiters, Runners, claims and Monitors. What the call was to do may have been
	// done, but that an acquire that fails holds nothing; a lock that is held stays so until
	// [ErrLost] says otherwise. A call whose context has ended returns the context's error
	// instead.
	//
	// A user, password, database, right or setting that the server refuses is not
	// ErrUnavailable, because it stays refused: the error wraps the server's, with its
	// SQLSTATE (28P01, 28000, 3D000, 42501), and says what to change. It ends every wait.
	ErrUnavailable = lockerr.ErrUnavailable

	// ErrSchema: the tables and functions are missing, out of date, or in need
	// of the repair that migrations.Up does.
	ErrSchema = lockerr.ErrSchema
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

// fail returns the *Error that a call returns for err, or nil if err is nil.
func fail(op, key string, kind Kind, err error) error {
	if err == nil {
		return nil
	}
	e := &Error{Op: op, Key: key, Kind: kind, Err: lockerr.Typed(err)}
	if busy, ok := errors.AsType[*busyError](err); ok {
		e.Holder, e.RetryAfter = busy.holder, max(busy.remaining, 0)
	}
	return e
}

// transient reports whether what failed with err may do better later: the key is busy, no
// server could be asked, or it is short of something, or all that can be reached is a
// standby, which may be promoted.
func transient(err error) bool {
	_, busy := errors.AsType[*busyError](err)
	return busy || lockerr.Transient(err)
}

// missing returns an error for a nil receiver or a nil context. Every method with a context
// checks them first. A nil Lock is not held: its Lost is closed, its Context has ended, and
// its other methods return zero values.
func missing[T any](ctx context.Context, receiver *T) error {
	if receiver != nil && ctx != nil {
		return nil
	}
	return cmp.Or(missingReceiver(receiver), lockerr.MissingContext(ctx))
}

// missingReceiver returns an error for a nil receiver.
func missingReceiver[T any](receiver *T) error {
	if receiver != nil {
		return nil
	}
	remedy := "make one with New" // and the name of the type
	name := strings.TrimPrefix(fmt.Sprintf("%T", receiver), "*pgxlock.")
	switch any(receiver).(type) {
	case *Lock:
		remedy = "it is there only if Acquire returned no error"
	case *Locker:
		remedy = "make one with NewLeaseLocker, NewAdvisoryLocker or NewMemoryLocker"
	case *Semaphore:
		remedy = "make one with Locker.Semaphore"
	default:
		remedy += name
	}
	return fmt.Errorf("the %s is nil; %s", name, remedy)
}
