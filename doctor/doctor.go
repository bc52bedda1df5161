// Package doctor checks whether locks can be trusted in a database: the server and its
// settings, a pooler in between, the schema, and the rights of the role.
//
//	findings, err := doctor.Check(ctx, pool, nil)
//
// Each [Finding] says what the check found and what to do about it. The command "pgxlock
// doctor" prints the same findings.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// Status says how serious a [Finding] is.
type Status string

// The results of a check, least serious first.
const (
	StatusOK      Status = "ok"
	StatusSkipped Status = "skipped" // the check, or a part of it, takes a right that a program with this role need not have
	StatusWarning Status = "warning" // locks work, but not every kind, or with a risk; or the check failed
	StatusError   Status = "error"   // locks are refused here, or protect less than they should
)

// A Finding is the result of one check of [Check].
type Finding struct {
	Check  string `json:"check"` // the name of the check, the same in all versions
	Status Status `json:"status"`
	Detail string `json:"detail"` // what the check found
	Advice string `json:"advice"` // what to do; may be empty where Status is StatusOK
}

// Config configures [Check]. A nil *Config means the defaults.
type Config struct {
	// Schema is where the migrations were run. To name it is to trust its owner, see
	// [pgxlock.LeaseConfig]. Default: the schema that a Locker would use.
	Schema string

	// LongTransaction is how long a transaction may be open before Check reports that it
	// holds back vacuum. Default 1 h.
	LongTransaction time.Duration
}

// Check checks whether locks can be trusted in the database, for the role of the pool's
// connections. docs/doctor.md explains the findings of each check. Check changes
// nothing, and takes no lock that anybody waits for.
//
// It opens connections of its own, up to two at a time, with the pool's configuration and
// hooks, as a Locker does. A check that fails is a finding with StatusWarning that says so. On a standby or a worker of Citus there is only
// one finding, because nothing is locked there. Without the migrations there are no findings about them.
//
// If ctx ends, or the server cannot be reached any more, Check returns the findings so far
// and a [*pgxlock.Error].
func Check(ctx context.Context, pool *pgxpool.Pool, cfg *Config) ([]Finding, error) {
	findings, err := examine(ctx, pool, cfg)
	if err != nil {
		err = &pgxlock.Error{Op: "doctor", Err: lockerr.Typed(err)}
	}
	return findings, err
}

// A doctor is one call of Check.
type doctor struct {
	dbconn.Dialer
	cfg      Config
	conn     *dbconn.Conn
	q        dbconn.Querier // on conn
	owner    string         // of the functions; "": not known
	mode     poolMode
	settings map[string]setting
	role     roleInfo
	schema   string // "": there is none, or it cannot be told which
	grant    string // the statements that let the role monitor
}

// A check looks at one thing. An error is what kept it from looking.
type check struct {
	name  string
	look  func(*doctor, context.Context) (Finding, error)
	needs string // the right that it takes, as advice to a role that lacks it
	skips bool   // roles that only lock need not have that right
	dials bool   // it makes a connection
	// installed says that without the migrations there is nothing to look at.
	installed bool
}

const (
	needsStats      = "GRANT pg_read_all_stats TO this role, or run it as one that has pg_monitor"
	needsOwner      = "run it as this owner"
	needsMonitoring = needsOwner + ", or this grant"
)

// In the order in which they are made: a later one may rest on what an earlier one
// found out.
var checks = []check{
	{name: "primary", look: (*doctor).primary},
	{name: "pooler", look: (*doctor).pooler, dials: true},
	{name: "advisory", look: (*doctor).advisory},
	{name: "notify", look: (*doctor).notify, dials: true},
	{name: "schema", look: (*doctor).installation, needs: "GRANT USAGE on its schema, and what grant_locks grants, to this role"},
	{name: "nodes", look: (*doctor).nodes, needs: "SELECT on Citus' table pg_dist_node"},
	{name: "rights", look: (*doctor).rights, installed: true},
	{name: "escalation", look: (*doctor).escalation, installed: true},
	{name: "search_path", look: (*doctor).searchPath, installed: true},
	{name: "table_locks", look: (*doctor).tableLocks, installed: true},
	{name: "tokens", look: (*doctor).tokens, needs: needsOwner, skips: true, installed: true},
	{name: "row_security", look: (*doctor).rowSecurity, installed: true},
	{name: "collation", look: (*doctor).collation, installed: true},
	{name: "expired", look: (*doctor).expired, needs: needsMonitoring, skips: true, installed: true},
	{name: "claims", look: (*doctor).claims, installed: true},
	{name: "runs", look: (*doctor).runs, needs: needsMonitoring, skips: true, installed: true},
	{name: "clock", look: (*doctor).clock},
	{name: "timeouts", look: (*doctor).timeouts},
	{name: "connections", look: (*doctor).connections},
	{name: "durability", look: (*doctor).durability, needs: needsStats, skips: true},
	{name: "lock_table", look: (*doctor).lockTable},
	{name: "prepared", look: (*doctor).prepared},
	{name: "snapshots", look: (*doctor).snapshots, needs: needsStats, skips: true},
	{name: "wraparound", look: (*doctor).wraparound},
}

// checkTimeout bounds one check, beside the time for connecting. What the server itself
// takes long for it ends before, by session.sql.
const checkTimeout = 2 * dbconn.Timeout

func examine(ctx context.Context, pool *pgxpool.Pool, cfg *Config) ([]Finding, error) {
	d := doctor{Dialer: dbconn.Dialer{Name: "pgxlock doctor"}, cfg: Config{LongTransaction: time.Hour}}
	if err := lockerr.MissingContext(ctx); err != nil {
		return nil, err
	}
	if pool == nil {
		return nil, errors.New("the pool is nil; make one with pgxpool.New")
	}
	if cfg != nil {
		d.cfg.Schema = cfg.Schema
		if cfg.LongTransaction != 0 {
			d.cfg.LongTransaction = cfg.LongTransaction
		}
	}
	if err := place.CheckName(d.cfg.Schema); err != nil {
		return nil, fmt.Errorf("doctor.Config.Schema %.80q %w", d.cfg.Schema, err)
	}
	if d.cfg.LongTransaction < 0 {
		return nil, fmt.Errorf("doctor.Config.LongTransaction is %s, it must be more than 0, or 0 for the default", d.cfg.LongTransaction)
	}
	d.Config = pool.Config()

	err := bounded(ctx, true, d.connect)
	if errors.Is(err, lockerr.ErrWorker) && !errors.Is(err, lockerr.ErrUnavailable) {
		return []Finding{{
			"nodes", StatusError, "the server is a Citus worker: a lock here excludes no caller on another node, and nothing can be installed",
			"connect to the coordinator: see " + lockerr.ManualEngines,
		}}, nil
	}
	if errors.Is(err, lockerr.ErrReadOnly) && !errors.Is(err, lockerr.ErrUnavailable) {
		return []Finding{{
			"primary", StatusError, "the server is a standby, where nothing is locked",
			"connect to the primary, or name all hosts in the connection string: Lockers choose the primary among them",
		}}, nil
	}
	if err != nil {
		return nil, err
	}
	defer dbconn.CloseQuietly(d.conn.Conn)

	var findings []Finding
	for _, c := range checks {
		if c.installed && d.schema == "" {
			continue
		}
		var f Finding
		err := bounded(ctx, c.dials, func(ctx context.Context) (err error) {
			f, err = c.look(&d, ctx)
			return err
		})
		if err != nil && (ctx.Err() != nil || d.conn.IsClosed()) {
			return findings, err
		}
		if err != nil {
			f = c.blind(err, d.role.Name)
		}
		f.Check, f.Detail, f.Advice = c.name, oneline.Text(f.Detail), oneline.Text(d.named(f.Advice))
		findings = append(findings, f)
	}
	return findings, nil
}

// bounded runs do within checkTimeout, or if it dials, within what that takes as well. An error that comes of the end of ctx, and
// only such a one, matches that of ctx.
func bounded(ctx context.Context, dials bool, do func(context.Context) error) error {
	most := checkTimeout
	if dials {
		most += 2 * dbconn.DialTime
	}
	within, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	err := do(within)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	case within.Err() != nil && !errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w (%v)", lockerr.ErrNoAnswer, err) //nolint:errorlint // what it tells of is the deadline, which was ours
	}
	return dbconn.NoAnswer(err)
}

// connect makes the connection, and learns what has to be known before anything is
// set on it.
func (d *doctor) connect(ctx context.Context) (err error) {
	conn, err := d.Dial(ctx, dbconn.Dial{})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			dbconn.CloseQuietly(conn.Conn)
		}
	}()
	// As behind a pooler in any case: what a statement needs is set for it alone, and
	// search_path stays the role's.
	d.conn, d.q = conn, dbconn.Querier{Conn: conn.Conn, OtherDefaults: conn.OtherDefaults}
	err = dbconn.Outlast(ctx, func() (err error) {
		d.settings, err = d.readSettings(ctx)
		return err
	})
	if err != nil {
		return err
	}
	if err = d.outlive(ctx, conn.Conn); err != nil {
		return err
	}
	d.role, err = one[roleInfo](ctx, d, statements.DoctorRole)
	return err
}

// outlive keeps the role's timeouts from ending a connection between two checks.
// Behind a pooler they would be others' settings.
func (d *doctor) outlive(ctx context.Context, conn *pgx.Conn) error {
	if !d.conn.Direct() {
		return nil
	}
	const local = false
	return dbconn.Querier{Conn: conn}.Exec(ctx, statements.ConnSession.Text(), local)
}

// roleInfo is who asks. The fields are as doctor/role.sql has them.
type roleInfo struct {
	Name, Database string
	SeesAll        bool // what other roles' sessions do
	Version        int  // of the server, as server_version_num
}

// named is an advice with the names of the roles and the schema, so that it can be copied.
func (d *doctor) named(advice string) string {
	quoted := func(name string) string { return pgx.Identifier{name}.Sanitize() }
	owner := "the role that owns the functions"
	if d.owner != "" {
		owner = "role " + quoted(d.owner)
	}
	return strings.NewReplacer("'this role'", quoteLiteral(d.role.Name), "this role", quoted(d.role.Name),
		"this owner", owner, "this grant", cmp.Or(d.grant, "with the rights of monitoring")).Replace(advice)
}

// one returns the row that a statement yields.
func one[T any](ctx context.Context, d *doctor, name statements.Name, args ...any) (T, error) {
	return pgx.CollectExactlyOneRow(d.q.Query(ctx, name.In(d.schema), args...), pgx.RowToStructByPos[T])
}

// all returns the rows that a statement yields.
func all[T any](ctx context.Context, d *doctor, name statements.Name, args ...any) ([]T, error) {
	return pgx.CollectRows(d.q.Query(ctx, name.In(d.schema), args...), pgx.RowToStructByPos[T])
}

// blind is the finding of a check that could not be made.
func (c *check) blind(err error, role string) Finding {
	why := oneline.Join(err.Error())
	switch lacks := lockerr.SQLState(err) == lockerr.StateNoRights && c.needs != ""; {
	case lacks && c.skips:
		return Finding{Status: StatusSkipped, Detail: fmt.Sprintf("role %q may not check it: %s", role, why), Advice: c.needs}
	case lacks:
		return Finding{Status: StatusWarning, Detail: "could not be checked: " + why, Advice: c.needs}
	}
	return Finding{Status: StatusWarning, Detail: "could not be checked: " + why, Advice: "run the check again; if it still fails, read the server's log"}
}

// counted returns a number of things: "1 standby", "2 standbys".
func counted(n int64, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// ok is a finding with nothing to do about it.
func ok(detail string, args ...any) Finding {
	return Finding{Status: StatusOK, Detail: fmt.Sprintf(detail, args...)}
}

// add says more. The worst status counts, and what is ok is kept before what is not.
func (f *Finding) add(status Status, detail, advice string) {
	order := []Status{StatusOK, StatusSkipped, StatusWarning, StatusError}
	if slices.Index(order, status) > slices.Index(order, f.Status) {
		f.Status = status
	}
	join := func(all *string, more string) {
		if *all != "" && more != "" {
			*all += "; "
		}
		*all += more
	}
	join(&f.Detail, detail)
	join(&f.Advice, advice)
}
