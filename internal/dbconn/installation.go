package dbconn

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

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

	// Moved is called when a connection ends in another cluster than the one before, by their system
	// identifiers: what is held on that one is lost. nil: nothing is called.
	Moved func(was, is int64)

	cluster cluster     // of the last connection
	hidden  atomic.Bool // the server does not tell its cluster
	keeps   atomic.Bool // the server was seen to keep the advisory locks that it grants: each [Dial] looks until then

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

// choose returns the schema: the one that the caller named, the one that was found before, or
// what the connection found. It makes that the one that was found, and the cluster of the connection
// the one that is in use.
func (in *Installation) choose(c *Conn) (schema string, err error) {
	if in == nil {
		return "", nil
	}
	if left := in.enter(c.cluster); left != 0 && in.Moved != nil {
		in.Moved(left, c.cluster.system)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if c.notFound != nil {
		return "", c.notFound
	}
	var found place.Schema
	if in.Schema != "" && in.Asked == "" {
		found, err = c.found.Again(in.Schema)
	} else {
		found, err = c.found.Choose(in.Asked)
	}
	untrusted, isUntrusted := errors.AsType[*place.UntrustedError](err)
	switch {
	case isUntrusted:
		where := ""
		if in.Asked == "" {
			where = fmt.Sprintf(" (database %q; %s.Schema names a schema)", c.Config().Database, in.Config)
		}
		return "", &untrustedError{untrusted, where}
	case err != nil && in.Asked != "":
		return "", fmt.Errorf("%w: %w", lockerr.ErrSchema, err)
	case err != nil:
		return "", fmt.Errorf("%w: %w (database %q; %s.Schema names a schema)", lockerr.ErrSchema, err, c.Config().Database, in.Config)
	case !found.Usable:
		return "", found.NoRights()
	case found.Version < SchemaVersion:
		return "", fmt.Errorf("%w: schema %q has version %d, version %d is needed", lockerr.ErrSchema, found.Name, found.Version, SchemaVersion)
	}
	if in.Schema == "" {
		in.Schema, in.texts = found.Name, nil
	}
	return in.Schema, nil
}

// An untrustedError matches ErrSchema, whose advice it leaves out: migrations change nothing about it.
type untrustedError struct {
	*place.UntrustedError
	where string
}

func (e *untrustedError) Error() string { return e.UntrustedError.Error() + e.where }

func (e *untrustedError) Unwrap() []error { return []error{lockerr.ErrSchema, e.UntrustedError} }

// Find makes sure that the schema is known, trusted and new enough, with a connection whose search_path
// is still that of its role.
func (in *Installation) Find(ctx context.Context, q Querier) error {
	c := &Conn{Conn: q.Conn}
	if c.found, c.notFound = q.Look(ctx, in.Asked); c.notFound != nil {
		return c.notFound
	}
	_, err := in.choose(c)
	if errors.Is(err, lockerr.ErrSchema) && errors.Is(c.identify(ctx, q.Conn.PgConn(), nil), lockerr.ErrWorker) {
		return lockerr.ErrWorker // where nothing can be installed
	}
	return err
}

// Installed reports whether it was found.
func (in *Installation) Installed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.Schema != ""
}
