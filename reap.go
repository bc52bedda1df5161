package pgxlock

import (
	"cmp"
	"context"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/sql"
)

// reap removes leases that expired long ago.
func (t *leaseTable) reap() error {
	return cmp.Or(t.request(func(ctx context.Context, q dbconn.Querier, _ bool) error {
		for _, statement := range []statements.Name{statements.LeaseReap, statements.LeaseReapShared} {
			rows := q.Query(ctx, t.place.Statement(statement))
			rows.Close()
			if rows.Err() != nil {
				return rows.Err()
			}
		}
		return nil
	}), t.locker.queue.reap())
}
