package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/place"
)

// schemaVersion is the oldest version of the migrations that leases work with,
// queueVersion the first one in which other processes see who waits,
// sharesVersion the first one in which leases are shared and a release tells whether
// anybody waits; primitivesVersion that with what semaphores and leaders need,
// monitorVersion that in which holders can be evicted and keys have names, and
// turnsVersion that in which who asked in vain for an advisory lock keeps its place.
const (
	schemaVersion     = 3
	queueVersion      = 5
	sharesVersion     = 6
	primitivesVersion = 7
	monitorVersion    = 8
	turnsVersion      = 9
)

// An installation is where the tables and functions are. It is found at the
// first use, on a connection whose search_path is still the role's.
type installation struct {
	mu      sync.Mutex
	schema  string // "": not found yet
	asked   string // the schema that the caller named, if any
	config  string // where it is named
	needs   int    // the oldest version that will do
	version int    // of what was found first
	latest  int    // of what was found last
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
	version, err := versionOf(ctx, q, schema)
	if err != nil {
		return err
	}
	if version < in.needs {
		return fmt.Errorf("%w: schema %q has version %d, version %d is needed", ErrSchema, schema, version, in.needs)
	}
	in.schema, in.version, in.latest = schema, version, version
	return nil
}

func versionOf(ctx context.Context, q querier, schema string) (version int, err error) {
	err = q.row(ctx, statement("version", schema)).Scan(&version)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == stateUndefinedFunction || pgErr.Code == stateInvalidSchema) {
		err = fmt.Errorf("%w: schema %q has no pgxlock", ErrSchema, schema)
	}
	return version, err
}

// need makes sure that there is a version that not every installation has. Where it was
// not there, it looks whether it is by now.
func (in *installation) need(ctx context.Context, q querier, version int, what string) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.latest >= version {
		return nil
	}
	latest, err := versionOf(ctx, q, in.schema)
	if err != nil {
		return err
	}
	if latest < version {
		return fmt.Errorf("%w: schema %q has version %d, %s version %d", ErrSchema, in.schema, latest, what, version)
	}
	in.latest = latest
	return nil
}

// has reports whether it was found to have that version when this program came to it.
func (in *installation) has(version int) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.version >= version
}

// hasNow reports whether it was found to have that version last.
func (in *installation) hasNow(version int) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.latest >= version
}

// hasQueue reports whether it was found to have the queue.
func (in *installation) hasQueue() bool { return in.has(queueVersion) }
