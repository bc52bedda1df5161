// Package place finds out where in a database pgxlock is, and whether to call it. Which table is
// the lock must never be inferred differently by two callers: the Locker, the migrations and the
// command all ask here.
//
// A schema counts only if it, and all in it that has one of pgxlock's names, belongs to
// superusers and to roles that the caller trusts: the owner of the database, and the owner of the
// schema if the caller names the schema. What is in another schema is never called, not even to
// find out what it is. It also keeps nobody from a schema that counts.
package place

import (
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/oneline"
)

// LookSQL finds out what there is, on a connection whose search_path is still that of its role.
// $1 is the schema that the caller names, "" for none.
//
//go:embed look.sql
var LookSQL string

// MissingSQL returns a row for each table, view, sequence and function that a version
// has and a schema lacks, such as "table pgxlock_waiters". $1 is the schema, $2 the version.
//
//go:embed missing.sql
var MissingSQL string

// Found is what there is.
type Found struct {
	Superuser bool     // the role that looked, or its session, is a superuser
	Schemas   []Schema // those on the search_path first, in its order
}

// A Schema has pgxlock, or what has its names.
type Schema struct {
	Name    string
	Rank    int  // on the search_path, from 1; 0: it is not there
	Older   bool // it has only an acquire_lock of before pgxlock
	Usable  bool // the role that looked may call what is in it
	Version int  // of the migrations; 0 in a schema that does not count
	Owners  []Owner
}

// An Owner is a role, other than a superuser, that can put code of its own where callers run it.
type Owner struct {
	Role    string
	Object  string // an object that it owns, as "function acquire_lock"
	Schema  bool   // it owns the schema
	Trusted bool   // by the caller who looked
}

// UntrustedError means that nothing in a schema is called, because of a role that owns a part of it.
type UntrustedError struct {
	Schema string
	Owner  Owner
	Named  bool // the caller named the schema
}

func (e *UntrustedError) Error() string {
	kind, name, _ := strings.Cut(e.Owner.Object, " ")
	what := fmt.Sprintf("the %s %q in it", kind, name)
	if name == "" {
		what = "the schema"
	}
	if e.Named || !e.Owner.Schema { // naming the schema trusts its owner
		return fmt.Sprintf("schema %q is not trusted: role %q owns %s, and is neither a superuser nor the owner of the schema or the database: drop that, or change its owner", e.Schema, e.Owner.Role, what)
	}
	return fmt.Sprintf("schema %q is not trusted: role %q owns %s, and is neither a superuser nor the owner of the database: name the schema if you trust its owner", e.Schema, e.Owner.Role, what)
}

// NoRights is what the server answers to the first call in a schema that is not Usable.
func (s Schema) NoRights() error {
	const severity = "ERROR"
	return &pgconn.PgError{
		Severity: severity, SeverityUnlocalized: severity, Code: "42501", // insufficient_privilege
		Message: fmt.Sprintf("permission denied for schema %q or the functions in it", s.Name),
	}
}

// untrusted returns why the schema does not count; nil: it does.
func (s Schema) untrusted(named bool) error {
	if i := slices.IndexFunc(s.Owners, func(o Owner) bool { return !o.Trusted }); i >= 0 {
		return &UntrustedError{s.Name, s.Owners[i], named}
	}
	return nil
}

// ErrNone means that a database has no pgxlock.
var ErrNone = errors.New("this database has no pgxlock")

// Read reads the row of LookSQL.
func Read(scan func(into ...any) error) (f Found, err error) {
	err = scan(&f.Superuser, &f.Schemas)
	return f, err
}

// Choose returns the schema that the caller means: the one that was named in LookSQL, or with
// named = "" the first on the search_path that counts, else the only one that does.
func (f Found) Choose(named string) (Schema, error) {
	if named != "" {
		if len(f.Schemas) == 0 {
			return Schema{}, fmt.Errorf("schema %q has no pgxlock", named)
		}
		return f.Schemas[0], f.Schemas[0].untrusted(true)
	}
	all, untrusted := f.count()
	switch {
	case len(all) == 0 && untrusted != nil:
		return Schema{}, untrusted
	case len(all) == 0:
		return Schema{}, ErrNone
	case all[0].Older:
		return Schema{}, fmt.Errorf("the functions in schema %q are older than pgxlock's", all[0].Name)
	case all[0].Rank > 0 || len(all) == 1:
		return all[0], nil
	}
	return Schema{}, several(all)
}

func several(all []Schema) error {
	return fmt.Errorf("pgxlock is installed in %s, and none of them is on the search_path: name one", list(all))
}

// Again is Choose for a caller who named no schema and was given this one before.
func (f Found) Again(schema string) (Schema, error) {
	f.Schemas = slices.DeleteFunc(slices.Clone(f.Schemas), func(s Schema) bool { return s.Name != schema })
	return f.Choose("")
}

// Target returns the schema to migrate for a caller who names none: the one of Choose, also if it is
// older, "" for the one that search_path names first. It is never a second one by accident: two
// tables would be two locks.
func (f Found) Target() (string, error) {
	all, untrusted := f.count()
	switch {
	case len(all) == 1 || len(all) > 0 && all[0].Rank > 0:
		return all[0].Name, nil
	case len(all) > 0:
		return "", several(all)
	case untrusted != nil && !slices.ContainsFunc(f.Schemas, func(s Schema) bool { return s.Rank == 1 }):
		return "", fmt.Errorf("%w, or another schema for a second lock table that knows nothing of the first", untrusted)
	}
	return "", nil
}

// Beside returns the schemas that have pgxlock but for this one, quoted, "" for none, and why the first of those that do not
// count does not.
func (f Found) Beside(schema string) (others string, untrusted error) {
	f.Schemas = slices.DeleteFunc(slices.Clone(f.Schemas), func(s Schema) bool { return s.Older || s.Name == schema })
	if len(f.Schemas) == 0 {
		return "", nil
	}
	_, untrusted = f.count()
	return list(f.Schemas), untrusted
}

// count returns the schemas that count for a caller who names none, and why the first of the others
// does not.
func (f Found) count() (all []Schema, untrusted error) {
	for _, s := range f.Schemas {
		if err := s.untrusted(false); err == nil {
			all = append(all, s)
		} else if untrusted == nil && !s.Older {
			untrusted = err
		}
	}
	return all, untrusted
}

// Installed returns the names of the schemas that have pgxlock and count, in order.
func (f Found) Installed() (names []string) {
	all, _ := f.count()
	for _, s := range all {
		if !s.Older {
			names = append(names, s.Name)
		}
	}
	slices.Sort(names)
	return names
}

// Warning says whose code a superuser runs in the schema; "" if it is only that of superusers, or
// the role that looked is none. WarningAdvice says what to do about it.
func (f Found) Warning(s Schema) string {
	if !f.Superuser || len(s.Owners) == 0 {
		return ""
	}
	return fmt.Sprintf("this role is a superuser and runs the code in schema %q, which role %q, that is none, owns or can change", s.Name, s.Owners[0].Role)
}

// WarningAdvice is what to do about a Warning.
const WarningAdvice = "connect as a role with few rights, or let a superuser own the schema and all in it"

func list(all []Schema) string {
	quoted := make([]string, len(all))
	for i, s := range all {
		quoted[i] = pgx.Identifier{s.Name}.Sanitize()
	}
	return "schema " + oneline.Some(quoted)
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
