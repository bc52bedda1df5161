package dbconn

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

// SchemaVersion is the version of the migrations that this program needs. A later one
// has all that it has.
const SchemaVersion = 8

// An Installation is where the tables and functions are. It is found at the
// first use, on a connection whose search_path is still the role's.
type Installation struct {
	mu     sync.Mutex
	Schema string // "": not found yet
	Asked  string // the schema that the caller named, if any
	Config string // where it is named

	texts map[statements.Name]string // the statements used on it
}

// Statement returns a statement on this installation.
func (in *Installation) Statement(name statements.Name) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	text, known := in.texts[name]
	if !known {
		if in.texts == nil {
			in.texts = make(map[statements.Name]string)
		}
		text = name.In(in.Schema)
		in.texts[name] = text
	}
	return text
}

// Find makes sure that the schema is known and new enough.
func (in *Installation) Find(ctx context.Context, q Querier) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.Schema != "" {
		return nil
	}
	schema := in.Asked
	if schema == "" {
		found, err := place.Look(ctx, q.Row)
		if err != nil {
			return err
		}
		if schema, err = found.Choose(); err != nil {
			return fmt.Errorf("%w: %w (database %q; %s.Schema names a schema)", lockerr.ErrSchema, err, q.Conn.Config().Database, in.Config)
		}
	}
	version, err := VersionOf(ctx, q, schema)
	if err != nil {
		return err
	}
	if version < SchemaVersion {
		return fmt.Errorf("%w: schema %q has version %d, version %d is needed", lockerr.ErrSchema, schema, version, SchemaVersion)
	}
	in.Schema, in.texts = schema, nil
	return nil
}

// VersionOf returns the version of the migrations in a schema.
func VersionOf(ctx context.Context, q Querier, schema string) (version int, err error) {
	err = q.Row(ctx, statements.ConnVersion.In(schema)).Scan(&version)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == lockerr.StateUndefinedFunction || pgErr.Code == lockerr.StateInvalidSchema) {
		err = fmt.Errorf("%w: schema %q has no pgxlock", lockerr.ErrSchema, schema)
	}
	return version, err
}

// Installed reports whether it was found.
func (in *Installation) Installed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.Schema != ""
}
