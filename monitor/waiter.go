package monitor

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/observe"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// A Waiter waits for a lock: a session that the server keeps waiting for an advisory lock,
// or a process with its ticket in the queue of a lock.
type Waiter struct {
	Key   string // for a [pgxlock.Semaphore]: its key followed by #
	Raw   bool   `json:",omitzero"` // as in [pgxlock.Holder]
	Kind  pgxlock.Kind
	Owner string // the owner of the Locker, or the name of the session

	// Since is when it began to wait; zero if the server does not say.
	Since time.Time `json:",omitzero"`

	// Only for a process: its ticket (the lowest is served first), how many other callers
	// in it wait for the lock, whether it was woken, and the ids of the locks that those
	// callers hold.
	Ticket int64
	Behind int
	Woken  bool
	Holds  []string

	// PID is the session's process on the server. BlockedBy are the processes that block
	// the waiter; 0 is a prepared transaction. For a session they may be earlier waiters.
	PID       int32
	BlockedBy []int32

	Mode pgxlock.Mode // only for a session

	Label    string // as in [pgxlock.Holder]
	Internal bool   // as in [pgxlock.Holder]
}

// LockKey returns the key with which calls name the lock, as that of [pgxlock.Holder].
func (w Waiter) LockKey() string { return lockkey.Join(w.Key, w.Raw) }

// String says who waits for which lock, and as much of the rest as is known.
func (w Waiter) String() string {
	text := fmt.Sprintf("%s waits for %s %s", w.Owner, w.Kind, lockkey.Shown(w.LockKey()))
	if !w.Since.IsZero() {
		text += " since " + w.Since.Format(time.RFC3339)
	}
	if w.Behind > 0 {
		text += fmt.Sprintf(", and %d more of it", w.Behind)
	}
	return oneline.Text(text)
}

// LogValue returns what is known of the waiter, for slog.
func (w Waiter) LogValue() slog.Value {
	attrs := observe.LockAttrs(w.Kind.String(), w.Key, w.Mode == pgxlock.Shared, w.Label)
	attrs = append(attrs, slog.String("waiter", w.Owner))
	attrs = observe.AppendKnown(attrs, "ticket", w.Ticket)
	attrs = observe.AppendKnown(attrs, "behind", int64(w.Behind))
	attrs = observe.AppendKnown(attrs, "pid", int64(w.PID))
	return slog.GroupValue(observe.AppendTime(attrs, "since", w.Since)...)
}
