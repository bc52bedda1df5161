package pgxlock

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/monitor"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// A Holder is the holder of a lock, or the last holder of a lease that has expired.
type Holder struct {
	Key      string
	Kind     Kind
	Mode     Mode
	ID       string // the holder id, which begins with the owner of its Locker
	Metadata string // the option Metadata; JSON if it came from SQL and is not a string. A Monitor cuts it, see [Snapshot]
	Token    int64
	PID      int32 // of the server process that holds an advisory lock

	// Since is when the lock was acquired. Expires is when it ends unless it is renewed; it
	// is zero for a lock without a TTL. Both are by the server's clock. For an advisory
	// lock, [Locker.Holders] knows them if the Locker itself holds it, by the Locker's
	// clock; otherwise they are zero, and JSON omits them.
	Since, Expires time.Time `json:",omitzero"`

	// Only a [Monitor] sets State and Suspect. Suspect means that the lease began later
	// than the server's clock shows now: the clock was set back, so the lease lasts too
	// long.
	State   LeaseState
	Suspect bool

	// Application, Role and Client describe the session that holds an advisory lock: its
	// application_name, its role, and the client's address. Label names the lock if it is
	// known to belong to another program or is Internal.
	Application, Role, Client, Label string

	// Internal: the lock is one of pgxlock's own: the liveness of a session, or the guard
	// of a statement or a fenced transaction. [Monitor.Evict] refuses it.
	Internal bool

	// EvictedBy evicted the holder, and EvictionReason says why. A lease shows them until
	// it is acquired again: State is then StateExpired or StateAbandoned, and ID is
	// *evicted, or the holder of the share. An advisory lock shows them while its session
	// is asked to release it, and for 10 seconds after that.
	EvictedBy, EvictionReason string
}

// String says who holds which lock, and as much of the rest as is known.
func (h Holder) String() string {
	text := fmt.Sprintf("%s %s held by %s", h.Kind, lockkey.Shown(h.Key), h.ID)
	if h.Mode == Shared {
		text = "shared " + text
	}
	if !h.Since.IsZero() {
		text += " since " + h.Since.Format(time.RFC3339)
	}
	if h.Token != 0 {
		text += fmt.Sprintf(", token %d", h.Token)
	}
	switch {
	case h.EvictedBy != "" && h.State == StateLive:
		text += fmt.Sprintf(", being evicted by %s: %s", h.EvictedBy, h.EvictionReason)
	case h.EvictedBy != "":
		text += fmt.Sprintf(", evicted by %s: %s", h.EvictedBy, h.EvictionReason)
	}
	return oneline.Text(text)
}

// LogValue returns what is known of the holder, for slog.
func (h Holder) LogValue() slog.Value {
	attrs := lockAttrs(h.Kind, h.Key, h.Mode, h.Label)
	attrs = append(attrs, slog.String("holder", h.ID))
	attrs = appendKnown(attrs, "token", h.Token)
	attrs = appendKnown(attrs, "pid", int64(h.PID))
	attrs = appendTime(attrs, "since", h.Since)
	attrs = appendTime(attrs, "expires", h.Expires)
	if h.EvictedBy != "" {
		attrs = append(attrs, slog.String("evicted_by", h.EvictedBy), slog.String("eviction_reason", h.EvictionReason))
	}
	return slog.GroupValue(attrs...)
}

// holdersOf converts the holders that a monitor found.
func holdersOf(found []*monitor.Holder) []Holder {
	if len(found) == 0 {
		return nil
	}
	list := make([]Holder, len(found))
	for i, h := range found {
		list[i] = Holder{
			Key: h.Key, Kind: Kind(h.Kind), Mode: modeOf(h.Shared), ID: h.ID, Metadata: h.Metadata, Token: h.Token, PID: h.PID,
			Since: h.Since, Expires: h.Expires, State: LeaseState(h.State), Suspect: h.Suspect,
			Application: h.Application, Role: h.Role, Client: h.Client, Label: h.Label, Internal: h.Internal,
			EvictedBy: h.EvictedBy, EvictionReason: h.EvictionReason,
		}
	}
	return list
}

// A Waiter waits for a lock: a session that the server keeps waiting for an advisory lock,
// or a process with its ticket in the queue of a lock.
type Waiter struct {
	Key   string // for a [Semaphore]: its key followed by #
	Kind  Kind
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

	Mode Mode // only for a session

	Label    string // as in [Holder]
	Internal bool   // as in [Holder]
}

// String says who waits for which lock, and as much of the rest as is known.
func (w Waiter) String() string {
	text := fmt.Sprintf("%s waits for %s %s", w.Owner, w.Kind, lockkey.Shown(w.Key))
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
	attrs := lockAttrs(w.Kind, w.Key, w.Mode, w.Label)
	attrs = append(attrs, slog.String("waiter", w.Owner))
	attrs = appendKnown(attrs, "ticket", w.Ticket)
	attrs = appendKnown(attrs, "behind", int64(w.Behind))
	attrs = appendKnown(attrs, "pid", int64(w.PID))
	return slog.GroupValue(appendTime(attrs, "since", w.Since)...)
}

// waitersOf converts the waiters that a monitor found.
func waitersOf(found []monitor.Waiter) []Waiter {
	if len(found) == 0 {
		return nil
	}
	list := make([]Waiter, len(found))
	for i, w := range found {
		list[i] = Waiter{
			Key: w.Key, Kind: Kind(w.Kind), Owner: w.Owner, Since: w.Since, Ticket: w.Ticket, Behind: w.Behind, Woken: w.Woken, Holds: w.Holds,
			PID: w.PID, BlockedBy: w.BlockedBy, Mode: modeOf(w.Shared), Label: w.Label, Internal: w.Internal,
		}
	}
	return list
}

func modeOf(shared bool) Mode {
	if shared {
		return Shared
	}
	return Exclusive
}

// lockAttrs returns the attributes of a log record that name a lock.
func lockAttrs(kind Kind, key string, mode Mode, label string) []slog.Attr {
	attrs := []slog.Attr{slog.String("key", strings.TrimPrefix(key, "\x00")), slog.String("kind", kind.String())}
	if mode == Shared {
		attrs = append(attrs, slog.String("mode", "shared"))
	}
	if label != "" {
		attrs = append(attrs, slog.String("label", label))
	}
	return attrs
}

// appendKnown appends a number unless it is 0, for unknown.
func appendKnown(attrs []slog.Attr, name string, n int64) []slog.Attr {
	if n == 0 {
		return attrs
	}
	return append(attrs, slog.Int64(name, n))
}

// appendTime appends a time unless it is zero, for unknown.
func appendTime(attrs []slog.Attr, name string, at time.Time) []slog.Attr {
	if at.IsZero() {
		return attrs
	}
	return append(attrs, slog.Time(name, at))
}

// LeaseState is the state of a lease.
type LeaseState string

// The states, as the views lock_leases and lock_shares have them. The holder of an advisory
// lock is live.
const (
	StateLive      LeaseState = "live"
	StateExpired   LeaseState = "expired"   // anybody may take it over
	StateAbandoned LeaseState = "abandoned" // expired for more than an hour, and nobody has taken it over
)

// Holders returns the holders of a key, none if it is free. The answer is out of date when
// it arrives: it is for people and for logs. It asks the primary, and returns [ErrReadOnly]
// if there is none; the view lock_leases can be read on a standby.
func (l *Locker) Holders(ctx context.Context, key string) ([]Holder, error) {
	if err := missing(ctx, l); err != nil {
		return nil, l.fail("holders", key, err)
	}
	if err := l.check(key); err != nil {
		return nil, l.fail("holders", key, err)
	}
	return l.holders(ctx, key, []string{key})
}

// holders is Holders for the locks of several keys; errors name them key.
func (l *Locker) holders(ctx context.Context, key string, keys []string) ([]Holder, error) {
	if err := l.begin(ctx); err != nil {
		return nil, l.fail("holders", key, err)
	}
	defer l.calls.End()
	found, err := l.backend.Holders(ctx, keys)
	if err != nil {
		return nil, l.fail("holders", key, err)
	}
	var holders []Holder
	for _, h := range found {
		holders = append(holders, Holder{Key: h.Key, Kind: l.kind, Mode: Mode(h.Mode), ID: h.ID, Metadata: h.Metadata, Token: h.Token, PID: h.PID, Since: h.Since, Expires: h.Expires})
	}
	return holders, nil
}
