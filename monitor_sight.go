package pgxlock

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// This file is one look of the monitor at the database: what can be seen there, and what
// the numbers of advisory locks mean.

// A sight is one look.
type sight struct {
	monitor *Monitor
	conn    *pgx.Conn
	filter  Filter
	states  string // of leases; "": all
	schema  string // "": there is no pgxlock that can be used
	version int
	missing []string
	absent  error // why there is none
	unable  error // why what the filter's Kind names could not be seen; kind 0 names all
}

// look calls fn with a connection.
func (m *Monitor) look(ctx context.Context, f Filter, states string, fn func(*sight) error) error {
	if err := f.check(); err != nil {
		return err
	}
	conn, err := m.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	s := &sight{monitor: m, conn: conn.Conn(), filter: f, states: states}
	if err := s.find(ctx); err != nil {
		return err
	}
	return fn(s)
}

// find finds the installation, if there is one.
func (s *sight) find(ctx context.Context) error {
	in := installation{asked: s.monitor.cfg.Schema, config: "MonitorConfig"}
	switch err := in.find(ctx, querier{conn: s.conn}); {
	case err == nil:
		s.schema, s.version = in.schema, in.version
	case errors.Is(err, ErrSchema), hidden(err):
		s.absent = err
		s.miss("leases, and the queues of those who wait", err, Lease)
		return nil
	default:
		return err
	}
	return nil
}

// hidden reports whether the server refuses to show something that others may be shown,
// or that is not there.
func hidden(err error) bool {
	return slices.Contains([]string{stateNoRights, stateUndefinedTable, stateUndefinedFunction, stateInvalidSchema, stateUnsupported}, sqlState(err))
}

// miss records that something cannot be seen, and of which kinds of locks an answer is
// incomplete without it.
func (s *sight) miss(what string, why error, kinds ...Kind) {
	s.missing = append(s.missing, what+": "+strings.TrimPrefix(oneLine(typed(why).Error()), "pgxlock: "))
	for _, kind := range kinds {
		if s.unable == nil && (s.filter.Kind == 0 || s.filter.Kind == kind) {
			s.unable = why
		}
	}
}

// tooOld is why a schema does not show what a later version does.
func (s *sight) tooOld(version int) error {
	return fmt.Errorf("%w: schema %q has version %d, version %d is needed", ErrSchema, s.schema, s.version, version)
}

// unseen is why what the filter names could not be seen.
func (s *sight) unseen() error { return s.unable }

// read runs a statement of the monitor.
func read[T any](ctx context.Context, s *sight, name string, to pgx.RowToFunc[T]) (all []T, err error) {
	err = s.transact(ctx, pgx.ReadOnly, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, statement(name, s.schema), pgx.QueryExecModeExec) // CollectRows returns the error
		all, err = pgx.CollectRows(rows, to)
		return err
	})
	return all, err
}

// transact runs fn in a transaction that is as the statements of the monitor want it,
// whatever the role is set to, and leaves no setting behind: also behind a pooler.
func (s *sight) transact(ctx context.Context, mode pgx.TxAccessMode, fn func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, s.conn, pgx.TxOptions{AccessMode: mode, IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		key := s.filter.Key
		if _, raw := parseRaw(key); raw {
			key = "" // which the server's text cannot hold; it names no lease
		}
		if _, err := tx.Exec(ctx, statement("monitor_settings", ""), pgx.QueryExecModeExec, key, s.filter.Prefix, s.states); err != nil {
			return err
		}
		return fn(tx)
	})
}

// leases are those of the schema that pass the filter.
func (s *sight) leases(ctx context.Context) ([]Holder, error) {
	if s.schema == "" {
		return nil, nil
	}
	name := "monitor_leases"
	if s.version < sharesVersion {
		name = "monitor_leases_exclusive"
	}
	leases, err := read(ctx, s, name, func(row pgx.CollectableRow) (Holder, error) {
		h := Holder{Kind: Lease}
		var shared bool
		var state string
		var since, expires *time.Time
		err := row.Scan(&h.Key, &shared, &h.Owner, &h.Token, &h.Metadata, &state, &since, &expires, &h.Suspect)
		if shared {
			h.Mode = Shared
		}
		h.Since, h.Expires, h.State = orZero(since), orZero(expires), stateNamed(state)
		return h, err
	})
	if err != nil && hidden(err) {
		s.miss("leases", err, Lease)
		return nil, nil
	}
	return slices.DeleteFunc(leases, func(h Holder) bool { return !s.filter.admits(Lease, h.Key) }), err
}

func orZero[T any](value *T) (zero T) {
	if value == nil {
		return zero
	}
	return *value
}

// advisoryView is what there is of advisory locks.
type advisoryView struct {
	holders     []Holder
	waiters     []Waiter
	keys        keyNames
	granted     map[advisoryID][]int32 // to whom
	taken, room int64
}

// advisory looks at the server's lock table, once.
func (s *sight) advisory(ctx context.Context) (*advisoryView, error) {
	type entry struct {
		Taken, Room               int64
		Space                     *int32
		Number                    *int64
		Shared, Granted           bool
		PID                       int32
		Application, Role, Client string
		Since                     *time.Time
		BlockedBy                 []int32
	}
	keys, err := s.keyNames(ctx)
	if err != nil {
		return nil, err
	}
	entries, err := read(ctx, s, "monitor_advisory", pgx.RowToStructByPos[entry])
	if err != nil {
		return nil, err
	}
	view := &advisoryView{keys: keys, granted: make(map[advisoryID][]int32)}
	for _, e := range entries {
		view.taken, view.room = e.Taken, e.Room
		if e.Number == nil {
			continue
		}
		id := advisoryID{*e.Number, *e.Space == 2}
		key, mode := keys.of(id), Exclusive
		if e.Shared {
			mode = Shared
		}
		if e.Granted {
			view.granted[id] = append(view.granted[id], e.PID)
		}
		owner := sessionOwner(e.Application, e.PID)
		switch {
		case !s.filter.admits(Advisory, key):
		case e.Granted:
			view.holders = append(view.holders, Holder{
				Key: key, Kind: Advisory, Mode: mode, Owner: owner, PID: e.PID, State: Live,
				Application: e.Application, Role: e.Role, Client: e.Client, Label: keys.labels[id],
			})
		default:
			view.waiters = append(view.waiters, Waiter{Key: key, Kind: Advisory, Mode: mode, Owner: owner, PID: e.PID, Since: orZero(e.Since), BlockedBy: e.BlockedBy})
		}
	}
	return view, nil
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

// tickets are the places of processes in the queues that pass the filter.
func (s *sight) tickets(ctx context.Context, locks *advisoryView) ([]Waiter, error) {
	switch {
	case s.schema == "":
		if s.unable == nil && !errors.Is(typed(s.absent), ErrSchema) {
			s.unable = s.absent // there are some
		}
		return nil, nil
	case s.version < queueVersion:
		s.miss("the queues of those who wait", s.tooOld(queueVersion), Lease)
		return nil, nil
	}
	type ticket struct {
		Kind           int32
		Name           string
		Number, Client int64
		Owner          string
		Waiters        int32
		Since          time.Time
		Woken          bool
		Holds          []string
	}
	tickets, err := read(ctx, s, "monitor_tickets", pgx.RowToStructByPos[ticket])
	if err != nil && hidden(err) {
		s.miss("the queues of those who wait", err, Lease, Advisory)
		return nil, nil
	}
	var waiters []Waiter
	for _, t := range tickets {
		w := Waiter{Key: t.Name, Kind: Lease, Owner: t.Owner, Ticket: t.Number, Since: t.Since, Behind: int(t.Waiters) - 1, Woken: t.Woken, Holds: t.Holds}
		if t.Kind != 0 {
			id := advisoryID{pair: t.Kind == 2}
			if _, err := fmt.Sscan(t.Name, &id.number); err != nil {
				continue // nobody's
			}
			w.Kind, w.Key, w.BlockedBy = Advisory, locks.keys.of(id), locks.granted[id]
		}
		lives := t.Client == 0 || len(locks.granted[advisoryID{number: waiterKey(t.Client)}]) > 0
		if lives && s.filter.admits(w.Kind, w.Key) {
			waiters = append(waiters, w)
		}
	}
	return waiters, err
}

// waiterKey is what the SQL function pgxlock_waiter_key returns.
func waiterKey(client int64) int64 {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64([]byte("\x00waiter\x00"), uint64(client)))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// server says what presses on locks, and what the server's clock shows.
func (s *sight) server(ctx context.Context, load *ServerLoad) (at time.Time, err error) {
	seesAll := false
	_, err = read(ctx, s, "monitor_server", func(row pgx.CollectableRow) (struct{}, error) {
		var pid *int32
		var since *time.Time
		err := row.Scan(&at, &load.Notifications, &pid, &since, &seesAll)
		load.OldestPID, load.OldestSince = orZero(pid), orZero(since)
		return struct{}{}, err
	})
	if err == nil && !seesAll {
		s.miss("addresses and transactions of other roles' sessions", fmt.Errorf("role %q may not see them; GRANT pg_monitor TO it", s.conn.Config().User))
	}
	return at, err
}

// keyNames is what the numbers of advisory locks mean.
type keyNames struct {
	names  map[advisoryID]string
	labels map[advisoryID]string // of locks that other programs are known to take
}

func (k keyNames) of(id advisoryID) string {
	if name, known := k.names[id]; known {
		return name
	}
	return rawKey(id)
}

// rawKey is the key that names a lock by its number.
func rawKey(id advisoryID) string {
	if id.pair {
		return RawKey2(int32(id.number>>32), int32(id.number))
	}
	return RawKey(id.number)
}

// keyNames collects the names that were given, and those that were published.
func (s *sight) keyNames(ctx context.Context) (keyNames, error) {
	k := keyNames{make(map[advisoryID]string), make(map[advisoryID]string)}
	switch {
	case s.schema == "":
	case s.version < monitorVersion:
		s.miss("names behind the numbers of advisory locks", s.tooOld(monitorVersion))
	default:
		type published struct {
			Number int64
			Name   string
		}
		names, err := read(ctx, s, "monitor_names", pgx.RowToStructByPos[published])
		if err != nil && hidden(err) {
			s.miss("names behind the numbers of advisory locks", err)
		} else if err != nil {
			return k, err
		}
		for _, p := range names {
			if id := identify(p.Name); id.number == p.Number { // else somebody wrote what is not so
				k.names[id] = p.Name
			}
		}
	}
	for _, name := range append([]string{s.filter.Key}, s.monitor.cfg.Names...) {
		if name != "" {
			k.names[identify(name)] = name
		}
	}

	type migrator struct{ Database, Schema, Table string }
	migrators, err := read(ctx, s, "monitor_migrators", pgx.RowToStructByPos[migrator])
	for _, m := range migrators {
		for _, database := range []string{m.Database, "/" + m.Database} { // the library, and the command
			k.labels[advisoryID{number: migrateKey(database, m.Schema, m.Table)}] = fmt.Sprintf("golang-migrate, with table %s", pgx.Identifier{m.Schema, m.Table}.Sanitize())
		}
	}
	return k, err
}

// migrateKey is what golang-migrate's drivers for PostgreSQL lock while they migrate: see
// GenerateAdvisoryLockId of its package database.
func migrateKey(database, schema, table string) int64 {
	const salt = 1486364155
	return int64(crc32.ChecksumIEEE([]byte(schema+"\x00"+table+"\x00"+database)) * salt)
}
