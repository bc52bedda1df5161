package monitor

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/oneline"
	"github.com/pgxlock/pgxlock/sql"
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
	missing []string
	absent  error // why there is none
	unable  error // why what the filter's Kind names could not be seen; kind 0 names all
}

// look calls fn with a connection.
func (m *Monitor) look(ctx context.Context, f Filter, states string, fn func(*sight) error) error {
	conn, err := m.Pool.Acquire(ctx)
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
	in := dbconn.Installation{Asked: s.monitor.Config.Schema, Config: "MonitorConfig"}
	switch err := in.Find(ctx, dbconn.Querier{Conn: s.conn}); {
	case err == nil:
		s.schema = in.Schema
	case errors.Is(err, lockerr.ErrSchema), hidden(err):
		s.absent = err
		s.miss("leases, and the queues of those who wait", err, KindLease)
		return nil
	default:
		return err
	}
	return nil
}

// hidden reports whether the server refuses to show something that others may be shown,
// or that is not there.
func hidden(err error) bool {
	return slices.Contains([]string{lockerr.StateNoRights, lockerr.StateUndefinedTable, lockerr.StateUndefinedFunction, lockerr.StateInvalidSchema, lockerr.StateUnsupported}, lockerr.SQLState(err))
}

// miss records that something cannot be seen, and of which kinds of locks an answer is
// incomplete without it.
func (s *sight) miss(what string, why error, kinds ...Kind) {
	s.missing = append(s.missing, what+": "+strings.TrimPrefix(oneline.Join(lockerr.Typed(why).Error()), "pgxlock: "))
	for _, kind := range kinds {
		if s.unable == nil && (s.filter.Kind == 0 || s.filter.Kind == kind) {
			s.unable = why
		}
	}
}

// unseen is why what the filter names could not be seen.
func (s *sight) unseen() error { return s.unable }

// ask runs a statement in a transaction that is as those of the monitor want it, whatever
// the role is set to, and leaves no setting behind: also behind a pooler. It is committed
// when the rows have been read without an error.
func (s *sight) ask(ctx context.Context, access, name statements.Name, args ...any) pgx.Rows {
	key := s.filter.Key
	if _, raw := lockkey.ParseRaw(key); raw {
		key = "" // which the server's text cannot hold; it names no lease
	}
	return dbconn.Querier{Conn: s.conn}.Together(ctx, []int16{pgx.BinaryFormatCode},
		dbconn.Step{SQL: statements.MonitorIsolation.Text()}, dbconn.Step{SQL: access.Text()},
		dbconn.Step{SQL: statements.MonitorSettings.Text(), Args: []any{key, s.filter.Prefix, s.states}},
		dbconn.Step{SQL: name.In(s.schema), Args: args})
}

// read runs a statement that only reads, and calls each with every row of it, which
// has been put where to points.
func (s *sight) read(ctx context.Context, name statements.Name, to []any, each func()) error {
	_, err := pgx.ForEachRow(s.ask(ctx, statements.MonitorReadOnly, name), to, func() error {
		each()
		return nil
	})
	return err
}

// leases are those of the schema that pass the filter.
func (s *sight) leases(ctx context.Context) ([]*Holder, error) {
	if s.schema == "" {
		return nil, nil
	}
	var leases []*Holder
	h := Holder{Kind: KindLease}
	var state knownState
	var since, expires pgtype.Timestamptz // of the zero time if there is none
	err := s.read(ctx, statements.MonitorLeases, []any{&h.Key, &h.Shared, &h.ID, &h.Token, &h.Metadata, &state, &since, &expires, &h.Suspect}, func() {
		if !s.filter.admits(KindLease, h.Key) {
			return
		}
		lease := h
		lease.Since, lease.Expires, lease.State = since.Time, expires.Time, string(state)
		leases = append(leases, &lease)
	})
	if err != nil && hidden(err) {
		s.miss("leases", err, KindLease)
		return nil, nil
	}
	return leases, err
}

// A knownState is read without a copy of its name.
type knownState string

func (k *knownState) ScanBytes(name []byte) error {
	switch string(name) {
	case stateLive:
		*k = stateLive
	case stateAbandoned:
		*k = stateAbandoned
	default:
		*k = stateExpired
	}
	return nil
}

// advisoryView is what there is of advisory locks.
type advisoryView struct {
	holders     []*Holder
	waiters     []Waiter
	keys        keyNames
	granted     map[lockkey.ID][]int32 // to whom
	taken, room int64
}

// advisory looks at the server's lock table, once.
func (s *sight) advisory(ctx context.Context) (*advisoryView, error) {
	keys, err := s.keyNames(ctx)
	if err != nil {
		return nil, err
	}
	view := &advisoryView{keys: keys, granted: make(map[lockkey.ID][]int32)}
	var space pgtype.Int4
	var number pgtype.Int8
	var shared, granted bool
	var pid int32
	var application, role, client string
	var since pgtype.Timestamptz
	var blockedBy []int32
	err = s.read(ctx, statements.MonitorAdvisory, []any{&view.taken, &view.room, &space, &number, &shared, &granted, &pid, &application, &role, &client, &since, &blockedBy}, func() {
		if !number.Valid {
			return // there is none
		}
		id := lockkey.ID{Number: number.Int64, Pair: space.Int32 == 2}
		key := keys.of(id)
		if granted {
			view.granted[id] = append(view.granted[id], pid)
		}
		owner, label, internal := sessionOwner(application, pid), keys.labels[id], keys.internal(id)
		if internal && granted {
			label = id.OwnLabel(shared)
		} else if internal {
			label = id.OwnLabel(false) // as those name it who have it
		}
		switch {
		case s.hides(internal, key), !s.filter.admits(KindAdvisory, key):
		case granted:
			view.holders = append(view.holders, &Holder{
				Key: key, Kind: KindAdvisory, Shared: shared, ID: owner, PID: pid, State: stateLive,
				Application: application, Role: role, Client: client, Label: label, Internal: internal,
			})
		default:
			view.waiters = append(view.waiters, Waiter{
				Key: key, Kind: KindAdvisory, Shared: shared, Owner: owner, PID: pid, Since: since.Time, BlockedBy: blockedBy,
				Label: label, Internal: internal,
			})
		}
	})
	return view, err
}

// hides reports whether a key is not shown because it is pgxlock's own. One that was asked
// for by its number is shown: an empty answer means that nobody holds it.
func (s *sight) hides(internal bool, key string) bool {
	return internal && !s.filter.Internal && !s.monitor.Config.Internal && key != s.filter.Key
}

// evictions adds to holders by whom and why they were evicted, or are being evicted.
func (s *sight) evictions(ctx context.Context, holders []*Holder) error {
	type hold struct {
		kind         int32
		name, holder string // holder: of a share, and of an advisory lock
		token        int64  // of a lease
	}
	found := make(map[hold][]*Holder) // a session may have an advisory lock in both modes
	for _, h := range holders {
		var at hold
		switch {
		case h.Kind == KindAdvisory:
			name := lockkey.Name{ID: lockkey.Identify(h.Key)}
			at.kind, at.name, at.holder = int32(name.Kind()), name.Text(), name.ID.HeldBy(h.PID)
		case h.ID == evictedHolder:
			at.name, at.token = h.Key, h.Token
		case h.Shared && h.Token == 0:
			at.name, at.holder = h.Key, h.ID
		default:
			continue
		}
		found[at] = append(found[at], h)
	}
	if s.schema == "" || len(found) == 0 {
		return nil
	}
	var at hold
	var by, why string
	err := s.read(ctx, statements.MonitorEvictions, []any{&at.kind, &at.name, &at.holder, &at.token, &by, &why}, func() {
		for _, at := range []hold{{at.kind, at.name, at.holder, 0}, {at.kind, at.name, "", at.token}} {
			for _, h := range found[at] {
				h.EvictedBy, h.EvictionReason = by, why
			}
		}
	})
	if err != nil && hidden(err) {
		s.miss("why holders were evicted", err)
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

// tickets are the places of processes in the queues that pass the filter.
func (s *sight) tickets(ctx context.Context, locks *advisoryView) ([]Waiter, error) {
	if s.schema == "" {
		if s.unable == nil && !errors.Is(lockerr.Typed(s.absent), lockerr.ErrSchema) {
			s.unable = s.absent // there are some
		}
		return nil, nil
	}
	var waiters []Waiter
	var kind, behind int32
	var client int64
	var since pgtype.Timestamptz
	var w Waiter
	err := s.read(ctx, statements.MonitorTickets, []any{&kind, &w.Key, &w.Ticket, &client, &w.Owner, &behind, &since, &w.Woken, &w.Holds}, func() {
		w := w
		w.Kind, w.Behind, w.Since = KindLease, int(behind)-1, since.Time
		if kind != 0 {
			id := lockkey.ID{Pair: kind == 2}
			if _, err := fmt.Sscan(w.Key, &id.Number); err != nil {
				return // nobody's
			}
			w.Kind, w.Key, w.BlockedBy, w.Label = KindAdvisory, locks.keys.of(id), locks.granted[id], locks.keys.labels[id]
			if w.Internal = locks.keys.internal(id); w.Internal {
				w.Label = id.OwnLabel(false)
			}
		}
		lives := client == 0 || len(locks.granted[lockkey.ID{Number: lockkey.WaiterKey(client)}]) > 0
		if lives && !s.hides(w.Internal, w.Key) && s.filter.admits(w.Kind, w.Key) {
			waiters = append(waiters, w)
		}
	})
	if err != nil && hidden(err) {
		s.miss("the queues of those who wait", err, KindLease, KindAdvisory)
		return nil, nil
	}
	return waiters, err
}

// server says what presses on locks, and what the server's clock shows.
func (s *sight) server(ctx context.Context, load *Load) (at time.Time, err error) {
	var seesAll bool
	var pid pgtype.Int4
	var since pgtype.Timestamptz
	err = s.read(ctx, statements.MonitorServer, []any{&at, &load.Notifications, &pid, &since, &seesAll}, func() {
		load.OldestPID, load.OldestSince = pid.Int32, since.Time
	})
	if err == nil && !seesAll {
		s.miss("addresses and transactions of other roles' sessions", fmt.Errorf("role %q may not see them; GRANT pg_monitor TO it", s.conn.Config().User))
	}
	return at, err
}

// keyNames is what the numbers of advisory locks mean.
type keyNames struct {
	names  map[lockkey.ID]string
	labels map[lockkey.ID]string // of locks that other programs are known to take
}

func (k keyNames) of(id lockkey.ID) string {
	if name, known := k.names[id]; known {
		return name
	}
	return rawKey(id)
}

// internal reports whether a key is one of pgxlock's own: one that has a name is a user's.
func (k keyNames) internal(id lockkey.ID) bool {
	_, named := k.names[id]
	return id.IsOwn() && !named
}

// rawKey is the key that names a lock by its number.
func rawKey(id lockkey.ID) string {
	if id.Pair {
		return lockkey.RawPair(int32(id.Number>>32), int32(id.Number))
	}
	return lockkey.Raw(id.Number)
}

// keyNames collects the names that were given, and those that were published.
func (s *sight) keyNames(ctx context.Context) (keyNames, error) {
	k := keyNames{make(map[lockkey.ID]string), make(map[lockkey.ID]string)}
	if s.schema != "" {
		var number int64
		var name string
		err := s.read(ctx, statements.MonitorNames, []any{&number, &name}, func() {
			if id := lockkey.Identify(name); id.Number == number { // else somebody wrote what is not so
				k.names[id] = name
			}
		})
		if err != nil && hidden(err) {
			s.miss("names behind the numbers of advisory locks", err)
		} else if err != nil {
			return k, err
		}
	}
	if _, raw := lockkey.ParseRaw(s.filter.Key); !raw && s.filter.Key != "" {
		k.names[lockkey.Identify(s.filter.Key)] = s.filter.Key
	}
	for _, name := range s.monitor.Config.Names {
		k.names[lockkey.Identify(name)] = name
	}

	var database, schema, table string
	err := s.read(ctx, statements.MonitorMigrators, []any{&database, &schema, &table}, func() {
		for _, database := range []string{database, "/" + database} { // the library, and the command
			k.labels[lockkey.ID{Number: migrateKey(database, schema, table)}] = fmt.Sprintf("golang-migrate, with table %s", pgx.Identifier{schema, table}.Sanitize())
		}
	})
	return k, err
}

// migrateKey is what golang-migrate's drivers for PostgreSQL lock while they migrate: see
// GenerateAdvisoryLockId of its package database.
func migrateKey(database, schema, table string) int64 {
	const salt = 1486364155
	return int64(crc32.ChecksumIEEE([]byte(schema+"\x00"+table+"\x00"+database)) * salt)
}
