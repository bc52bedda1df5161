package pgtest

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// An origin is what a database is when its test begins, so that the next test can have it when
// it is that again: to clean a database costs the server a fraction of what it costs to drop one
// and to make another.
type origin struct {
	state string // what state.sql says
	clean string // statements that empty the tables that were empty, and set the sequences
	same  string // a query that is true if the other tables hold what they held
}

var (
	//go:embed state.sql
	stateSQL string
	//go:embed contents.sql
	contentsSQL string
)

// errChanged means that a test has changed more of its database than rows that can be deleted.
var errChanged = errors.New("the database is not what it was")

// mostRows is the size in bytes from which on a table is not cleaned: what it leaves behind
// would slow down the next test.
const mostRows = 256 << 10

// readOrigin looks at a database that nobody else uses.
func readOrigin(ctx context.Context, conn *pgx.Conn) (o origin, err error) {
	if err := conn.QueryRow(ctx, stateSQL).Scan(&o.state); err != nil {
		return o, err
	}
	type content struct {
		query    string
		sequence bool
		name     string
	}
	rows, err := conn.Query(ctx, contentsSQL)
	if err != nil {
		return o, err
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c content, err error) {
		err = row.Scan(&c.query, &c.sequence, &c.name)
		return c, err
	})
	if err != nil {
		return o, err
	}
	var clean, empty strings.Builder
	same := []string{"true"}
	for _, c := range all {
		var holds string
		if err := conn.QueryRow(ctx, c.query).Scan(&holds); err != nil {
			return o, err
		}
		switch value, called, _ := strings.Cut(holds, " "); {
		case c.sequence:
			fmt.Fprintf(&clean, "select pg_catalog.setval('%s', %s, '%s');\n", strings.ReplaceAll(c.name, "'", "''"), value, called)
		case holds == "":
			fmt.Fprintf(&empty, "delete from %s;\n", c.name)
			same = append(same, fmt.Sprintf("pg_catalog.pg_relation_size('%s') < %d", strings.ReplaceAll(c.name, "'", "''"), mostRows))
		default:
			same = append(same, fmt.Sprintf("(%s) = '%s'", c.query, holds))
		}
	}
	// Triggers and foreign keys are not for us.
	o.clean = "begin; set local session_replication_role = replica;\n" + empty.String() + clean.String() +
		"commit; select pg_catalog.pg_stat_reset()"
	o.same = "select " + strings.Join(same, "\n and ")
	return o, nil
}

// restore makes the database what it was, with no other session in it than one of the pool, or all
// of them if they are to be kept. These are as good as new. Whatever the error, the database is to
// be dropped.
func (o origin) restore(ctx context.Context, pool *pgxpool.Pool, keep bool) error {
	idle := pool.AcquireAllIdle(ctx)
	if len(idle) == 0 {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return err
		}
		idle = append(idle, conn)
	}
	defer func() {
		for _, conn := range idle {
			conn.Release()
		}
	}()
	var kept []uint32 // by the pids of their backends
	for _, conn := range idle {
		err := conn.Conn().DeallocateAll(ctx)
		if err == nil {
			_, err = conn.Exec(ctx, "discard all")
		}
		if err != nil || len(kept) > 0 && !keep {
			_ = conn.Conn().Close(ctx) // the pool forgets it
			continue
		}
		kept = append(kept, conn.Conn().PgConn().PID())
	}
	at := slices.IndexFunc(idle, func(conn *pgxpool.Conn) bool { return !conn.Conn().IsClosed() })
	if at < 0 {
		return errors.New("no connection of the pool is left")
	}
	conn := idle[at].Conn()
	// Those of clients that have just gone are waited for.
	const end = `select pg_catalog.count(pg_catalog.pg_terminate_backend(pid, 600000)) from pg_catalog.pg_stat_activity
		where datname = pg_catalog.current_database() and pid <> all ($1::bigint[]) and backend_type = 'client backend'`
	if _, err := conn.Exec(ctx, end, pgx.QueryExecModeExec, kept); err != nil {
		return err
	}
	var state string
	if err := conn.QueryRow(ctx, stateSQL, pgx.QueryExecModeExec).Scan(&state); err != nil {
		return err
	}
	if state != o.state {
		return errChanged
	}
	var same bool
	if err := conn.QueryRow(ctx, o.same, pgx.QueryExecModeExec).Scan(&same); err != nil {
		return err
	}
	if !same {
		return errChanged
	}
	_, err := conn.PgConn().Exec(ctx, o.clean).ReadAll()
	return err
}

// awaitReturned waits until the test has given all connections back to the pool.
func awaitReturned(pool *pgxpool.Pool) error {
	limit := time.Now().Add(Patience)
	for pool.Stat().AcquiredConns() > 0 {
		if time.Now().After(limit) {
			return fmt.Errorf("%d connections were not given back to the pool", pool.Stat().AcquiredConns())
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}
