package hold

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/sql"
)

// An Eviction says who took a lock away and why, and how long ago. The holder of a lease
// asks for it when a renewal or a release finds the lease gone. The lock session is notified,
// and then releases the lock.
type Eviction struct {
	Err error
	Age time.Duration
}

// Evictions asks which of these holds were evicted, and returns the evictions by index.
func Evictions(ctx context.Context, in *dbconn.Installation, q dbconn.Querier, kinds []int32, names, holders []string, tokens []int64) (map[int]Eviction, error) {
	type row struct {
		N       int64
		By, Why string
		MS      int64
	}
	rows, err := pgx.CollectRows(q.Query(ctx, in.Statement(statements.EvictReasons), kinds, names, holders, tokens), pgx.RowToStructByPos[row])
	found := make(map[int]Eviction, len(rows))
	for _, r := range rows {
		if r.N < 1 || r.N > int64(len(names)) {
			continue
		}
		found[int(r.N-1)] = Eviction{fmt.Errorf("%w by %s: %s", lockerr.ErrEvicted, oneline.Text(r.By), oneline.Text(r.Why)), time.Duration(r.MS) * time.Millisecond}
	}
	return found, err
}
