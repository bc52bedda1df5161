// Package migrations installs and upgrades pgxlock's tables and functions.
//
//	err := migrations.Up(ctx, pool, nil) // does nothing where the newest version is installed
//
// A program can call [Up] at its start; several processes may do so at once. A program that
// only locks does not import this package, and so does not carry the files.
//
// # Other tools
//
// The files are golang-migrate pairs of plain SQL, and [FS] holds them for programs that
// run golang-migrate or another tool themselves. Each up file is one statement: it takes
// effect as a whole or not at all, with psql (with or without -1), with golang-migrate's
// library or command, and with Up. Each file records its own version, so every tool sees
// what another one installed.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// FS holds the migrations, NNNNNN_name.up.sql and NNNNNN_name.down.sql, in its root. A released
// file never changes.
//
//go:embed 0*.sql
var FS embed.FS

// Table is the name of the version table, for programs that run golang-migrate themselves
// (x-migrations-table=pgxlock_migrations). If others may create functions in the schema,
// let Up or psql run the files instead: those functions could replace what golang-migrate's
// own statements call.
const Table = "pgxlock_migrations"

//go:embed sql/*.sql
var sqlFiles embed.FS

// statement returns sql/name.sql.
func statement(name string) string {
	text, err := sqlFiles.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic("pgxlock: migrations: " + err.Error()) // a name that this program misspelt
	}
	return string(text)
}

// Config configures the functions of this package. A nil *Config means the zero value.
type Config struct {
	// Schema is created if it does not exist, and is then closed to PUBLIC. Locks in one
	// schema know nothing of those in another. Default: the schema that a Locker would use,
	// the first of the search_path of a new connection that has a pgxlock which belongs to
	// superusers or to the owner of the database, otherwise the only one in the database. If
	// there is none, it is the first schema that the search_path names, if that belongs to one
	// of these or to this role. Programs must name the schema if another role runs the migrations.
	Schema string

	// Force lets Down remove what is in use: live leases and shares, advisory locks with
	// tokens, claims and runs.
	Force bool
}

// DamageError means that tables, views, sequences, functions or rows of the installed version
// are missing: somebody dropped them, with a tool's "drop" or by hand, or made the database
// from a dump without rows. Up recreates them; the contents of dropped tables are lost.
type DamageError struct {
	Schema  string
	Version uint     // the installed version; 0 if it cannot be determined any more
	Missing []string // as "table pgxlock_waiters" or "row of pgxlock_epoch"
}

func (e *DamageError) Error() string {
	shown, more := e.Missing, ""
	if len(shown) > 5 {
		shown, more = shown[:5], fmt.Sprintf(" and %d more", len(shown)-5)
	}
	return fmt.Sprintf("schema %q lacks %s%s: run migrations.Up or pgxlock migrate up", e.Schema, strings.Join(shown, ", "), more)
}

// Up brings the schema to the newest version. It does nothing if that version is installed,
// or if a newer program has installed a later one. It recreates objects that were dropped
// by hand. It adopts what psql or golang-migrate's command installed. It also adopts a
// table distributed_locks with functions acquire_lock and release_lock of the widespread
// form that pgxlock replaces: their callers go on as before.
//
// After a pg_upgrade, or a restore into another cluster or from a dump without rows, acquires
// fail until Up has run once: it raises the fencing tokens above all that were ever issued.
//
// Up opens its own connections, with the pool's configuration and hooks, directly or
// through a pooler in any mode: each file is one transaction, changes no setting beyond it,
// and uses no prepared statements. Several processes may run Up at once. After an error the
// schema is as the last successful file left it. Up waits at most 2 s for locks on the
// tables (SQLSTATE 55P03): run it again when the blocking transaction has ended. If ctx
// ends, Up still finishes a file that has begun.
func Up(ctx context.Context, pool *pgxpool.Pool, cfg *Config) error {
	return retried(func() error { return connect(ctx, "up", pool, cfg, up) })
}

// UpSQL is [Up] for database/sql, with the driver of pgx or lib/pq: it takes connections of db. Name
// Config.Schema if they do not all have the search_path of the role.
func UpSQL(ctx context.Context, db *sql.DB, cfg *Config) error {
	return retried(func() error { return begin(ctx, "up", db, cfg, up) })
}

func retried(up func() error) error {
	for attempt := 1; ; attempt++ {
		if err := up(); attempt == 5 || !overtaken(err) {
			return err
		}
	}
}

// overtaken reports whether somebody else came between the look at the version and the
// file: then what is to be done is another thing now, if anything.
func overtaken(err error) bool {
	return lockerr.SQLState(err) == pgerrcode.ObjectNotInPrerequisiteState
}

func up(ctx context.Context, m *migrator) error {
	found, err := m.look(ctx)
	if err != nil {
		return err
	}
	files := readFiles("up")
	newest := uint(len(files))
	switch {
	case found.owner == trusted && found.damage != nil:
		return fmt.Errorf("%w; %w", found.damage, m.notOurs(ctx))
	case found.owner == trusted && found.version >= newest:
		return nil // nothing to do, and not ours to do: a program that may only lock calls Up at its start, too
	case found.owner == trusted:
		return m.notOurs(ctx)
	case found.owner == ours && found.version > newest:
		return m.write(ctx, found, step{sql: statement("repair")}) // an older program starts again while newer ones are rolled out
	case found.damage != nil && !found.onlyRows:
		// As after a move: a file makes what is not there, and leaves the rest. All of
		// them in one transaction: the rights are right again only after the last.
		m.again = true
		return m.write(ctx, found, append(steps(files), step{sql: statement("repair")})...)
	}
	// A stranger's is refused by the file, which names what is his.
	for _, file := range files[min(found.version, newest):] {
		if err := m.write(ctx, found, step{sql: file}); err != nil {
			return err
		}
	}
	return m.write(ctx, found, step{sql: statement("repair")})
}

// notOurs is the error that keeps us from running, with our rights, what another role wrote.
func (m *migrator) notOurs(ctx context.Context) error {
	r, err := m.rights(ctx)
	if err != nil {
		return err
	}
	return fmt.Errorf("the installed schema belongs to another role, %s, and this is %s: connect as %[1]s, or, as a member of it, SET ROLE in the pool's AfterConnect", r.owner, r.role)
}

// rights are what decides whether a role may migrate a schema. Names are quoted for a statement.
type rights struct {
	role, owner      string // the role that asks, and the one that owns pgxlock
	exists, creates  bool   // the schema; objects in it
	createsSchemas   bool
	schema, database string
}

func (m *migrator) rights(ctx context.Context) (r rights, err error) {
	rows, err := m.send(ctx, m.settings(), step{statement("rights"), []string{m.schema}})
	if err != nil {
		return r, err
	}
	row := rows[0]
	return rights{string(row[0]), string(row[1]), row[2] != nil, string(row[2]) == "t", string(row[3]) == "t", string(row[4]), string(row[5])}, nil
}

// refused adds to an error which right this role lacks, where that is why.
func (m *migrator) refused(ctx context.Context, err error) error {
	if lockerr.SQLState(err) != pgerrcode.InsufficientPrivilege || hint(err) != "" { // a hint says it
		return err
	}
	r, failed := m.rights(ctx)
	switch {
	case failed != nil: // the first error is what counts
	case r.exists && !r.creates:
		return &lockerr.RefusedError{Err: err, Lack: "run GRANT CREATE ON SCHEMA " + r.schema + " TO " + r.role + " as the schema's owner, or migrate as another role"}
	case !r.exists && !r.createsSchemas:
		return &lockerr.RefusedError{Err: err, Lack: "run GRANT CREATE ON DATABASE " + r.database + " TO " + r.role + " as the database's owner, or migrate as another role"}
	}
	return err
}

// errUnreleased keeps us from half replacing what has other names.
var errUnreleased = errors.New("pgxlock from before its first release, which cannot be upgraded: remove it with the program that installed it (pgxlock migrate down), and run this again; nothing was changed")

// newerError keeps us from undoing what we do not know.
type newerError struct{ version uint }

func (e newerError) Error() string {
	return fmt.Sprintf("the schema has version %d, and this program knows up to %d: use a newer one", e.version, newestVersion())
}

// Down removes pgxlock's tables and functions, all of them or, after an error, none: it waits for locks
// on the tables as Up does. The schema and an empty version table remain. If Up adopted a table and functions, Down restores them as
// they were, with their rows. Unless cfg.Force is set, Down removes nothing while leases or
// shares are live, sessions hold advisory locks with tokens, claims exist or runs are
// remembered (SQLSTATE 55006). It also removes nothing if a newer program has installed a
// later version. If nothing is installed it does nothing, but a schema that cfg names must
// exist.
func Down(ctx context.Context, pool *pgxpool.Pool, cfg *Config) error {
	return connect(ctx, "down", pool, cfg, func(ctx context.Context, m *migrator) error {
		found, err := m.mine(ctx)
		switch {
		case err != nil:
			return err
		case !found.exists:
			return fmt.Errorf("there is no schema %q (Config.Schema)", m.schema)
		case found.version == 0:
			return nil
		}
		// In one transaction: the first file gives roles the rights that they have without hardening, and a
		// later one may fail, because a table is locked.
		files := steps(readFiles("down")[:found.version])
		slices.Reverse(files)
		return m.write(ctx, found, files...)
	})
}

// A Status says what is installed.
type Status struct {
	Database, Schema string
	Installed        uint // the version; 0: none
	Newest           uint // of this package
}

// Version returns the installed version, or a newer one that is recorded, and where it is. With a
// [*DamageError], which means that parts of that version are missing, the Status is set as well.
func Version(ctx context.Context, pool *pgxpool.Pool, cfg *Config) (Status, error) {
	status := Status{Newest: newestVersion()}
	err := connect(ctx, "version", pool, cfg, func(ctx context.Context, m *migrator) error {
		found, err := m.look(ctx)
		if err != nil {
			return err
		}
		status.Database, status.Schema = strings.TrimPrefix(found.database, "/"), m.schema
		if status.Installed, err = m.recorded(ctx, found); err != nil {
			return err
		}
		if found.damage != nil {
			return found.damage
		}
		return nil
	})
	return status, err
}

// Repair clears the dirty mark that golang-migrate leaves when a file failed (the file
// itself left nothing behind), restores the rows that a dump without rows lacks, and raises
// the fencing tokens if the database was moved or restored. Up does all of this as well.
func Repair(ctx context.Context, pool *pgxpool.Pool, cfg *Config) error {
	return connect(ctx, "repair", pool, cfg, func(ctx context.Context, m *migrator) error {
		found, err := m.mine(ctx)
		switch {
		case err != nil:
			return err
		case found.version == 0:
			return fmt.Errorf("nothing is installed in schema %q; run Up (pgxlock migrate up)", m.schema)
		}
		return m.write(ctx, found, step{sql: statement("repair")})
	})
}

// connect calls fn with a connection of its own, made from the pool's configuration.
func connect(ctx context.Context, op string, pool *pgxpool.Pool, cfg *Config, fn func(context.Context, *migrator) error) (err error) {
	defer func() { err = explain(op, err) }()
	if err := lockerr.MissingContext(ctx); err != nil {
		return err
	}
	if pool == nil {
		return errors.New("the pool is nil; make one with pgxpool.New")
	}
	config := pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if config.AfterConnect != nil {
		if err := config.AfterConnect(ctx, conn); err != nil {
			return err
		}
	}
	return migrate(ctx, op, pgxSender{conn.PgConn()}, cfg, fn)
}

// begin calls fn with the transactions of a *sql.DB.
func begin(ctx context.Context, op string, db *sql.DB, cfg *Config, fn func(context.Context, *migrator) error) (err error) {
	defer func() { err = explain(op, err) }()
	if err := lockerr.MissingContext(ctx); err != nil {
		return err
	}
	if db == nil {
		return errors.New("db is nil; open one with sql.Open")
	}
	return migrate(ctx, op, sqlSender{db}, cfg, fn)
}

// migrate calls fn with the schema that is meant.
func migrate(ctx context.Context, op string, to sender, cfg *Config, fn func(context.Context, *migrator) error) error {
	if cfg == nil {
		cfg = &Config{}
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return fmt.Errorf("Config.Schema %.80q %w", cfg.Schema, err)
	}
	m := &migrator{sender: to, schema: cfg.Schema, force: cfg.Force}
	if m.schema == "" {
		if err := m.choose(ctx, op != "version"); err != nil {
			return err
		}
	}
	return fn(ctx, m)
}

func explain(op string, err error) error {
	if lockerr.SQLState(err) == pgerrcode.FeatureNotSupported {
		err = fmt.Errorf("%w (%s): %w", err, hint(err), errors.ErrUnsupported)
	}
	if err != nil {
		err = fmt.Errorf("pgxlock: migrations: %s: %w", op, err)
	}
	return err
}

// hint is what the server advises; only pgx passes it on.
func hint(err error) string {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Hint
	}
	return ""
}

// A migrator works on one schema. All that it sends works through a pooler, which may
// give each transaction to another session of the server.
type migrator struct {
	sender
	schema string
	force  bool // what is in use may be removed
	again  bool // all files run, over what is there
}

// send runs the steps in one READ COMMITTED transaction, whatever the role's default is.
func (m *migrator) send(ctx context.Context, all ...step) ([][][]byte, error) {
	return m.sender.send(ctx, append([]step{{sql: statements.ConnReadCommitted.Text()}}, all...)...)
}

// choose finds the schema that is meant where none was named. One that would get the
// objects must be beyond doubt.
func (m *migrator) choose(ctx context.Context, beyondDoubt bool) error {
	rows, err := m.send(ctx, step{place.LookSQL, []string{""}})
	if err != nil {
		return err
	}
	found, err := place.Read(func(into ...any) error {
		*into[0].(*bool) = string(rows[0][0]) == "t"
		return json.Unmarshal(rows[0][1], into[1])
	})
	if err != nil {
		return err
	}
	if m.schema, err = found.Target(); err != nil {
		return fmt.Errorf("%w (Config.Schema)", err)
	}
	if m.schema != "" {
		return nil
	}
	rows, err = m.send(ctx, step{sql: statement("path")})
	if err != nil {
		return err
	}
	path := string(rows[0][0])
	if m.schema = string(rows[0][1]); !beyondDoubt {
		return nil
	}
	_, err = m.send(ctx, step{statement("named"), []string{path, m.schema}}, step{sql: statement("check_schema")})
	return err
}

// settings is the step that makes a transaction fit for migrating.
func (m *migrator) settings() step {
	onOff := map[bool]string{true: "on", false: "off"}
	return step{statement("settings"), []string{m.schema, onOff[m.force], onOff[m.again], strconv.FormatUint(uint64(newestVersion()), 10)}}
}

// write runs the steps in one transaction, under the locks of all who migrate. When ctx
// ends, what has begun is finished.
func (m *migrator) write(ctx context.Context, found installed, what ...step) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	key := strconv.FormatInt(lockkey.OfMigrators(found.database, m.schema, Table), 10)
	all := []step{{sql: statements.ConnReadWrite.Text()}, m.settings(), {statement("locks"), []string{key}}}
	if !found.exists {
		all = append(all, step{sql: statement("create_schema")})
	}
	if found.version <= newestVersion() { // else a newer program records it
		all = append(all, step{sql: statement("record")})
	}
	all = append(all, step{sql: statement("search_path")})
	if _, err := m.send(context.WithoutCancel(ctx), append(all, what...)...); err != nil {
		return m.refused(ctx, err)
	}
	return nil
}

// owner is whose the installation is.
type owner int

const (
	ours     owner = iota // or nobody's, where there is none
	trusted               // of a role that we are at the mercy of anyway
	stranger              // of a role that merely may create objects in the schema
)

// installed is what there is.
type installed struct {
	version  uint // 0: none
	owner    owner
	damage   *DamageError // nil: none
	onlyRows bool         // the damage is that rows are missing, which every write restores
	exists   bool         // the schema
	readable bool         // this role may read the tables of which a row is needed
	database string       // as golang-migrate's command calls it
}

// mine is look, and fails if what is there is not for this role or this program to change.
func (m *migrator) mine(ctx context.Context) (found installed, err error) {
	found, err = m.look(ctx)
	switch {
	case err != nil:
	case found.owner != ours:
		err = m.notOurs(ctx)
	case found.damage != nil && !found.onlyRows:
		err = found.damage
	case found.version > newestVersion():
		err = newerError{found.version}
	}
	return found, err
}

// look looks at what is there, and not at what was recorded.
func (m *migrator) look(ctx context.Context) (found installed, err error) {
	read := func(s step) ([][][]byte, error) {
		return m.send(ctx, m.settings(), s)
	}
	rows, err := read(step{statement("installed"), []string{m.schema}})
	if err != nil {
		return found, err
	}
	is := func(column int) bool { return string(rows[0][column]) == "t" }
	if is(6) {
		return found, fmt.Errorf("schema %q has %w", m.schema, errUnreleased)
	}
	version, err := strconv.ParseUint(string(rows[0][0]), 10, 32)
	if err != nil {
		return found, err
	}
	found = installed{version: uint(version), owner: stranger, exists: is(4), database: string(rows[0][5])}
	found.readable = is(7)
	if is(1) {
		found.owner = ours
	} else if is(2) {
		found.owner = trusted
	}
	complete := found.version
	if complete == 0 && is(3) {
		complete = newestVersion() // the function that tells is gone, too
	}
	if complete == 0 || complete > newestVersion() {
		return found, nil
	}
	rows, err = read(step{place.MissingSQL, []string{m.schema, strconv.FormatUint(uint64(complete), 10)}})
	if err == nil && len(rows) == 0 && found.readable {
		found.onlyRows = true
		rows, err = read(step{sql: m.qualified("rows")})
	}
	if err != nil || len(rows) == 0 {
		return found, err
	}
	found.damage = &DamageError{Schema: m.schema, Version: found.version}
	for _, row := range rows {
		found.damage.Missing = append(found.damage.Missing, string(row[0]))
	}
	return found, nil
}

// recorded returns the version that is installed, or the newer one that is recorded, as record.sql refuses it.
func (m *migrator) recorded(ctx context.Context, found installed) (uint, error) {
	if !found.readable {
		return found.version, nil
	}
	rows, err := m.send(ctx, m.settings(), step{sql: m.qualified("newer")})
	if err != nil || len(rows) == 0 {
		return found.version, err
	}
	newer, err := strconv.ParseUint(string(rows[0][0]), 10, 32)
	return uint(newer), err
}

// qualified is a statement on tables of the schema.
func (m *migrator) qualified(name string) string {
	return strings.ReplaceAll(statement(name), "/* schema */", pgx.Identifier{m.schema}.Sanitize()+".")
}

// readFiles returns the texts of the files of a direction, the first version first.
func readFiles(direction string) (texts []string) {
	names, err := fs.Glob(FS, "*."+direction+".sql") // sorted
	if err != nil {
		panic("pgxlock: migrations: " + err.Error())
	}
	for _, name := range names {
		text, err := FS.ReadFile(name)
		if err != nil {
			panic("pgxlock: migrations: " + err.Error())
		}
		texts = append(texts, string(text))
	}
	return texts
}

// newestVersion is that of the last file in FS.
func newestVersion() uint {
	names, err := fs.Glob(FS, "*.up.sql")
	if err != nil || len(names) == 0 {
		panic("pgxlock: migrations: no files embedded")
	}
	return uint(len(names))
}
