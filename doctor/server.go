package doctor

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// setting is one of the server's, as this role's sessions begin with it.
type setting struct{ Name, Value, Source string }

// readSettings reads them before anything is set.
func (d *doctor) readSettings(ctx context.Context) (map[string]setting, error) {
	names := []string{
		"default_transaction_read_only", "fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names",
		"max_locks_per_transaction", "max_connections", "max_prepared_transactions", "autovacuum_freeze_max_age", "server_version",
	}
	for _, t := range timeouts {
		names = append(names, t.name)
	}
	rows, _ := d.conn.Query(ctx, statements.DoctorSettings.Text(), d.q.Args([]any{names})...) // CollectRows returns the error
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[setting])
	settings := make(map[string]setting, len(found))
	for _, s := range found {
		settings[s.Name] = s
	}
	return settings, err
}

// sources are the words of pg_settings for where a setting was made, in those of who
// made it.
var sources = map[string]string{
	"configuration file": "the server's configuration",
	"command line":       "the server's command line",
	"global":             "ALTER ROLE ALL",
	"database":           "ALTER DATABASE",
	"user":               "ALTER ROLE",
	"database user":      "ALTER ROLE IN DATABASE",
	"client":             "the connection string or the pool's RuntimeParams",
	"session":            "a SET in the session, as in the pool's AfterConnect",
}

func (s setting) source() string {
	if words, known := sources[s.Source]; known {
		return words
	}
	return s.Source
}

func (s setting) String() string { return fmt.Sprintf("%s = %s (%s)", s.Name, s.Value, s.source()) }

// number returns the value of one that is a number, 0 if the server does not have it.
func (d *doctor) number(name string) int64 {
	n, _ := strconv.ParseInt(d.settings[name].Value, 10, 64)
	return n
}

// primary comes to a server that is one, or there would be no connection.
func (d *doctor) primary(context.Context) (Finding, error) {
	f := ok("the primary, PostgreSQL %s", d.settings["server_version"].Value)
	if s := d.settings["default_transaction_read_only"]; s.Value == "on" {
		f.add(StatusWarning, s.String()+": Lockers work, but Fence, ClaimTx, and SQL callers of acquire_lock, fail with 25006",
			"begin transactions READ WRITE, or take the setting back")
	}
	return f, nil
}

// nodes looks for other servers that grant the same locks. It goes by catalogs: the settings of Citus
// exist in databases that do without it, too.
func (d *doctor) nodes(ctx context.Context) (Finding, error) {
	type others struct {
		Citus                     bool
		Extensions, Subscriptions []string
	}
	o, err := one[others](ctx, d, statements.DoctorNodes, d.schema)
	if err != nil {
		return Finding{}, err
	}
	f := ok("no other server is known that grants the same locks")
	if o.Citus {
		type workers struct{ N int64 }
		w, err := one[workers](ctx, d, statements.DoctorCitus)
		if err != nil {
			return Finding{}, err
		}
		f = ok("the coordinator of Citus")
		if w.N > 0 {
			f.add(StatusWarning, counted(w.N, "worker")+" with metadata: LockTx in Go is refused there, but pg_advisory_lock and lock_tx grant on each node",
				"lock on the coordinator only, or delegate lock_tx: see "+lockerr.ManualEngines)
		}
	}
	const each = "let all callers of a key lock on one server, and do not replicate pgxlock's tables: see " + lockerr.ManualEngines
	if len(o.Extensions) > 0 {
		f.add(StatusWarning, "extension "+strings.Join(o.Extensions, ", ")+": several servers take writes, and each grants every lock", each)
	}
	if len(o.Subscriptions) > 0 {
		f.add(StatusWarning, "subscription "+strings.Join(o.Subscriptions, ", ")+" writes pgxlock's tables: leases of another server appear here, and each server grants every lock", each)
	}
	return f, nil
}

// muchSkew is by how much the clocks may differ. The locks do not depend on it, but
// who compares times of the server with those of logs does.
const muchSkew = time.Second

// clock compares the server's clock with ours, as closely as the round trip allows.
func (d *doctor) clock(ctx context.Context) (Finding, error) {
	best, ahead := time.Duration(-1), time.Duration(0)
	for range 3 {
		var server int64
		asked := time.Now()
		if err := d.q.Row(ctx, statements.DoctorClock.Text()).Scan(&server); err != nil {
			return Finding{}, err
		}
		if trip := time.Since(asked); best < 0 || trip < best {
			best, ahead = trip, time.UnixMicro(server).Sub(asked.Add(trip/2))
		}
	}
	side := "ahead of"
	if ahead < 0 {
		side = "behind"
	}
	f := ok("the server's is %s %s ours, give or take %s", ahead.Abs().Round(time.Microsecond), side, (best / 2).Round(time.Microsecond))
	if ahead.Abs() > muchSkew+best/2 {
		f.add(StatusWarning, "they differ: no lock depends on it, but times that are compared with the server's do, such as ticks given to once.Runner.DoAt",
			"let both follow one time source (NTP)")
	}
	return f, nil
}

// timeouts are those that can end what holds a lock, and how short is too short: what
// ends sessions and transactions, shorter than a third of the default TTL, what ends
// statements, shorter than a second.
var timeouts = []struct {
	name  string
	least time.Duration
	ends  string
}{
	{"statement_timeout", time.Second, "statements that wait in LockTx, ClaimTx or lock_tx"},
	{"lock_timeout", time.Second, "waits of lock_tx and claim_once, and of your statements for rows"},
	{"idle_in_transaction_session_timeout", 10 * time.Second, "sessions whose transaction has locked or fenced, while your code works"},
	{"idle_session_timeout", 10 * time.Second, "sessions of SQL callers that hold advisory locks"},
	{"transaction_timeout", 10 * time.Second, "transactions that have locked or fenced"},
	{"tcp_user_timeout", 10 * time.Second, "sessions at a short break of the network"},
}

// timeouts lists those that are set. Lockers set their own connections' own: it is
// the callers' transactions and sessions that they end.
func (d *doctor) timeouts(context.Context) (Finding, error) {
	var set, ends, short []string
	for _, t := range timeouts {
		limit := time.Duration(d.number(t.name)) * time.Millisecond
		if limit <= 0 {
			continue
		}
		s := d.settings[t.name]
		s.Value = limit.String()
		set = append(set, s.String())
		if limit < t.least {
			ends, short = append(ends, t.name+" ends "+t.ends), append(short, t.name)
		}
	}
	if len(set) == 0 {
		return ok("none is set"), nil
	}
	f := ok("%s", strings.Join(set, ", "))
	if len(short) > 0 {
		f.add(StatusWarning, strings.Join(ends, "; "), fmt.Sprintf("Lockers' own connections set theirs; for your transactions, and for sessions that hold locks, raise %s where it is set (0: none)", strings.Join(short, ", ")))
	}
	return f, nil
}

// durability tells what of an acknowledged lock survives a crash, and a failover.
func (d *doctor) durability(ctx context.Context) (Finding, error) {
	var f Finding
	names, commit := d.settings["synchronous_standby_names"], d.settings["synchronous_commit"]
	if names.Value == "" {
		f = ok("leases survive a crash of the server")
	} else {
		f = ok("leases survive a crash of the server, and a failover to a synchronous standby: %s", names)
	}
	if s := d.settings["fsync"]; s.Value == "off" {
		f.Detail = ""
		f.add(StatusError, s.String()+": a crash of the machine can lose leases, give tokens out twice, and destroy the database", "set fsync = on")
	}
	if s := d.settings["full_page_writes"]; s.Value == "off" {
		f.add(StatusWarning, s.String()+": a crash of the machine can leave pages half written, unless the file system prevents it", "set full_page_writes = on")
	}
	if commit.Value == "off" || commit.Value == "local" && names.Value != "" {
		f.add(StatusWarning, commit.String()+": acquires raise it, but your own transactions, with the claims and runs in them, can be lost after their commit",
			"set synchronous_commit = on where that matters")
	}

	type standbys struct{ All, Synchronous int64 }
	s, err := one[standbys](ctx, d, statements.DoctorStandbys)
	if err != nil {
		return Finding{}, err
	}
	switch {
	case names.Value == "" && s.All > 0:
		f.add(StatusWarning, counted(s.All, "standby")+", none synchronous: a promoted one may lack the last leases",
			"fence what is written, or compare tokens; or set synchronous_standby_names")
	case names.Value != "" && s.All == 0, names.Value != "" && s.Synchronous == 0 && d.role.SeesAll:
		f.add(StatusError, "no synchronous standby is connected: commits wait for one, acquires among them", "bring one back, or empty synchronous_standby_names")
	case names.Value != "" && s.Synchronous == 0:
		f.add(StatusSkipped, fmt.Sprintf("role %q may not see whether a synchronous standby is connected", d.role.Name), needsStats)
	}
	return f, nil
}

// connectionsOfLocker is how many a Locker has at most.
const connectionsOfLocker = 3

// connections compares what a Locker may connect with what it uses.
func (d *doctor) connections(ctx context.Context) (Finding, error) {
	type limit struct {
		Who         string
		Most, Taken int64
	}
	l, err := one[limit](ctx, d, statements.DoctorConnections)
	if err != nil {
		return Finding{}, err
	}
	free := max(l.Most-l.Taken+1, 0) // without that of the doctor
	f := ok("%s allows %s, of which %d are free", l.Who, counted(l.Most, "connection"), free)
	if free < connectionsOfLocker {
		f.add(StatusWarning, fmt.Sprintf("a Locker has up to %d: with fewer it renews leases beside its requests, and its waiters poll", connectionsOfLocker),
			"raise the limit, close idle connections, or have fewer Lockers")
	}
	return f, nil
}

// lockTable compares what is locked on the server with what it has room for.
func (d *doctor) lockTable(ctx context.Context) (Finding, error) {
	type taken struct{ N int64 }
	t, err := one[taken](ctx, d, statements.DoctorLockTable)
	if err != nil {
		return Finding{}, err
	}
	room := d.number("max_locks_per_transaction") * (d.number("max_connections") + d.number("max_prepared_transactions"))
	f := ok("%d of about %d places are taken", t.N, room)
	const advice = "lock fewer keys at a time (AdvisoryConfig.MaxLocks), or raise max_locks_per_transaction, which takes a restart"
	switch {
	case t.N*10 >= room*9:
		f.add(StatusError, "when it is full no session of the server can lock anything, tables included", advice)
	case t.N*2 >= room:
		f.add(StatusWarning, "it is more than half full", advice)
	}
	return f, nil
}

// prepared looks for transactions that hold locks without any session.
func (d *doctor) prepared(ctx context.Context) (Finding, error) {
	type transaction struct {
		ID             string
		Seconds, Locks int64
	}
	found, err := all[transaction](ctx, d, statements.DoctorPrepared, d.schema)
	if err != nil {
		return Finding{}, err
	}
	f := ok("no prepared transaction holds locks")
	if len(found) > 0 {
		f.Detail = ""
	}
	for _, t := range found {
		f.add(StatusWarning, fmt.Sprintf("%s was prepared %s ago and holds %s, without a session", quoteLiteral(t.ID), time.Duration(t.Seconds)*time.Second, counted(t.Locks, "lock")),
			fmt.Sprintf("COMMIT PREPARED or ROLLBACK PREPARED %s, if its transaction manager does not", quoteLiteral(t.ID)))
	}
	return f, nil
}

// tableLocks looks for sessions that keep callers out of our tables, or vacuum.
func (d *doctor) tableLocks(ctx context.Context) (Finding, error) {
	type session struct {
		Who, Mode, Tables string
		Granted           bool
		Ends              []int32 // the sessions to end: itself, and those that it waits for
	}
	found, err := all[session](ctx, d, statements.DoctorTableLocks, d.schema)
	if err != nil {
		return Finding{}, err
	}
	f := ok("no session keeps callers out of our tables")
	if len(found) > 0 {
		f.Detail = ""
	}
	for _, s := range found {
		does, ends := "waits for", make([]string, len(s.Ends))
		if s.Granted {
			does = "has"
		}
		for i, pid := range s.Ends {
			ends[i] = fmt.Sprintf("pg_terminate_backend(%d)", pid)
		}
		effect := "calls wait behind it"
		if s.Mode == "ShareUpdateExclusiveLock" {
			effect = "vacuum waits for it, and renewals leave more and more dead rows"
		}
		f.add(StatusWarning, fmt.Sprintf("%s %s %s on %s: %s", s.Who, does, s.Mode, s.Tables, effect),
			"unless it is a migration or maintenance that will end: SELECT "+strings.Join(ends, ", "))
	}
	return f, nil
}

// quoteLiteral returns a text as SQL has it.
func quoteLiteral(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// manyTransactions is how many may begin while one snapshot is open.
const manyTransactions = 10_000_000

// snapshots looks for what keeps vacuum from its work: every renewal then adds a
// version of a row that stays.
func (d *doctor) snapshots(ctx context.Context) (Finding, error) {
	type snapshot struct {
		Who                   string
		Transactions, Seconds int64
	}
	found, err := all[snapshot](ctx, d, statements.DoctorSnapshots, d.cfg.LongTransaction.Seconds(), int64(manyTransactions))
	if err != nil {
		return Finding{}, err
	}
	f := ok("")
	if len(found) == 0 && d.role.SeesAll {
		f = ok("nothing has held back vacuum for %s", d.cfg.LongTransaction)
	}
	for _, s := range found {
		since := ""
		if s.Seconds > 0 {
			since = fmt.Sprintf(" for %s", time.Duration(s.Seconds)*time.Second)
		}
		f.add(StatusWarning, fmt.Sprintf("%s has held back vacuum%s, for %s", s.Who, since, counted(s.Transactions, "transaction")), "")
	}
	if len(found) > 0 {
		f.Advice = "end the transaction (pg_terminate_backend), or drop the slot that nobody reads"
	}
	if !d.role.SeesAll {
		f.add(StatusSkipped, fmt.Sprintf("role %q may not see the sessions of other roles, which may have held back vacuum for %s", d.role.Name, d.cfg.LongTransaction), needsStats)
	}
	return f, nil
}

// failsafeAge is vacuum_failsafe_age's default: the age at which vacuum does nothing
// but keep the server from running out of transactions.
const failsafeAge = 1_600_000_000

func (d *doctor) wraparound(ctx context.Context) (Finding, error) {
	type oldest struct {
		Database string
		Age      int64
	}
	o, err := one[oldest](ctx, d, statements.DoctorWraparound)
	if err != nil {
		return Finding{}, err
	}
	f := ok("the oldest row that is not frozen, in database %q, is %s old", o.Database, counted(o.Age, "transaction"))
	const advice = "VACUUM that database, and see what holds back autovacuum (snapshots)"
	switch {
	case o.Age >= failsafeAge:
		f.add(StatusError, "at 2 billion the server refuses to write, so that nothing is locked any more", advice)
	case o.Age >= 2*d.number("autovacuum_freeze_max_age"):
		f.add(StatusWarning, "autovacuum, which should have frozen it at half that age, does not keep up", advice)
	}
	return f, nil
}
