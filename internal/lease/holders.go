package lease

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// reap removes leases and shares that expired more than an hour ago.
func (t *Table) reap() error {
	return cmp.Or(t.request(t.host.Closing, func(ctx context.Context, q dbconn.Querier, _ bool) error {
		rows := q.Query(ctx, t.place.Statement(statements.LeaseReap), time.Hour.Seconds(), batcher.MaxRequests)
		rows.Close()
		return rows.Err()
	}), t.host.Queue.Reap())
}

// Holders implements [hold.Backend].
func (t *Table) Holders(ctx context.Context, keys []string) ([]hold.Holder, error) {
	var holders []hold.Holder
	var err error
	answered := make(chan struct{})
	wait, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(t.host.Closing, func() { end(lockerr.ErrClosed) })
	t.cleaning.Run(func() { // a caller's context must not reach the Locker's connections
		defer close(answered)
		defer end(nil)
		defer stop()
		err = t.request(wait, func(ctx context.Context, q dbconn.Querier, _ bool) (err error) {
			holders, err = pgx.CollectRows(q.Query(ctx, t.place.Statement(statements.LeaseHolders), keys), func(row pgx.CollectableRow) (hold.Holder, error) {
				var h hold.Holder
				var shared bool
				err := row.Scan(&h.Key, &h.ID, &h.Metadata, &h.Token, &h.Since, &h.Expires, &shared)
				if shared {
					h.Mode = hold.Shared
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
