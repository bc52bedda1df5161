package pgxlock

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// Holder is one who holds a key.
type Holder struct {
	Key      string
	Kind     Kind
	Mode     Mode
	Owner    string // the holder id, which begins with the owner of its Locker
	Metadata string // as it was given; JSON if it came from SQL and is no string
	Token    int64
	PID      int32 // of the server process that has an advisory lock

	// By the server's clock. Expires is when the lock ends unless it is renewed;
	// zero for a lock without a TTL. Of advisory locks they are known of the
	// Locker's own, and by its clock.
	Since, Expires time.Time

	// What a [Monitor] says beyond that. Suspect: the lease began later than the
	// server's clock shows now, which was set back, so that it lasts too long.
	State   LeaseState
	Suspect bool

	// Of the session that has an advisory lock: its application_name, its role, and
	// the client's address; and what the lock is known to be, where it is another
	// program's.
	Application, Role, Client, Label string
}

// LeaseState is how a holder stands.
type LeaseState string

// What the views lock_leases and lock_shares say. Of advisory locks all are live.
const (
	Live      LeaseState = "live"
	Expired   LeaseState = "expired"   // anybody may take it
	Abandoned LeaseState = "abandoned" // expired for more than an hour, and wanted by nobody
)

// stateNamed is the state of that name, as one string for all.
func stateNamed(name string) LeaseState {
	switch LeaseState(name) {
	case Live:
		return Live
	case Abandoned:
		return Abandoned
	}
	return Expired
}

// Holders returns who holds the key now, and nothing if it is free. The answer is
// out of date when it arrives: it is for people and for logs. It asks the primary
// ([ErrReadOnly] if there is none); the view lock_leases can be read on a standby.
func (l *Locker) Holders(ctx context.Context, key string) ([]Holder, error) {
	if err := missing(ctx, l); err != nil {
		return nil, l.fail("holders", key, err)
	}
	if err := l.backend.check(key); err != nil {
		return nil, l.fail("holders", key, err)
	}
	return l.holders(ctx, key, []string{key})
}

// holders is Holders for some locks that are called key together.
func (l *Locker) holders(ctx context.Context, key string, keys []string) ([]Holder, error) {
	if err := l.begin(ctx); err != nil {
		return nil, l.fail("holders", key, err)
	}
	defer l.calls.End()
	holders, err := l.backend.holders(ctx, keys)
	if err != nil {
		return nil, l.fail("holders", key, err)
	}
	return holders, nil
}

func (t *leaseTable) holders(ctx context.Context, keys []string) ([]Holder, error) {
	var holders []Holder
	var err error
	answered := make(chan struct{})
	t.cleaning.Run(func() { // no context of a caller's reaches our connections
		defer close(answered)
		err = t.requests.Do(dbconn.Timeout, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
			holders, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(statements.LeaseHolders), keys), func(row pgx.CollectableRow) (Holder, error) {
				h := Holder{Kind: Lease}
				var shared bool
				err := row.Scan(&h.Key, &h.Owner, &h.Metadata, &h.Token, &h.Since, &h.Expires, &shared)
				if shared {
					h.Mode = Shared
				}
				return h, err
			})
			return err
		})
	})
	select {
	case <-answered:
		return holders, err
	case <-ctx.Done():
		return nil, lockerr.ContextError(ctx)
	}
}
