package monitor

import (
	"context"
	"time"
)

// Load is how much of the server's resources locks use up, on the whole server.
type Load struct {
	// Locks is the number of entries of all sessions in the server's lock table, and
	// Room how many it has room for at least. When it is full no session can work.
	Locks, Room int64

	// Notifications is how full the notification queue is, from 0 to 1. It grows while
	// a session that listens has a transaction open.
	Notifications float64

	// OldestPID and OldestSince are the process and the begin of the transaction with the
	// oldest snapshot, if one is known: dead rows of leases are not cleaned up before it
	// ends.
	OldestPID   int32
	OldestSince time.Time
}

type loadKey struct{}

// WithLoad returns a context with which each Snapshot of a Monitor also puts the server's
// load into to. A Snapshot reads the load in any case, in the statement that reads the
// lock table: reading it apart would block the lock table a second time.
func WithLoad(ctx context.Context, to *Load) context.Context {
	return context.WithValue(ctx, loadKey{}, to)
}

// report puts the load where WithLoad said, if it did.
func report(ctx context.Context, load Load) {
	if to, ok := ctx.Value(loadKey{}).(*Load); ok {
		*to = load
	}
}
