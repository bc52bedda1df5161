package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/sql"
)

// evictedHolder is the holder id of a lease whose holder was evicted.
const evictedHolder = "*evicted"

// An inspection is what one call of a Monitor reads, on one connection of the pool.
type inspection struct {
	monitor *Monitor
	conn    *pgx.Conn
	filter  Filter
	states  string   // of the leases to read, separated by commas; "": all
	keys    []string // of the leases and their tickets to read; nil: all
	most    int      // how many leases to read
	schema  string   // "": there is no usable installation
	absent  error    // why there is none
	missing []string
	unread  Unread
}

// inspect calls fn with an inspection, unless an argument of the call is wrong.
func (m *Monitor) inspect(ctx context.Context, f Filter, states string, fn func(*inspection) error) error {
	if err := cmp.Or(missing(ctx, m), f.check()); err != nil {
		return err
	}
	conn, err := m.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	in := &inspection{monitor: m, conn: conn.Conn(), filter: f, states: states, most: m.cfg.MostLeases}
	if _, raw := lockkey.ParseRaw(f.Key); raw {
		in.keys = []string{} // it names no lease, and the server's text cannot hold its zero byte
	} else if f.Key != "" {
		in.keys = []string{f.Key}
	}
	if err := in.find(ctx); err != nil {
		return lockerr.Locked(err)
	}
	return lockerr.Locked(fn(in))
}

// find finds the installation, if there is one that this role may use.
func (in *inspection) find(ctx context.Context) error {
	place := dbconn.Installation{Asked: in.monitor.cfg.Schema, Config: "monitor.Config"}
	switch err := place.Find(ctx, dbconn.Querier{Conn: in.conn}); {
	case err == nil:
		in.schema = place.Schema
	case errors.Is(err, lockerr.ErrSchema), errors.Is(err, lockerr.ErrWorker), hidden(err):
		in.absent = err
		in.miss("leases, and the queues of waiters", err, &in.unread.Leases, &in.unread.Queues)
		return nil
	default:
		return err
	}
	return nil
}

// hidden reports whether the server refused a read because this role lacks a right or
// because the table or function does not exist.
func hidden(err error) bool {
	return slices.Contains([]string{lockerr.StateNoRights, lockerr.StateUndefinedTable, lockerr.StateUndefinedFunction, lockerr.StateInvalidSchema, lockerr.StateUnsupported}, lockerr.SQLState(err))
}

// miss records in Missing what cannot be read and why, and the reason also in parts, which are
// fields of Unread: lists of holders or waiters are incomplete without it.
func (in *inspection) miss(what string, why error, parts ...*error) {
	why = lockerr.Typed(why)
	text, remedy := what+": "+strings.TrimPrefix(oneline.Join(why.Error()), "pgxlock: "), "; "+lockerr.Remedy(why)
	if i := slices.IndexFunc(in.missing, func(said string) bool { return strings.HasSuffix(said, remedy) }); i >= 0 { // once is enough
		in.missing[i] = strings.Replace(in.missing[i], ": ", ", "+what+": ", 1)
	} else {
		in.missing = append(in.missing, text)
	}
	for _, part := range parts {
		*part = cmp.Or(*part, why)
	}
}

// ask runs a statement in a transaction of its own, with the isolation, the access mode and
// the settings that the statement needs, whatever the defaults of the role. They end with
// the transaction, so that a pooler passes none of them on. The transaction commits when
// the rows have been read without an error.
func (in *inspection) ask(ctx context.Context, access, name statements.Name, args ...any) pgx.Rows {
	return dbconn.Querier{Conn: in.conn}.Together(ctx, []int16{pgx.BinaryFormatCode}, dbconn.InTransaction(access,
		dbconn.Step{SQL: statements.MonitorSettings.Text(), Args: []any{in.filter.Prefix, in.states, in.keys, in.most}},
		dbconn.Step{SQL: name.In(in.schema), Args: args})...)
}

// read runs a statement that only reads, scans each row into to, and then calls each.
func (in *inspection) read(ctx context.Context, name statements.Name, to []any, each func(), args ...any) error {
	_, err := pgx.ForEachRow(in.ask(ctx, statements.ConnReadOnly, name, args...), to, func() error {
		each()
		return nil
	})
	return err
}

// role returns the role that lacks a right: SET ROLE, or the connection, may have named another one
// than logged in.
func (in *inspection) role(ctx context.Context) string {
	role, err := pgx.CollectExactlyOneRow(in.ask(ctx, statements.ConnReadOnly, statements.MonitorRole), pgx.RowTo[string])
	if err != nil {
		return in.conn.Config().User
	}
	return role
}

// tooMany says why rows are left out: the statements in sql/monitor read so many at most.
func tooMany(most int) error {
	return fmt.Errorf("%w than %d, or than 32 MiB, and the others are left out; ask for one key or a prefix", ErrTooMany, most)
}

// leases returns the leases, permits and shares that pass the filter.
func (in *inspection) leases(ctx context.Context) ([]*pgxlock.Holder, error) {
	if in.schema == "" {
		return nil, nil
	}
	var leases []*pgxlock.Holder
	h := pgxlock.Holder{Kind: pgxlock.KindLease}
	var shared bool
	var state knownState
	var since, expires pgtype.Timestamptz // the zero time for NULL
	var leftOut bool
	err := in.read(ctx, statements.MonitorLeases, []any{&h.Key, &shared, &h.ID, &h.Token, &h.Metadata, &state, &since, &expires, &h.Suspect, &leftOut}, func() {
		if leftOut && in.unread.Leases == nil {
			in.miss("leases", tooMany(in.most), &in.unread.Leases)
		}
		if leftOut || !in.filter.admits(pgxlock.KindLease, h.Key) {
			return
		}
		lease := h
		lease.Mode, lease.Since, lease.Expires, lease.State = modeOf(shared), since.Time, expires.Time, pgxlock.LeaseState(state)
		leases = append(leases, &lease)
	})
	if err != nil && hidden(err) {
		in.miss("leases", err, &in.unread.Leases)
		return nil, nil
	}
	return leases, err
}

// mostPermits is of how many permits of a semaphore the leases are read because a caller waits for one.
const mostPermits = 100

// waitedFor returns the leases that callers wait for, of those that were left out.
func (in *inspection) waitedFor(ctx context.Context, leases []*pgxlock.Holder, waiters []Waiter) ([]*pgxlock.Holder, error) {
	if !errors.Is(in.unread.Leases, ErrTooMany) {
		return nil, nil
	}
	known := make(map[string]bool, len(leases))
	for _, lease := range leases {
		known[lease.Key] = true
	}
	in.keys = []string{}
	add := func(key string) {
		if !known[key] && len(in.keys) < in.most {
			known[key], in.keys = true, append(in.keys, key)
		}
	}
	for _, w := range waiters {
		if w.Kind != pgxlock.KindLease {
			continue
		}
		if add(w.Key); strings.HasSuffix(w.Key, "#") {
			for n := range mostPermits {
				add(w.Key + strconv.Itoa(n+1))
			}
		}
	}
	return in.leases(ctx)
}

func modeOf(shared bool) pgxlock.Mode {
	if shared {
		return pgxlock.Shared
	}
	return pgxlock.Exclusive
}

// A knownState is the state of a lease, scanned without a copy for each row.
type knownState pgxlock.LeaseState

func (k *knownState) ScanBytes(name []byte) error {
	switch string(name) {
	case string(pgxlock.StateLive):
		*k = knownState(pgxlock.StateLive)
	case string(pgxlock.StateAbandoned):
		*k = knownState(pgxlock.StateAbandoned)
	default:
		*k = knownState(pgxlock.StateExpired)
	}
	return nil
}

// A lockTable is what the server's lock table says about advisory locks.
type lockTable struct {
	holders []*pgxlock.Holder
	waiters []Waiter
	keys    keyNames
	granted map[lockkey.ID][]int32 // the processes that hold each lock
	standby bool                   // it is that of a standby, which knows nothing of the primary's
	unseen  bool                   // this role may not see the address of a holder

	taken, room int64 // how many entries of any kind it has, and at least can have
}

// advisory reads the server's lock table, once.
func (in *inspection) advisory(ctx context.Context) (*lockTable, error) {
	keys, err := in.keyNames(ctx)
	if err != nil {
		return nil, err
	}
	table := &lockTable{keys: keys, granted: make(map[lockkey.ID][]int32)}
	var space pgtype.Int4
	var number pgtype.Int8
	var shared, granted, unseen bool
	var pid int32
	var application, role, client string
	var since pgtype.Timestamptz
	var blockedBy []int32
	err = in.read(ctx, statements.MonitorAdvisory, []any{&table.taken, &table.room, &table.standby, &space, &number, &shared, &granted, &pid, &application, &role, &client, &unseen, &since, &blockedBy}, func() {
		if !number.Valid {
			return // the only row, without a lock
		}
		id := lockkey.ID{Number: number.Int64, Pair: space.Int32 == 2}
		key := keys.of(id)
		if granted {
			table.granted[id] = append(table.granted[id], pid)
		}
		owner, label, internal := sessionOwner(application, pid), keys.labels[id], keys.internal(id)
		if internal && granted {
			label = id.OwnLabel(shared)
		} else if internal {
			label = id.OwnLabel(false) // as the label of its holder
		}
		shown, raw := lockkey.Split(key)
		switch {
		case in.hides(internal, key), !in.filter.admits(pgxlock.KindAdvisory, key):
		case granted:
			table.unseen = table.unseen || unseen
			table.holders = append(table.holders, &pgxlock.Holder{
				Key: shown, Raw: raw, Kind: pgxlock.KindAdvisory, Mode: modeOf(shared), ID: owner, PID: pid, State: pgxlock.StateLive,
				Application: application, Role: role, Client: client, Label: label, Internal: internal,
			})
		default:
			table.waiters = append(table.waiters, Waiter{
				Key: shown, Raw: raw, Kind: pgxlock.KindAdvisory, Mode: modeOf(shared), Owner: owner, PID: pid, Since: since.Time, BlockedBy: blockedBy,
				Label: label, Internal: internal,
			})
		}
	})
	if err == nil && table.standby {
		in.miss("advisory locks of the primary", lockerr.ErrReadOnly, &in.unread.Advisory)
	}
	return table, err
}

// hides reports whether a key is not shown because it is pgxlock's own. A key that the
// caller asked for by its number is shown: an empty answer would say that it is free.
func (in *inspection) hides(internal bool, key string) bool {
	return internal && !in.filter.Internal && !in.monitor.cfg.Internal && key != in.filter.Key
}

// evictions adds to holders by whom and why they were evicted or are being evicted.
func (in *inspection) evictions(ctx context.Context, holders []*pgxlock.Holder) error {
	type hold struct {
		kind         int32
		name, holder string // holder: of a share or an advisory lock
		token        int64  // of a lease
	}
	found := make(map[hold][]*pgxlock.Holder) // a session may hold an advisory lock in both modes
	for _, h := range holders {
		var at hold
		switch {
		case h.Kind == pgxlock.KindAdvisory:
			name := lockkey.Name{ID: lockkey.Identify(h.LockKey())}
			at.kind, at.name, at.holder = int32(name.Kind()), name.Text(), name.ID.HeldBy(h.PID)
		case h.ID == evictedHolder:
			at.name, at.token = h.Key, h.Token
		case h.Mode == pgxlock.Shared && h.Token == 0:
			at.name, at.holder = h.Key, h.ID
		default:
			continue
		}
		found[at] = append(found[at], h)
	}
	if in.schema == "" || len(found) == 0 {
		return nil
	}
	var at hold
	var by, why string
	err := in.read(ctx, statements.MonitorEvictions, []any{&at.kind, &at.name, &at.holder, &at.token, &by, &why}, func() {
		for _, of := range []hold{{at.kind, at.name, at.holder, 0}, {at.kind, at.name, "", at.token}} {
			for _, h := range found[of] {
				h.EvictedBy, h.EvictionReason = by, why
				if h.ID == evictedHolder {
					h.ID = at.holder
				}
			}
		}
	})
	if err != nil && hidden(err) {
		in.miss("why holders were evicted", err)
		return nil
	}
	return err
}

// sessionOwner names a session as Lock.Holder names it.
func sessionOwner(application string, pid int32) string {
	switch name := strings.TrimPrefix(application, "pgxlock "); {
	case pid == 0:
		return "prepared transaction"
	case name == "":
		return fmt.Sprint(pid)
	default:
		return fmt.Sprintf("%s:%d", name, pid)
	}
}

// tickets returns the processes in the queues that pass the filter.
func (in *inspection) tickets(ctx context.Context, locks *lockTable) ([]Waiter, error) {
	if in.schema == "" {
		return nil, nil
	}
	var waiters []Waiter
	var kind, behind int32
	var client int64
	var since pgtype.Timestamptz
	var w Waiter
	var leftOut bool
	err := in.read(ctx, statements.MonitorTickets, []any{&kind, &w.Key, &w.Ticket, &client, &w.Owner, &behind, &since, &w.Woken, &w.Holds, &leftOut}, func() {
		if leftOut {
			in.miss("the queues of waiters", tooMany(mostRows), &in.unread.Queues)
			return
		}
		w, key := w, w.Key
		w.Kind, w.Behind, w.Since = pgxlock.KindLease, int(behind)-1, since.Time
		if kind != 0 {
			id := lockkey.ID{Pair: kind == 2}
			if _, err := fmt.Sscan(w.Key, &id.Number); err != nil {
				return // not written by pgxlock
			}
			key = locks.keys.of(id)
			w.Key, w.Raw = lockkey.Split(key)
			w.Kind, w.BlockedBy, w.Label = pgxlock.KindAdvisory, locks.granted[id], locks.keys.labels[id]
			if w.Internal = locks.keys.internal(id); w.Internal {
				w.Label = id.OwnLabel(false)
			}
		}
		lives := client == 0 || len(locks.granted[lockkey.ID{Number: lockkey.WaiterKey(client)}]) > 0
		if lives && !in.hides(w.Internal, key) && in.filter.admits(w.Kind, key) {
			waiters = append(waiters, w)
		}
	})
	if err != nil && hidden(err) {
		if locks.standby { // their table is unlogged
			err = fmt.Errorf("%w (%w)", lockerr.ErrReadOnly, err)
		}
		in.miss("the queues of waiters", err, &in.unread.Queues)
		return nil, nil
	}
	return waiters, err
}

// server adds to load what is not in the lock table, and returns the server's time. what is that of other roles' sessions
// which the snapshot lacks if this role may not see them.
func (in *inspection) server(ctx context.Context, load *Load, what string) (at time.Time, err error) {
	var seesAll bool
	var role string
	var pid pgtype.Int4
	var since pgtype.Timestamptz
	err = in.read(ctx, statements.MonitorServer, []any{&at, &load.Notifications, &pid, &since, &seesAll, &role}, func() {
		load.OldestPID, load.OldestSince = pid.Int32, since.Time
	})
	if err == nil && !seesAll {
		in.miss(what+" of other roles' sessions", fmt.Errorf("role %q may not see them; GRANT pg_monitor TO %s", role, pgx.Identifier{role}.Sanitize()))
	}
	return at, err
}

// keyNames says what the numbers of advisory locks mean.
type keyNames struct {
	names  map[lockkey.ID]string
	labels map[lockkey.ID]string // of locks of other programs that are known
}

// of returns the name of a lock, or the key that stands for its number.
func (k keyNames) of(id lockkey.ID) string {
	if name, known := k.names[id]; known {
		return name
	}
	return id.Key()
}

// internal reports whether a lock is one of pgxlock's own. A lock that has a name is a
// user's, though its number may carry the mark by chance.
func (k keyNames) internal(id lockkey.ID) bool {
	_, named := k.names[id]
	return id.IsOwn() && !named
}

// keyNames collects the configured names and those that Lockers published.
func (in *inspection) keyNames(ctx context.Context) (keyNames, error) {
	k := keyNames{make(map[lockkey.ID]string), make(map[lockkey.ID]string)}
	if in.schema != "" {
		var number int64
		var name string
		var leftOut bool
		err := in.read(ctx, statements.MonitorNames, []any{&number, &name, &leftOut}, func() {
			if leftOut {
				in.miss("names behind the numbers of advisory locks", errors.New("there are more than 20,000, and the older ones are left out"))
				return
			}
			for _, key := range []string{name, lockkey.Join(name, true)} { // the second is that of a namespace
				if id := lockkey.Identify(key); id.Number == number && !lockkey.IsNumber(key) { // anything else is wrong, no matter who wrote it
					k.names[id] = key
				}
			}
		})
		if err != nil && hidden(err) {
			in.miss("names behind the numbers of advisory locks", err)
		} else if err != nil {
			return k, err
		}
	}
	if in.filter.Key != "" && !lockkey.IsNumber(in.filter.Key) {
		k.names[lockkey.Identify(in.filter.Key)] = in.filter.Key
	}
	for _, name := range in.monitor.cfg.Names {
		k.names[lockkey.Identify(name)] = name
	}

	var database, schema, table string
	err := in.read(ctx, statements.MonitorMigrators, []any{&database, &schema, &table}, func() {
		for _, database := range []string{database, "/" + database} { // as the library names it, and as the command does
			k.labels[lockkey.ID{Number: lockkey.OfMigrators(database, schema, table)}] = fmt.Sprintf("golang-migrate, with table %s", pgx.Identifier{schema, table}.Sanitize())
		}
	})
	return k, err
}
