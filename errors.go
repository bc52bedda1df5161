package pgxlock

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// What can go wrong, for errors.Is. Errors of this package wrap one of these, or
// the error of the server or the network as it came, or say which argument is
// wrong, in an [*Error].
var (
	// ErrNotAcquired: somebody else holds the key. After a wait that ended with
	// its context the error matches the context's error as well. A server that
	// cannot be reached is never reported as busy.
	ErrNotAcquired = errors.New("pgxlock: not acquired")

	// ErrLost: the lock is, or may be, no longer ours.
	ErrLost = errors.New("pgxlock: lock lost")

	// ErrReleased: the lock was given back by Release.
	ErrReleased = errors.New("pgxlock: lock already released")

	// ErrClosed: the Locker was closed.
	ErrClosed = errors.New("pgxlock: locker closed")

	// ErrDeadlock: the context comes from a lock on the same key, so that the
	// wait would be for ourselves. A context from context.WithoutCancel comes
	// from it, too.
	ErrDeadlock = errors.New("pgxlock: this context already holds the key")

	// ErrStaleSnapshot: the transaction's snapshot is older than the lock. Begin
	// the transaction after the lock was acquired.
	ErrStaleSnapshot = errors.New("pgxlock: the transaction's snapshot is older than the lock")

	// ErrReadOnly: the server is a standby, or the transaction is read-only.
	ErrReadOnly = errors.New("pgxlock: read-only: a standby, or a read-only transaction")

	// ErrSchema: the tables and functions are missing, out of date, or in need
	// of the repair that migrations.Up does.
	ErrSchema = errors.New("pgxlock: schema missing or out of date; run migrations.Up or pgxlock migrate up")
)

// Error is what every method that can fail returns: what was attempted, on which
// key, and why it failed. Err, and all that it wraps, are found by errors.Is and
// errors.As.
type Error struct {
	Op   string // "acquire", "renew", "fence", ...
	Key  string // empty where no single key is concerned
	Kind Kind   // of the Locker

	// Holder and RetryAfter tell of whoever is in the way, with ErrNotAcquired:
	// its holder id, which begins with its owner, and how long its lease may
	// last at most if it is not renewed. Both are zero if it was just acquiring.
	Holder     string
	RetryAfter time.Duration

	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("pgxlock: " + e.Op)
	if e.Key != "" {
		fmt.Fprintf(&b, " %q", e.Key)
	}
	b.WriteString(": " + strings.TrimPrefix(oneLine(e.Err.Error()), "pgxlock: "))
	if e.Holder != "" {
		fmt.Fprintf(&b, " (held by %s", oneLine(e.Holder))
		if e.RetryAfter > 0 {
			fmt.Fprintf(&b, " for up to %s", e.RetryAfter.Round(time.Millisecond))
		}
		b.WriteString(")")
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// oneLine joins the lines of a text: a log line must stay one, whatever a name or
// the server's message contains.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// The SQLSTATEs that we tell apart. LK is ours; the rest is in
// https://www.postgresql.org/docs/current/errcodes-appendix.html.
const (
	stateWarning           = "01000"
	stateNotHeld           = "LK001"
	stateStaleSnapshot     = "LK002"
	stateTokensNeedRepair  = "LK003"
	stateReadOnly          = "25006"
	stateNoRights          = "42501"
	stateOutOfMemory       = "53200" // of the lock table, too
	stateUndefinedTable    = "42P01"
	stateUndefinedFunction = "42883"
	stateInvalidSchema     = "3F000"
)

// typed adds the sentinel that an error of the server stands for, if any.
func typed(err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	var sentinel error
	switch pgErr.Code {
	case stateNotHeld:
		sentinel = ErrLost
	case stateStaleSnapshot:
		sentinel = ErrStaleSnapshot
	case stateTokensNeedRepair, stateUndefinedTable, stateUndefinedFunction, stateInvalidSchema:
		sentinel = ErrSchema
	case stateReadOnly:
		sentinel = ErrReadOnly
	case stateNoRights:
		return fmt.Errorf("%w; the role lacks rights that docs/operations.md names", err)
	default:
		return err
	}
	if errors.Is(err, sentinel) {
		return err // it was typed before
	}
	return fmt.Errorf("%w: %w", sentinel, err)
}
