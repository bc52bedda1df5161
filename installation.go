package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/place"
)

// schemaVersion is the oldest version of the migrations that leases work with, and
// queueVersion the first one in which other processes see who waits.
const (
	schemaVersion = 3
	queueVersion  = 5
)

// An installation is where the tables and functions are. It is found at the
// first use, on a connection whose search_path is still the role's.
type installation struct {
	mu     sync.Mutex
	schema string // "": not found yet
	asked  string // the schema that the caller named, if any
	config string // where it is named
	needs  int    // the oldest version that will do
	queues bool   // it has the queue
}

// statement returns a statement on this installation.
func (in *installation) statement(name string) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	return statement(name, in.schema)
}

// find makes sure that the schema is known and new enough.
func (in *installation) find(ctx context.Context, q querier) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.schema != "" {
		return nil
	}
	schema := in.asked
	if schema == "" {
		found, err := place.Look(ctx, q.row)
		if err != nil {
			return err
		}
		if schema, err = found.Choose(); err != nil {
			return fmt.Errorf("%w: %w (database %q; %s.Schema names a schema)", ErrSchema, err, q.conn.Config().Database, in.config)
		}
	}
	var version int
	err := q.row(ctx, statement("version", schema)).Scan(&version)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == stateUndefinedFunction || pgErr.Code == stateInvalidSchema) {
		return fmt.Errorf("%w: schema %q has no pgxlock", ErrSchema, schema)
	}
	if err != nil {
		return err
	}
	if version < in.needs {
		return fmt.Errorf("%w: schema %q has version %d, version %d is needed", ErrSchema, schema, version, in.needs)
	}
	in.schema, in.queues = schema, version >= queueVersion
	return nil
}

// hasQueue reports whether it was found to have the queue.
func (in *installation) hasQueue() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.queues
}
