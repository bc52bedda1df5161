package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// schemaVersion is the version of the migrations that this program needs. A later one
// has all that it has.
const schemaVersion = 8

// An installation is where the tables and functions are. It is found at the
// first use, on a connection whose search_path is still the role's.
type installation struct {
	mu     sync.Mutex
	schema string // "": not found yet
	asked  string // the schema that the caller named, if any
	config string // where it is named
}

// statement returns a statement on this installation.
func (in *installation) statement(name statements.Name) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	return name.In(in.schema)
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
			return fmt.Errorf("%w: %w (database %q; %s.Schema names a schema)", lockerr.ErrSchema, err, q.conn.Config().Database, in.config)
		}
	}
	version, err := versionOf(ctx, q, schema)
	if err != nil {
		return err
	}
	if version < schemaVersion {
		return fmt.Errorf("%w: schema %q has version %d, version %d is needed", lockerr.ErrSchema, schema, version, schemaVersion)
	}
	in.schema = schema
	return nil
}

func versionOf(ctx context.Context, q querier, schema string) (version int, err error) {
	err = q.row(ctx, statements.ConnVersion.In(schema)).Scan(&version)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == lockerr.StateUndefinedFunction || pgErr.Code == lockerr.StateInvalidSchema) {
		err = fmt.Errorf("%w: schema %q has no pgxlock", lockerr.ErrSchema, schema)
	}
	return version, err
}

// installed reports whether it was found.
func (in *installation) installed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.schema != ""
}
