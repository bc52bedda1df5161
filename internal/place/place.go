// Package place finds out where in a database pgxlock is. Which table is the
// lock must never be inferred differently by two callers: the Locker, the
// migrations and the command all ask here.
package place

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// LookSQL is the statement of Look.
//
//go:embed look.sql
var LookSQL string

// Found is what there is.
type Found struct {
	OnPath string   // the schema in which an unqualified acquire_lock resolves; "": in none
	All    []string // the schemas that have pgxlock, in order
}

// ErrNone means that a database has no pgxlock.
var ErrNone = errors.New("this database has no pgxlock")

// Look looks, with a connection whose search_path is still that of its role.
func Look(ctx context.Context, row func(ctx context.Context, sql string, args ...any) pgx.Row) (Found, error) {
	return Read(func(onPath **string, all *[]string) error { return row(ctx, LookSQL).Scan(onPath, all) })
}

// Read reads the row of LookSQL.
func Read(scan func(onPath **string, all *[]string) error) (f Found, err error) {
	var onPath *string
	if err := scan(&onPath, &f.All); err != nil {
		return f, err
	}
	if onPath != nil {
		f.OnPath = *onPath
	}
	return f, nil
}

// Choose returns the schema that a caller means who names none: the one on the
// search_path, else the only one.
func (f Found) Choose() (string, error) {
	switch {
	case f.OnPath != "" && slices.Contains(f.All, f.OnPath):
		return f.OnPath, nil
	case f.OnPath != "":
		return "", fmt.Errorf("the functions in schema %q are older than pgxlock's", f.OnPath)
	case len(f.All) == 1:
		return f.All[0], nil
	case len(f.All) == 0:
		return "", ErrNone
	}
	return "", fmt.Errorf("pgxlock is installed in %s, and none of them is on the search_path: name one", f.list())
}

// Target returns the schema to migrate for a caller who names none, "" for the
// one that search_path names first. It is never a second one by accident: two
// tables would be two locks.
func (f Found) Target() (string, error) {
	if f.OnPath == "" && len(f.All) > 0 {
		return "", fmt.Errorf("pgxlock is installed in %s, which is not on the search_path: name that schema, or another one for a second lock table that knows nothing of the first", f.list())
	}
	return f.OnPath, nil
}

func (f Found) list() string {
	quoted := make([]string, len(f.All))
	for i, schema := range f.All {
		quoted[i] = pgx.Identifier{schema}.Sanitize()
	}
	return "schema " + strings.Join(quoted, ", ")
}

// CheckName says what is wrong with the name of a schema.
func CheckName(schema string) error {
	switch {
	case len(schema) > 63:
		return fmt.Errorf("has %d bytes, PostgreSQL keeps 63 of a name", len(schema))
	case !utf8.ValidString(schema) || strings.ContainsRune(schema, 0):
		return errors.New("must be valid UTF-8 without zero bytes")
	case strings.HasPrefix(schema, "pg_"):
		return errors.New("must not begin with pg_, such schemas are the server's")
	}
	return nil
}
