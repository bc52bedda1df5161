package dbconn

import (
	"context"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

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

// unknown reports whether the schema has to be looked for. A nil Installation is not needed.
func (in *Installation) unknown() bool {
	if in == nil {
		return false
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.Schema == "" && in.Asked == ""
}

// choose returns the schema: the one that was found before, the one that the caller named, or
// what the connection found. installed reports whether it is known to be new enough.
func (in *Installation) choose(c *Conn) (schema string, installed bool, err error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.Schema != "":
		return in.Schema, true, nil
	case in.Asked != "":
		return in.Asked, false, nil
	case c.notFound != nil:
		return "", false, c.notFound
	}
	if schema, err = c.found.Choose(); err != nil {
		return "", false, fmt.Errorf("%w: %w (database %q; %s.Schema names a schema)", lockerr.ErrSchema, err, c.Config().Database, in.Config)
	}
	return schema, false, nil
}

// version returns the statement that asks for the version of a schema, unless it is installed,
// or there is none.
func (in *Installation) version(schema string, installed bool) []Step {
	if schema == "" || installed {
		return nil
	}
	return []Step{{SQL: statements.ConnVersion.In(schema)}}
}

// use makes the schema, whose version that statement answered, the one that was found. One that
// is too old is none.
func (in *Installation) use(types *pgtype.Map, schema string, answer *pgconn.Result) error {
	var version int
	if err := ScanRow(types, answer, &version); err != nil {
		return err
	}
	if version < SchemaVersion {
		return &versionError{fmt.Errorf("%w: schema %q has version %d, version %d is needed", lockerr.ErrSchema, schema, version, SchemaVersion)}
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.Schema == "" {
		in.Schema, in.texts = schema, nil
	}
	return nil
}

// Find makes sure that the schema is known and new enough, with a connection whose search_path is
// still that of its role.
func (in *Installation) Find(ctx context.Context, q Querier) error {
	c := &Conn{Conn: q.Conn}
	if in.unknown() {
		if c.found, c.notFound = place.Look(ctx, q.Row); c.notFound != nil {
			return c.notFound
		}
	}
	return c.Find(ctx, in)
}

// Find is Installation.Find for a new connection.
func (c *Conn) Find(ctx context.Context, in *Installation) error {
	schema, installed, err := in.choose(c)
	if err != nil || installed {
		return err
	}
	return Outlast(ctx, func() error {
		results, _, err := pipeline(ctx, c.PgConn(), c.TypeMap(), in.version(schema, installed))
		if err != nil {
			return versionOf(schema, err)
		}
		return in.use(c.TypeMap(), schema, results[0])
	})
}

// VersionOf returns the version of the migrations in a schema.
func VersionOf(ctx context.Context, q Querier, schema string) (version int, err error) {
	err = q.Row(ctx, statements.ConnVersion.In(schema)).Scan(&version)
	return version, versionOf(schema, err)
}

// versionOf returns why a schema has no version.
func versionOf(schema string, err error) error {
	if state := lockerr.SQLState(err); state == lockerr.StateUndefinedFunction || state == lockerr.StateInvalidSchema {
		return fmt.Errorf("%w: schema %q has no pgxlock", lockerr.ErrSchema, schema)
	}
	return err
}

// Installed reports whether it was found.
func (in *Installation) Installed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.Schema != ""
}
