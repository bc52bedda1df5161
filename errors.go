package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lease"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// Errors for errors.Is. The package comment says what they come with, and after which to try
// again.
var (
	ErrReleased     = lockerr.ErrReleased     // the lock was released by Release
	ErrClosed       = lockerr.ErrClosed       // the Locker, ratelimit.Limiter or once.Runner was closed
	ErrOtherRequest = lockerr.ErrOtherRequest // AnswerTx was called with this key for another request
	ErrMaxLocks     = lockerr.ErrMaxLocks     // the Locker holds as many locks as AdvisoryConfig.MaxLocks allows

	// ErrNotAcquired: somebody else holds the key. After a wait that ended with its context the
	// error matches the context's error as well.
	ErrNotAcquired = lockerr.ErrNotAcquired

	// ErrLost: the lock is no longer held by this process, or may not be. A call that
	// returns no lock never fails with it.
	ErrLost = lockerr.ErrLost

	// ErrDeadlock: the wait would never end. The context comes from a lock on the same key,
	// also through context.WithoutCancel, so the caller would wait for itself. Or the context
	// comes from a lock that the holder of the key waits for, directly or through others. Or
	// the transaction already holds the key shared. Or the server found a cycle of transactions
	// (SQLSTATE 40P01). After the second and the last, release the locks or roll back, and try
	// again.
	ErrDeadlock = lockerr.ErrDeadlock

	// ErrStaleSnapshot: the transaction's snapshot is older than the lock. Begin the
	// transaction again. Acquire the lock before you begin a transaction that you fence.
	ErrStaleSnapshot = lockerr.ErrStaleSnapshot

	// ErrReadOnly: the server is a standby or a worker of Citus, or the transaction is
	// read-only. If none of several hosts is a primary, as during a failover, the error also
	// matches ErrUnavailable.
	ErrReadOnly = lockerr.ErrReadOnly

	// ErrPooler: a pooler passes the server's session, with the locks that it holds, on to
	// other clients.
	ErrPooler = lockerr.ErrPooler

	// ErrEvicted: somebody took the lock away, by Evict of package monitor or in SQL by
	// evict_lock or evict_advisory_lock. It comes with [ErrLost], and the message says who did
	// it, and why.
	ErrEvicted = lockerr.ErrEvicted

	// ErrUnavailable: no server could be used, or another session keeps a table locked (55P03).
	// Every call that asks the server may return it; the same call may succeed later. The
	// message says how often and for how long it was tried to connect. The server may have done
	// what the call asked for, except that an acquire that fails holds nothing. A lock that is
	// held stays held until [ErrLost] says otherwise. A call whose context has ended returns
	// the context's error instead; if the server refuses a user, password, database, right or
	// setting, the error wraps the server's instead, and ends every wait.
	ErrUnavailable = lockerr.ErrUnavailable

	// ErrSchema: the tables and functions are missing, out of date, in need of migrations.Up,
	// which repairs, or belong to a role that the program does not trust, see
	// [LeaseConfig.Schema].
	ErrSchema = lockerr.ErrSchema
)

// An Error says what was attempted, on which key, and why it failed. errors.Is and errors.As
// find Err and all errors that Err wraps.
type Error struct {
	Op   string // "acquire", "renew", "fence", ...
	Key  string // empty if the error is not about a single key
	Kind Kind   // of the lock; 0 for a claim, a limit and a run

	// With ErrNotAcquired, Holder is the holder id of the current holder, which begins with
	// its owner, and RetryAfter is how long its lease lasts at most if it is not renewed.
	// Both are zero if the other caller was still acquiring. With ratelimit.ErrLimited,
	// RetryAfter is the time until as many events are allowed at once, if nobody else uses any meanwhile.
	Holder     string
	RetryAfter time.Duration

	Err error
}

// longestText is how many characters of what others wrote the text of an Error has.
const longestText = 8192

// Error returns the text in one line. In it, and in those of [Holder] and monitor.Waiter, characters
// that cannot be printed are escaped: others may have chosen them.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("pgxlock: " + e.Op)
	if e.Key != "" {
		b.WriteString(" " + lockkey.Shown(e.Key))
	}
	b.WriteString(": " + strings.TrimPrefix(oneline.Join(oneline.Cut(e.Err.Error(), longestText, "…")), "pgxlock: "))
	if e.Holder != "" {
		holder := oneline.Join(oneline.Cut(e.Holder, longestText, "…"))
		if holder == lease.SharedHolder {
			holder = "callers that share it"
		}
		b.WriteString(" (held by " + holder)
		if e.RetryAfter > 0 {
			unit := time.Millisecond
			if e.RetryAfter > 10*time.Second {
				unit = time.Second
			}
			fmt.Fprintf(&b, " for up to %s", (e.RetryAfter + unit - 1).Truncate(unit))
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
	if busy, ok := errors.AsType[*hold.Busy](err); ok {
		e.Holder, e.RetryAfter = busy.Holder, max(busy.Remaining, 0)
	}
	return e
}

// transient reports whether the call that failed with err may succeed later: the key is
// busy, no server could be reached, the server is short of a resource, or only a standby
// could be reached, which may be promoted.
func transient(err error) bool {
	_, busy := errors.AsType[*hold.Busy](err)
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
	text := "the Semaphore is nil; make one with Locker.Semaphore"
	switch any(receiver).(type) {
	case *Lock:
		text = "the Lock is nil; it is there only if Acquire returned no error"
	case *Locker:
		text = "the Locker is nil; make one with NewLeaseLocker, NewAdvisoryLocker or NewMemoryLocker"
	}
	return errors.New(text)
}
