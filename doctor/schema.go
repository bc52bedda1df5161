package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// migrateAdvice is what brings or mends the schema.
const migrateAdvice = "run migrations.Up or pgxlock migrate up"

// repairAdvice mends what is recorded beside the schema.
const repairAdvice = "run pgxlock migrate repair"

// installation finds the schema by the rule of Lockers, and tells its version.
func (d *doctor) installation(ctx context.Context) (Finding, error) {
	found, err := d.q.Look(ctx, d.cfg.Schema)
	if err != nil {
		return Finding{}, err
	}
	schema, err := found.Choose(d.cfg.Schema)
	if _, ok := errors.AsType[*place.UntrustedError](err); ok {
		return Finding{
			Status: StatusError, Detail: fmt.Sprintf("%v (database %q)", err, d.role.Database),
			Advice: "name the schema (doctor.Config.Schema, --schema) if all in it is its owner's, and you trust that role: see " + lockerr.ManualTrust,
		}, nil
	}
	if err != nil && d.cfg.Schema != "" {
		return Finding{Status: StatusError, Detail: err.Error(), Advice: migrateAdvice}, nil
	}
	if err != nil {
		return Finding{
			Status: StatusError, Detail: fmt.Sprintf("%v (database %q)", err, d.role.Database),
			Advice: migrateAdvice + ", or name the schema (doctor.Config.Schema, --schema)",
		}, nil
	}
	d.schema = schema.Name
	version := schema.Version
	if !schema.Usable {
		return Finding{}, schema.NoRights() // what is in the catalogs can be read all the same
	}

	f := ok("schema %q has version %d", d.schema, version)
	missing, err := d.missing(ctx, version)
	if err != nil {
		return Finding{}, err
	}
	if len(missing) > 0 {
		f.add(StatusError, "it lacks "+oneline.Some(missing)+"; somebody dropped it", migrateAdvice+", which recreates it")
	}
	type tables struct{ Elsewhere, Persistence, Triggers string }
	altered, err := one[tables](ctx, d, statements.DoctorTables, d.schema)
	if err != nil {
		return Finding{}, err
	}
	if altered.Elsewhere != "" {
		f.add(StatusError, "tables with another access method than heap may lack updates and row locks: "+altered.Elsewhere, "ALTER TABLE ... SET ACCESS METHOD heap")
	}
	if altered.Persistence != "" {
		f.add(StatusError, "a crash or a failover would forget what it must not, or keep what it must forget: "+altered.Persistence, "ALTER TABLE ... SET LOGGED, or SET UNLOGGED")
	}
	if altered.Triggers != "" {
		f.add(StatusWarning, "triggers or rules of your own run with each change, and an error in one fails acquires and renewals: "+altered.Triggers,
			"leave pgxlock's tables out of what adds triggers to all tables")
	}
	switch {
	case version < dbconn.SchemaVersion:
		f.add(StatusError, fmt.Sprintf("this program needs version %d", dbconn.SchemaVersion), migrateAdvice)
	case version > dbconn.SchemaVersion:
		f.add(StatusWarning, fmt.Sprintf("this program knows version %d: it works, but cannot check what is newer", dbconn.SchemaVersion), "roll out programs of the newer version")
	}
	if warning := found.Warning(schema); warning != "" {
		f.add(StatusWarning, warning, place.WarningAdvice)
	}
	if d.cfg.Schema != "" {
		if found, err = d.q.Look(ctx, ""); err != nil {
			return Finding{}, err
		}
	}
	if all := found.Installed(); len(all) > 1 {
		f.add(StatusWarning, fmt.Sprintf("this database has %d of them (%s), and leases in one know nothing of those in another", len(all), oneline.Some(all)),
			"keep one, or name the schema wherever locks are made")
	}
	recorded, err := d.recorded(ctx)
	if err != nil {
		return Finding{}, err
	}
	if recorded.Nothing {
		f.add(StatusWarning, "pgxlock_migrations has no row, as in a database made from a dump without rows: other migration tools would run all files again", repairAdvice)
	}
	if recorded.Dirty {
		f.add(StatusWarning, "golang-migrate marked it dirty: a file failed, and left nothing behind", repairAdvice)
	}
	return f, nil
}

// missing returns what somebody dropped of the version. What a later one removed is not
// known.
func (d *doctor) missing(ctx context.Context, version int) ([]string, error) {
	if version > dbconn.SchemaVersion {
		return nil, nil
	}
	return pgx.CollectRows(d.q.Query(ctx, place.MissingSQL, d.schema, version), pgx.RowTo[string])
}

// record is what doctor/dirty.sql returns of golang-migrate's table of versions.
type record struct{ Dirty, Nothing bool }

// recorded reads what is recorded; nothing where this role may not know, for only other migration tools mind.
func (d *doctor) recorded(ctx context.Context) (record, error) {
	r, err := one[record](ctx, d, statements.DoctorDirty)
	if state := lockerr.SQLState(err); state == lockerr.StateNoRights || state == lockerr.StateUndefinedTable {
		return record{}, nil
	}
	return r, err
}

// roleKind is a kind of role that grant_locks() knows, as doctor/rights.sql returns it.
type roleKind struct {
	Name    string
	Lacks   string // the rights of it that this role does not have
	Mend    string // the statements that grant those
	Granted bool   // this role has a right that no more modest kind needs
	Owner   string // of the functions
}

// rights compares the role's rights with what each kind of role needs. The greatest kind that it
// was granted a right for is what it is meant to be.
func (d *doctor) rights(ctx context.Context) (Finding, error) {
	kinds, err := all[roleKind](ctx, d, statements.DoctorRights, d.schema)
	if err != nil {
		return Finding{}, err
	}
	if len(kinds) == 0 {
		return Finding{Status: StatusWarning, Detail: fmt.Sprintf("the rights that role %q needs are unknown: there is no pgxlock_rights() to list them", d.role.Name), Advice: migrateAdvice}, nil
	}
	d.owner = kinds[0].Owner
	var has []string
	for _, k := range kinds {
		if k.Name == "monitoring" {
			d.grant = k.Mend
		}
		if k.Lacks == "" {
			has = append(has, k.Name)
		}
	}
	meant := slices.IndexFunc(kinds, func(k roleKind) bool { return k.Granted })
	application := kinds[0]
	switch {
	case application.Lacks == "":
		return ok("role %q has all rights of %s", d.role.Name, strings.Join(has, ", ")), nil
	case meant >= 0 && kinds[meant].Lacks != "":
		k := kinds[meant]
		status := StatusWarning
		if k == application {
			status = StatusError
		}
		return Finding{Status: status, Detail: fmt.Sprintf("role %q lacks rights of %s: %s", d.role.Name, k.Name, k.Lacks), Advice: k.Mend}, nil
	case len(has) > 0:
		return ok("role %q has all rights of %s, and may not lock, which takes those of %s", d.role.Name, strings.Join(has, ", "), application.Name), nil
	}
	return Finding{Status: StatusError, Detail: fmt.Sprintf("role %q may not lock: it has been granted nothing", d.role.Name), Advice: application.Mend}, nil
}

// escalation looks for what lets other roles have their code run with the rights of the owner,
// and for the rights on tables by which they could.
func (d *doctor) escalation(ctx context.Context) (Finding, error) {
	type opening struct {
		Error        bool
		What, Remedy string
	}
	openings, err := all[opening](ctx, d, statements.DoctorEscalation, d.schema)
	if err != nil {
		return Finding{}, err
	}
	if len(openings) == 0 {
		return ok("no other role can have code run with the rights of the owner of schema %q", d.schema), nil
	}
	var f Finding
	for _, o := range openings {
		status := StatusWarning
		if o.Error {
			status = StatusError
		}
		remedy := o.Remedy
		if strings.Contains(f.Advice, remedy) {
			remedy = "" // once is enough
		}
		f.add(status, o.What, remedy)
	}
	return f, nil
}

// searchPath compares the settings of our functions with those they were made with.
func (d *doctor) searchPath(ctx context.Context) (Finding, error) {
	type function struct{ Signature string }
	astray, err := all[function](ctx, d, statements.DoctorSearchPath, d.schema)
	if err != nil {
		return Finding{}, err
	}
	if len(astray) == 0 {
		return ok("every function looks in schema %q first", d.schema), nil
	}
	names := make([]string, min(len(astray), 5))
	for i := range names {
		names[i] = astray[i].Signature
	}
	return Finding{
		Status: StatusError, Detail: fmt.Sprintf("%s without search_path = %s, pg_temp, which may find objects of others: %s", counted(int64(len(astray)), "function"), d.schema, strings.Join(names, ", ")),
		Advice: "run all the up files again: see " + lockerr.ManualInstall + "#renaming-the-schema",
	}, nil
}

// tokenState is what doctor/tokens.sql returns.
type tokenState struct {
	Epoch          bool // there is one
	Same           bool // the cluster is that of the epoch, and the timeline not an earlier one
	Highest, Drawn int64
	Number         int64 // the last one of this epoch
	Told           bool  // the server tells its timeline and its identifier
}

// tokens asks what repair_lock_tokens() would mend.
func (d *doctor) tokens(ctx context.Context) (Finding, error) {
	t, err := one[tokenState](ctx, d, statements.DoctorTokens, d.schema)
	if err != nil {
		return Finding{}, err
	}
	f := ok("the highest token of a lease is %d, and new ones are above %d", t.Highest, t.Drawn)
	const repair = repairAdvice + ", which lifts them above every one that was seen"
	switch {
	case !t.Epoch:
		f = Finding{Status: StatusError, Detail: "pgxlock_epoch has no row, as in a database made from a dump without rows, so that acquires fail (LK003)", Advice: repair}
	case !t.Same:
		f.add(StatusError, "the database was moved to another cluster or restored, so that acquires fail (LK003)", repair)
	case t.Highest > t.Drawn:
		f.add(StatusError, "rows were restored without the sequence, so that tokens could repeat", repair)
	}
	if t.Number >= 1<<39 {
		f.add(StatusWarning, fmt.Sprintf("%d of the %d numbers for tokens are used up, and without them acquires fail (LK003)", t.Number, int64(1)<<40),
			"SELECT repair_lock_tokens(), or run pgxlock migrate repair: it begins a new epoch, while locks are in use")
	}
	if !t.Told {
		f.add(StatusWarning, "the server does not tell its timeline or its system identifier: tokens may repeat after a failover that loses commits, or in a copy of the database",
			"use Fence, and run pgxlock migrate repair after a failover or a copy")
	}
	return f, nil
}

// rowSecurity looks for policies that would hide leases. Our functions refuse to
// work then.
func (d *doctor) rowSecurity(ctx context.Context) (Finding, error) {
	type table struct {
		Name    string
		Applies bool
	}
	tables, err := all[table](ctx, d, statements.DoctorRowSecurity, d.schema)
	if err != nil {
		return Finding{}, err
	}
	var applies, elsewhere []string
	for _, t := range tables {
		if t.Applies {
			applies = append(applies, t.Name)
		} else {
			elsewhere = append(elsewhere, t.Name)
		}
	}
	switch {
	case len(applies) > 0:
		return Finding{
			Status: StatusError, Detail: fmt.Sprintf("row-level security on %s applies to the functions that role %q calls, which then refuse to work (42501)", strings.Join(applies, ", "), d.role.Name),
			Advice: "ALTER TABLE ... DISABLE ROW LEVEL SECURITY, or see " + lockerr.ManualRights + "#row-level-security",
		}, nil
	case len(elsewhere) > 0:
		return ok("enabled on %s, where it stops nothing that role %q calls", strings.Join(elsewhere, ", "), d.role.Name), nil
	}
	return ok("not enabled on our tables"), nil
}

// databaseCollation is what doctor/collation_database.sql returns.
type databaseCollation struct{ Recorded, Actual, Indexes string }

// collation looks for indexes whose order the operating system, or ICU, changed
// under them: a unique one may then miss a name that it has.
func (d *doctor) collation(ctx context.Context) (Finding, error) {
	type index struct{ Name, Change string }
	changed, err := all[index](ctx, d, statements.DoctorCollation, d.schema)
	if err != nil {
		return Finding{}, err
	}
	f := ok("no index of ours depends on a collation that has changed")
	const reindex = "REINDEX the index, then ALTER COLLATION ... REFRESH VERSION"
	for _, i := range changed {
		f.add(StatusError, fmt.Sprintf("index %s has %s: it may miss a name that it has, and two get one lock", i.Name, i.Change), reindex)
	}
	if d.role.Version < 150000 {
		return f, nil
	}
	db, err := one[databaseCollation](ctx, d, statements.DoctorCollationDatabase, d.schema)
	if err != nil {
		return Finding{}, err
	}
	if db.Recorded != "" && db.Recorded != db.Actual {
		was := fmt.Sprintf("the collation of database %q had version %s, and has %q now", d.role.Database, db.Recorded, db.Actual)
		const refresh = "REINDEX DATABASE, then ALTER DATABASE ... REFRESH COLLATION VERSION"
		if db.Indexes != "" {
			f.add(StatusError, was+": indexes "+db.Indexes+" depend on it, and may miss a name that they have", refresh)
		} else {
			f.add(StatusWarning, was+": your own unique indexes on text may miss a value that they have; those of the locks do not depend on it", refresh)
		}
	}
	return f, nil
}

// manyExpired is how many leases may be left over at a time. Each Locker removes 256
// about every 10 minutes.
const manyExpired = 1000

func (d *doctor) expired(ctx context.Context) (Finding, error) {
	type leftOver struct{ N int64 }
	left, err := one[leftOver](ctx, d, statements.DoctorExpired)
	if err != nil {
		return Finding{}, err
	}
	f := ok("%s expired more than 2 hours ago", counted(left.N, "lease"))
	if left.N > manyExpired {
		f.add(StatusWarning, "housekeeping does not keep up: no Locker runs, or its role may not, or many holders crash",
			"SELECT reap_expired_locks('1 hour', 10000), now and then where only SQL callers lock")
	}
	return f, nil
}

// manyClaims is from which size on, in bytes, the table of claims is worth a word.
const manyClaims = 1 << 30

// claims looks at how many there are. No housekeeping removes them, because without its claim the
// work may be done again.
func (d *doctor) claims(ctx context.Context) (Finding, error) {
	type size struct{ Rows, Bytes int64 }
	table, err := one[size](ctx, d, statements.DoctorClaims, d.schema)
	if err != nil {
		return Finding{}, err
	}
	f := ok("about %s", counted(table.Rows, "claim"))
	if table.Bytes >= manyClaims {
		f.add(StatusWarning, fmt.Sprintf("they take %d GB, and stay until they are purged", table.Bytes>>30),
			"give claims a Retention, and call PurgeClaims or purge_claims() now and then")
	}
	return f, nil
}

// runs finds jobs of package once and of start_run() that stopped working, and that nobody will
// start again in their period.
func (d *doctor) runs(ctx context.Context) (Finding, error) {
	type stopped struct {
		Key     string
		Slot    time.Time
		State   string
		Holder  string
		Started time.Time
		Error   string
	}
	all, err := all[stopped](ctx, d, statements.DoctorRuns)
	if err != nil {
		return Finding{}, err
	}
	f := ok("the last run of each key succeeded, or may be started again")
	if len(all) > 0 {
		var which []string
		for _, r := range all {
			what := "failed"
			if r.State == "running" {
				what = "not ended, its process may have died"
			}
			which = append(which, fmt.Sprintf("%q of %s (%s)", r.Key, r.Slot.UTC().Format(time.RFC3339), what))
		}
		f = Finding{
			Status: StatusWarning, Detail: "the last run of a key will not be started again: " + oneline.Some(which),
			Advice: "mend its cause, then let it be started again in its period: pgxlock runs forget KEY, or forget_run()",
		}
	}
	return f, nil
}
