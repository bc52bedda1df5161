// Package migrations installs and upgrades pgxlock's tables and functions.
//
// The files are golang-migrate pairs of plain SQL; FS holds them for programs
// that run golang-migrate, or another tool, themselves. Each up file is one
// statement: it takes effect as a whole or not at all, whoever runs it (psql
// with or without -1, golang-migrate's library or command, [Up]), and it
// records its version itself, so that every way knows what another one did.
//
// This is a package of its own so that a program that only locks does not link
// golang-migrate.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/database"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxlock/pgxlock/internal/place"
)

// FS holds the migrations, NNNNNN_name.up.sql and NNNNNN_name.down.sql, in its
// root. A file never changes once it was released.
//
//go:embed 0*.sql
var FS embed.FS

// Table is the name of the version table, for those who run golang-migrate
// themselves (x-migrations-table=pgxlock_migrations). Where others may create
// functions in the schema, rather let [Up] or psql run the files: they could
// replace what golang-migrate's own statements call.
const Table = "pgxlock_migrations"

//go:embed sql/session.sql
var sessionSQL string

//go:embed sql/create_schema.sql
var createSchemaSQL string

//go:embed sql/check_schema.sql
var checkSchemaSQL string

//go:embed sql/version_table.sql
var versionTableSQL string

//go:embed sql/target.sql
var targetSQL string

//go:embed sql/bare_path.sql
var barePathSQL string

//go:embed sql/in_schema.sql
var inSchemaSQL string

//go:embed sql/installed.sql
var installedSQL string

//go:embed sql/in_use.sql
var inUseSQL string

//go:embed sql/repair.sql
var repairSQL string

// Config says where and how to migrate. A nil *Config means the zero value.
type Config struct {
	// Schema is created if it does not exist, and closed to PUBLIC then. Empty:
	// the schema in which acquire_lock is found by the search_path of a new
	// connection of the pool, else the one that it names first; but an error if
	// pgxlock is in a schema that is not on the search_path, for a second table
	// would be a second lock.
	Schema string

	// Force lets Down remove leases that are live, under their holders.
	Force bool
}

// Up brings the schema to the newest version, and does nothing where it is there
// already, or where a newer program has brought a later one. It adopts what psql or
// golang-migrate's command installed, and a table distributed_locks with functions
// acquire_lock and release_lock of the widespread form that pgxlock replaces: their
// callers go on as before.
//
// After a pg_upgrade, or a restore into another cluster, acquires fail until Up
// was run once: it lifts the fencing tokens above all that were ever given out.
//
// Up connects by itself, with the pool's configuration and hooks, and needs a
// session of its own: give it a direct connection or a pooler in session mode.
// Several may run at once. An error leaves the schema as it was, but for an empty
// version table. Locks on the tables are waited for at most 2 s (SQLSTATE 55P03):
// run it again when the transaction that was in the way has ended. When ctx ends,
// a file that has begun is finished.
func Up(ctx context.Context, pool *pgxpool.Pool, cfg *Config) error {
	for attempt := 1; ; attempt++ {
		if err := up(ctx, pool, cfg); attempt == 5 || !overtaken(err) {
			return err
		}
	}
}

// overtaken says whether somebody who does not take golang-migrate's lock, such
// as psql, came between the look at the version and the file: then what is to be
// done is another thing now, if anything.
func overtaken(err error) bool {
	if _, ok := errors.AsType[migrate.ErrDirty](err); ok {
		return true
	}
	if _, ok := errors.AsType[newerError](err); ok {
		return true // a newer program: there is nothing left to do
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == pgerrcode.ObjectNotInPrerequisiteState
}

func up(ctx context.Context, pool *pgxpool.Pool, cfg *Config) error {
	return connect(ctx, "up", pool, cfg, func(db *handle) error {
		v, owner, err := installedVersion(ctx, db)
		switch {
		case err != nil:
			return err
		case owner == trusted && v >= newestVersion():
			return nil // nothing to do, and not ours to do: a program that may only lock calls Up at its start, too
		case owner == trusted:
			return errNotOurs
		case owner == ours && v > newestVersion():
			_, err := db.ExecContext(ctx, repairSQL) // an older program starts again while newer ones are rolled out
			return err
		}
		// A stranger's is refused by the file, which names what is his.
		if _, err := db.ExecContext(ctx, createSchemaSQL); err != nil {
			return err
		}
		if err := step(ctx, db, (*migrate.Migrate).Up); err != nil {
			return err
		}
		_, err = db.ExecContext(ctx, repairSQL)
		return err
	})
}

// errNotOurs keeps us from running, as whoever we are, what somebody else wrote.
var errNotOurs = errors.New("what is installed belongs to another role: SET ROLE to that role, for example in the pool's AfterConnect")

// newerError keeps us from undoing what we do not know.
type newerError struct{ version uint }

func (e newerError) Error() string {
	return fmt.Sprintf("the schema has version %d, and this program knows up to %d: use a newer one", e.version, newestVersion())
}

// Down removes our tables and functions, the newest version first; the schema and
// an empty version table remain. A table and functions that Up adopted are given
// back as they were, with their rows. It refuses while leases are live (SQLSTATE
// 55006), unless cfg.Force is set, and where a newer program has brought a later
// version.
func Down(ctx context.Context, pool *pgxpool.Pool, cfg *Config) error {
	return connect(ctx, "down", pool, cfg, func(db *handle) error {
		if v, owner, err := installedVersion(ctx, db); err != nil || v == 0 {
			return err
		} else if owner != ours {
			return errNotOurs
		} else if v > newestVersion() {
			return newerError{v}
		}
		// As the files do, but before the first of them has run.
		if _, err := db.ExecContext(ctx, inUseSQL); err != nil {
			return err
		}
		return step(ctx, db, (*migrate.Migrate).Down)
	})
}

// Version returns the version that is installed, 0 for none, and the newest one
// that this package has.
func Version(ctx context.Context, pool *pgxpool.Pool, cfg *Config) (installed, newest uint, err error) {
	err = connect(ctx, "version", pool, cfg, func(db *handle) error {
		installed, _, err = installedVersion(ctx, db)
		return err
	})
	return installed, newestVersion(), err
}

// Repair clears the dirty mark that golang-migrate leaves when a file failed
// (the file itself left nothing behind), and lifts the fencing tokens if the
// database was moved or restored. Up does both, too.
func Repair(ctx context.Context, pool *pgxpool.Pool, cfg *Config) error {
	return connect(ctx, "repair", pool, cfg, func(db *handle) error {
		if v, owner, err := installedVersion(ctx, db); err != nil {
			return err
		} else if v == 0 {
			return errors.New("nothing is installed here; run Up (pgxlock migrate up)")
		} else if owner != ours {
			return errNotOurs
		} else if v > newestVersion() {
			return newerError{v}
		}
		if err := step(ctx, db, func(*migrate.Migrate) error { return nil }); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, repairSQL)
		return err
	})
}

// connect calls fn with a database handle whose sessions are set up for
// migrating, made from the pool's configuration.
func connect(ctx context.Context, op string, pool *pgxpool.Pool, cfg *Config, fn func(*handle) error) error {
	if pool == nil {
		return fmt.Errorf("pgxlock: migrations: %s: the pool is nil; make one with pgxpool.New", op)
	}
	if cfg == nil {
		cfg = &Config{}
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return fmt.Errorf("pgxlock: migrations: %s: Config.Schema %.80q %w", op, cfg.Schema, err)
	}
	db := &handle{config: pool.Config()}
	db.DB = db.open(func(ctx context.Context, conn *pgx.Conn) error { return cfg.setUp(ctx, conn) })
	db.bare = db.open(func(ctx context.Context, conn *pgx.Conn) error {
		if err := cfg.setUp(ctx, conn); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, barePathSQL)
		return err
	})
	err := db.PingContext(ctx) // golang-migrate takes no context
	if err == nil {
		err = fn(db)
	}
	if err = errors.Join(err, db.bare.Close(), db.Close()); err != nil {
		return fmt.Errorf("pgxlock: migrations: %s: %w", op, plain(err))
	}
	return nil
}

// setUp prepares a new session for the schema that is named, or meant.
func (cfg *Config) setUp(ctx context.Context, conn *pgx.Conn) error {
	schema := cfg.Schema
	if schema == "" {
		found, err := place.Look(ctx, func(ctx context.Context, sql string, args ...any) pgx.Row {
			return conn.QueryRow(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
		})
		if err != nil {
			return err
		}
		if schema, err = found.Target(); err != nil {
			return fmt.Errorf("%w (Config.Schema, --schema)", err)
		}
	}
	_, err := conn.Exec(ctx, sessionSQL, pgx.QueryExecModeExec, schema, cfg.Force)
	return err
}

// handle is the database to migrate.
type handle struct {
	*sql.DB         // sessions whose search_path is that of the schema
	bare    *sql.DB // sessions for golang-migrate, whose search_path is pg_catalog
	config  *pgxpool.Config
}

// open returns a handle whose sessions have the pool's configuration, and are
// then set up.
func (db *handle) open(setUp func(context.Context, *pgx.Conn) error) *sql.DB {
	options := []stdlib.OptionOpenDB{stdlib.OptionAfterConnect(func(ctx context.Context, conn *pgx.Conn) error {
		if db.config.AfterConnect != nil {
			if err := db.config.AfterConnect(ctx, conn); err != nil {
				return err
			}
		}
		return setUp(ctx, conn)
	})}
	if db.config.BeforeConnect != nil {
		options = append(options, stdlib.OptionBeforeConnect(db.config.BeforeConnect))
	}
	return stdlib.OpenDB(*db.config.ConnConfig, options...)
}

// inSchema is golang-migrate's driver, but for where the files run, and that none
// begins when it is to stop. (golang-migrate's own GracefulStop is a data race
// when there are several files.)
type inSchema struct {
	database.Driver
	schema  string
	stopped func() error
}

func (d inSchema) Run(file io.Reader) error {
	if err := d.stopped(); err != nil {
		return err
	}
	begin := strings.ReplaceAll(inSchemaSQL, "pgxlock_schema", pgx.Identifier{d.schema}.Sanitize())
	return d.Driver.Run(io.MultiReader(strings.NewReader(begin), file))
}

// step runs golang-migrate on the database, under the lock that its command
// takes too. What golang-migrate cannot do is done first: refuse a search_path
// that leads elsewhere, wait for a file that psql runs, and set a dirty mark
// right.
func step(ctx context.Context, db *handle, do func(*migrate.Migrate) error) (err error) {
	for _, query := range []string{checkSchemaSQL, versionTableSQL} {
		if _, err := db.ExecContext(ctx, query); err != nil {
			return err
		}
	}
	files, err := iofs.New(FS, ".")
	if err != nil {
		return err
	}
	var schema, name string
	if err := db.QueryRowContext(ctx, targetSQL).Scan(&schema, &name); err != nil {
		return err
	}
	pgx5, err := migratepgx.WithInstance(db.bare, &migratepgx.Config{MigrationsTable: Table, SchemaName: schema, DatabaseName: name})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pgx5.Close()) }() // else its session is left to the garbage collector
	driver := inSchema{pgx5, schema, ctx.Err}
	m, err := migrate.NewWithInstance("iofs", files, "pgx", driver)
	if err != nil {
		return err
	}
	version, err := heal(ctx, db, driver)
	if err != nil {
		return err
	}
	if version > int(newestVersion()) {
		return newerError{uint(version)}
	}
	if err := do(m); err != nil && !errors.Is(err, migrate.ErrNoChange) {
		_, healErr := heal(context.WithoutCancel(ctx), db, driver)
		return errors.Join(err, healErr)
	}
	return ctx.Err()
}

// heal replaces a dirty mark by the version that is really there, which is known
// because our files take effect as a whole or not at all. It returns the version.
func heal(ctx context.Context, db *handle, driver database.Driver) (version int, err error) {
	if err := driver.Lock(); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, driver.Unlock()) }()
	version, dirty, err := driver.Version()
	if err != nil || !dirty {
		return version, err
	}
	there, owner, err := installedVersion(ctx, db)
	if err != nil {
		return 0, err
	}
	if owner != ours {
		there = 0 // what is there is not what our files made
	}
	return nilVersion(there), driver.SetVersion(nilVersion(there), false)
}

// nilVersion is golang-migrate's form of a version: -1 for none.
func nilVersion(v uint) int {
	if v == 0 {
		return database.NilVersion
	}
	return int(v)
}

// owner is whose the installation is.
type owner int

const (
	ours     owner = iota // or nobody's, where there is none
	trusted               // of a role that we are at the mercy of anyway
	stranger              // of a role that merely may create objects in the schema
)

// installedVersion returns the version, 0 for none, and whose it is.
func installedVersion(ctx context.Context, db *handle) (v uint, whose owner, err error) {
	var isOurs, isTrusted bool
	err = db.QueryRowContext(ctx, installedSQL).Scan(&v, &isOurs, &isTrusted)
	switch {
	case isOurs:
		whose = ours
	case isTrusted:
		whose = trusted
	default:
		whose = stranger
	}
	return v, whose, err
}

// newestVersion is that of the last file in FS.
func newestVersion() uint {
	names, err := fs.Glob(FS, "*.up.sql")
	if err != nil || len(names) == 0 {
		panic("pgxlock: migrations: no files embedded")
	}
	m, err := source.Parse(names[len(names)-1]) // Glob sorts
	if err != nil {
		panic("pgxlock: migrations: " + err.Error())
	}
	return m.Version
}

// plain takes golang-migrate's wrapper, which does not unwrap and prints the
// whole file, from around an error of the server.
func plain(err error) error {
	if e, ok := errors.AsType[database.Error](err); ok && e.OrigErr != nil {
		return e.OrigErr
	}
	if e, ok := errors.AsType[*database.Error](err); ok && e.OrigErr != nil {
		return e.OrigErr
	}
	return err
}
