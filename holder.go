package pgxlock

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/observe"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// A Holder is the holder of a lock, or the last holder of a lease that has expired.
// [Locker.Holders] returns those of one key, and package monitor those of a database.
type Holder struct {
	// Key is the key as people write it. Raw: it is the number of an advisory lock, #42 or
	// #4,2, which a [RawKey] names, or a name in a [Namespace], @billing/invoice:42;
	// [Holder.LockKey] returns the key for calls.
	Key string
	Raw bool `json:",omitzero"`

	Kind     Kind
	Mode     Mode
	ID       string // the holder id, which begins with the owner of its Locker
	Metadata string // the option Metadata; JSON if it came from SQL and is not a string. In a monitor.Snapshot it may be cut
	Token    int64
	PID      int32 // of the server process that holds an advisory lock

	// Since is when the lock was acquired, Expires when it ends unless it is renewed, zero for
	// a lock without a TTL; both by the server's clock. For an advisory lock [Locker.Holders]
	// knows them, by the Locker's clock, if the Locker itself holds it; otherwise they are
	// zero, and JSON omits them.
	Since, Expires time.Time `json:",omitzero"`

	// Only package monitor sets State, Suspect and the fields below. Suspect: the lease begins
	// in the future, because the server's clock was set back, so it lasts too long. Late:
	// earlier snapshots saw the lease renewed, and it is not any more: its holder hangs,
	// crashed, or cannot reach the server.
	State   LeaseState
	Suspect bool
	Late    bool

	// Application, Role and Client describe the session that holds an advisory lock: its
	// application_name, role and address. Label names the lock if it is known to belong to
	// another program or is Internal.
	Application, Role, Client, Label string

	// Internal: the lock is one of pgxlock's own, which cannot be evicted: the liveness of a
	// session, or the guard of a statement or a fenced transaction.
	Internal bool

	// EvictedBy evicted the holder, and EvictionReason says why. A lease shows them until
	// it is acquired again: State is then StateExpired or StateAbandoned, and ID that of
	// the evicted holder, or *evicted if it is not recorded any more. An advisory lock shows them while its session
	// is asked to release it, and for 10 seconds after that.
	EvictedBy, EvictionReason string
}

// LockKey returns the key with which calls name the lock: Key, the [RawKey] of its number, or
// the key of its [Namespace].
func (h Holder) LockKey() string { return lockkey.Join(h.Key, h.Raw) }

// String says who holds which lock, and as much of the rest as is known.
func (h Holder) String() string {
	text := fmt.Sprintf("%s %s held by %s", h.Kind, lockkey.Shown(h.LockKey()), h.ID)
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
	attrs := observe.LockAttrs(h.Kind.String(), h.Key, h.Mode == Shared, h.Label)
	attrs = append(attrs, slog.String("holder", h.ID))
	attrs = observe.AppendKnown(attrs, "token", h.Token)
	attrs = observe.AppendKnown(attrs, "pid", int64(h.PID))
	attrs = observe.AppendTime(attrs, "since", h.Since)
	attrs = observe.AppendTime(attrs, "expires", h.Expires)
	if h.EvictedBy != "" {
		attrs = append(attrs, slog.String("evicted_by", h.EvictedBy), slog.String("eviction_reason", h.EvictionReason))
	}
	return slog.GroupValue(attrs...)
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
		shown, raw := lockkey.Split(h.Key)
		holders = append(holders, Holder{Key: shown, Raw: raw, Kind: l.kind, Mode: Mode(h.Mode), ID: h.ID, Metadata: h.Metadata, Token: h.Token, PID: h.PID, Since: h.Since, Expires: h.Expires})
	}
	return holders, nil
}
