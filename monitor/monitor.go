package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/place"
)

// A Monitor shows the locks of a database, of all processes that use it, and can evict
// their holders. It shows leases, permits and shares, the advisory locks of sessions and of
// transactions, and the waiters for all of them. It is for people and for programs that
// supervise others: its answers are out of date when they arrive.
//
// Each call takes one connection of the pool, reads in read-only transactions, and acquires
// no lock. It works through a pooler in every mode, but shows a pooler's session with the
// server as the pooler's, and so the locks of the pooler's clients. Reading the advisory
// locks blocks the server's lock table for a moment: call it every few seconds, not in a
// loop.
//
// A Monitor shows advisory locks without an installation; Snapshot.Missing says what it
// could not show, and why, and so it does on a standby. Its statements are sql/monitor/*.sql; psql -f runs those
// without parameters unchanged.
//
// A Monitor is safe for concurrent use. The zero value is not usable.
type Monitor struct {
	pool *pgxpool.Pool
	cfg  Config
}

// Config configures a [Monitor]. A nil *Config means the defaults.
type Config struct {
	// Schema is where the migrations were run. To name it is to trust its owner, see
	// [pgxlock.LeaseConfig]. Default: as there, if there is such a schema.
	Schema string

	// Names are keys of advisory locks to show by name: the server knows only their
	// numbers. Where the migrations are installed, Lockers publish the names of locks that
	// they hold for more than a few seconds.
	Names []string

	// Internal also shows pgxlock's own advisory locks, in snapshots too: the liveness of
	// sessions, guards, and pins of fenced transactions. A mark in their numbers identifies
	// them; one of 8 million numbers of users has it by chance. A lock with the mark whose
	// name is known is a user's and is always shown. For a lock that is locked by its
	// number, put its [pgxlock.RawKey] into Names.
	Internal bool

	// MostLeases is how many leases, permits and shares a call reads at most, 1 to 200,000: the first
	// by name, and in a Snapshot also those that callers wait for. A program that shows a part of them
	// need not read all, which takes the server and the program 3 µs each. Default: 200,000.
	MostLeases int

	// Observe receives a [pgxlock.Event] for each lock that Evict or Terminate is to end. See
	// there for when. Default: nobody receives them.
	Observe func(context.Context, pgxlock.Event)
}

// mostRows is how many rows of a kind the statements in sql/monitor read at most.
const mostRows = 200_000

// New returns a Monitor that uses connections of the pool. It sends nothing before the first
// call.
func New(pool *pgxpool.Pool, cfg *Config) (*Monitor, error) {
	m := &Monitor{pool: pool}
	if cfg != nil {
		m.cfg = *cfg
		m.cfg.Names = slices.Clone(cfg.Names)
	}
	if pool == nil {
		return nil, fail("new", "", 0, errors.New("the pool is nil; make one with pgxpool.New"))
	}
	if m.cfg.MostLeases < 0 || m.cfg.MostLeases > mostRows {
		return nil, fail("new", "", 0, fmt.Errorf("monitor.Config.MostLeases is %d; use 1 to %d, or 0 for that", m.cfg.MostLeases, mostRows))
	}
	m.cfg.MostLeases = cmp.Or(m.cfg.MostLeases, mostRows)
	if err := place.CheckName(m.cfg.Schema); err != nil {
		return nil, fail("new", "", 0, fmt.Errorf("monitor.Config.Schema %.80q %w", m.cfg.Schema, err))
	}
	for _, name := range m.cfg.Names {
		if err := lockkey.CheckAdvisory(name); err != nil {
			return nil, fail("new", name, 0, fmt.Errorf("monitor.Config.Names: %w", err))
		}
	}
	return m, nil
}

// fail returns the error that a call returns for err, or nil if err is nil.
func fail(op, key string, kind pgxlock.Kind, err error) error {
	if err == nil {
		return nil
	}
	return &pgxlock.Error{Op: op, Key: key, Kind: kind, Err: lockerr.Typed(err)}
}

// missing returns an error if the receiver or the context of a method is nil.
func missing(ctx context.Context, m *Monitor) error {
	if m == nil {
		return errors.New("the Monitor is nil; make one with monitor.New")
	}
	return lockerr.MissingContext(ctx)
}

// Filter selects locks. The zero value selects all but pgxlock's own advisory locks.
type Filter struct {
	Kind     pgxlock.Kind // 0: every kind
	Key      string       // "": every key; an advisory lock is found by its name, its [pgxlock.RawKey] or that of its Namespace
	Prefix   string       // of the key; only "" matches an advisory lock whose name is unknown
	Internal bool         // also select pgxlock's own advisory locks, see [Config].Internal; a lock whose RawKey is Key is always selected
}

func (f Filter) check() error {
	if f.Kind > pgxlock.KindLease {
		return fmt.Errorf("Filter.Kind is %v, whose locks only their own process knows; use KindAdvisory, KindLease or 0: %w", f.Kind, errors.ErrUnsupported)
	}
	if f.Key != "" {
		if err := lockkey.CheckAdvisory(f.Key); err != nil {
			return fmt.Errorf("Filter.Key: %w", err)
		}
	}
	if strings.ContainsRune(f.Prefix, 0) {
		return errors.New("Filter.Prefix contains a zero byte; use Filter.Key for RawKey's values")
	}
	return nil
}

// admits reports whether a lock passes.
func (f Filter) admits(kind pgxlock.Kind, key string) bool {
	if (f.Kind != 0 && f.Kind != kind) || (f.Key != "" && f.Key != key) {
		return false
	}
	if f.Prefix != "" && !lockkey.IsNumber(key) {
		key, _ = lockkey.Split(key)
	}
	return strings.HasPrefix(key, f.Prefix)
}

// A Snapshot is the state of all locks at one moment, except for the time that it took to
// read it.
//
// Its size has a bound, whatever other programs store: at most [Config].MostLeases leases, permits and
// shares, of about 32 MiB, and 200,000 tickets of waiters. Missing says if there are more.
// Of a Holder's Metadata it has the first 1,000 characters, and only ... where more than
// 1,000 leases have long ones; [pgxlock.Locker.Holders] returns all of it.
type Snapshot struct {
	At      time.Time        // the server's clock
	Holders []pgxlock.Holder // by kind and key
	Expired []pgxlock.Holder // leases that expired and were not released; anybody may take them over
	Waiters []Waiter         // by kind and key, in the order of their queue
	Load    Load             // of the server
	Missing []string         // what this role, this schema or this server cannot show, and what to do about it
	Unread  Unread           // why holders or waiters are left out
}

// ErrTooMany means that there are more leases, or more waiters, than a call reads.
var ErrTooMany = errors.New("there are more")

// Load is how much of the server's resources locks use up, on the whole server.
type Load struct {
	// Locks is the number of entries of all sessions in the server's lock table, and
	// Room how many it has room for at least. When it is full no session can work.
	Locks, Room int64

	// Notifications is how full the notification queue is, from 0 to 1. It grows while
	// a session that listens has a transaction open.
	Notifications float64

	// OldestPID and OldestSince are the process and the begin of the transaction with the
	// oldest snapshot, if one is known: dead rows of leases are not cleaned up before it
	// ends.
	OldestPID   int32     `json:",omitzero"`
	OldestSince time.Time `json:",omitzero"`
}

// String says how much is used up.
func (l Load) String() string {
	text := fmt.Sprintf("lock table %d of %d, notifications %.0f%%", l.Locks, l.Room, 100*l.Notifications)
	if l.OldestPID != 0 {
		text += fmt.Sprintf(", oldest snapshot of process %d since %s", l.OldestPID, l.OldestSince.Format(time.RFC3339))
	}
	return text
}

// Unread says why a [Snapshot] lacks holders or waiters. An empty list means that there are none
// only if the error is nil; if it is not, the Snapshot may have some of them. Each error is an
// [*pgxlock.Error] that matches [pgxlock.ErrSchema] if the installation is missing or out of date,
// [pgxlock.ErrReadOnly] on a standby, which knows neither the queues nor the primary's advisory locks,
// and [ErrTooMany] if there are more than are read. Missing details, such as names of advisory locks, are in
// Snapshot.Missing alone.
type Unread struct {
	Leases   error // leases, permits and shares, held and expired
	Advisory error // advisory locks, and the sessions that the server keeps waiting for them
	Queues   error // waiters in queues, for locks of every kind
}

// holders returns why holders of a kind are left out; 0: of any kind.
func (u Unread) holders(kind pgxlock.Kind) error {
	switch kind {
	case pgxlock.KindLease:
		return u.Leases
	case pgxlock.KindAdvisory:
		return u.Advisory
	}
	return cmp.Or(u.Leases, u.Advisory)
}

// Snapshot reads everything at once. It leaves out what it cannot read: Missing lists what and
// why, and Unread has the error if holders or waiters are among it. It fails only if the server
// cannot be asked.
func (m *Monitor) Snapshot(ctx context.Context) (Snapshot, error) {
	var shot Snapshot
	err := m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		leases, err := in.leases(ctx)
		if err != nil {
			return err
		}
		locks, err := in.advisory(ctx)
		if err != nil {
			return err
		}
		tickets, err := in.tickets(ctx, locks)
		if err != nil {
			return err
		}
		more, err := in.waitedFor(ctx, leases, tickets)
		if err != nil {
			return err
		}
		leases = append(leases, more...)
		if err := in.evictions(ctx, slices.Concat(leases, locks.holders)); err != nil {
			return err
		}
		held := locks.holders
		var expired []*pgxlock.Holder
		for _, lease := range leases {
			if lease.State == pgxlock.StateLive {
				held = append(held, lease)
			} else {
				expired = append(expired, lease)
			}
		}
		shot.Holders, shot.Expired, shot.Waiters = sorted(held), sorted(expired), append(tickets, locks.waiters...)
		sortWaiters(shot.Waiters)
		shot.Load.Locks, shot.Load.Room = locks.taken, locks.room
		sessions := "transactions"
		if locks.unseen {
			sessions = "addresses and transactions"
		}
		if shot.At, err = in.server(ctx, &shot.Load, sessions); err != nil {
			return err
		}
		shot.Missing, shot.Unread = in.missing, Unread{
			fail("snapshot", "", pgxlock.KindLease, in.unread.Leases), fail("snapshot", "", pgxlock.KindAdvisory, in.unread.Advisory), fail("snapshot", "", 0, in.unread.Queues),
		}
		return nil
	})
	return shot, fail("snapshot", "", 0, err)
}

// Holders returns the holders of locks, sorted by kind and key. An empty result without an error
// means that no such lock is held: if leases cannot be read, or there are more than a [Snapshot]
// has, Holders fails unless the filter's Kind is [pgxlock.KindAdvisory]; on a standby, which does not know
// the primary's advisory locks, it fails with [pgxlock.ErrReadOnly] unless Kind is [pgxlock.KindLease]. With the
// error it returns the holders that it has read. [Monitor.Snapshot] returns everything that can
// be read.
func (m *Monitor) Holders(ctx context.Context, f Filter) ([]pgxlock.Holder, error) {
	return m.holders(ctx, f, string(pgxlock.StateLive))
}

// Expired returns the leases that expired and were not released, sorted by key: their
// holders died, or cannot reach the server. Anybody may take them over.
func (m *Monitor) Expired(ctx context.Context) ([]pgxlock.Holder, error) {
	return m.holders(ctx, Filter{Kind: pgxlock.KindLease}, string(pgxlock.StateExpired), string(pgxlock.StateAbandoned))
}

// holders returns the holders of locks, of leases only those in these states. It fails if
// locks that the filter names cannot be read.
func (m *Monitor) holders(ctx context.Context, f Filter, states ...string) ([]pgxlock.Holder, error) {
	var found []*pgxlock.Holder
	err := m.inspect(ctx, f, strings.Join(states, ","), func(in *inspection) (err error) {
		if f.Kind != pgxlock.KindAdvisory {
			if found, err = in.leases(ctx); err != nil {
				return err
			}
		}
		if f.Kind != pgxlock.KindLease {
			locks, err := in.advisory(ctx)
			if err != nil {
				return err
			}
			found = append(found, locks.holders...)
		}
		return cmp.Or(in.evictions(ctx, found), in.unread.holders(f.Kind))
	})
	return sorted(found), fail("holders", f.Key, f.Kind, err)
}

// Waiters returns the waiters for locks, sorted by kind and key, in the order of their
// queue. If the queues cannot be read, it fails unless the filter's Kind is [pgxlock.KindAdvisory]
// and no queues are installed. On a standby, which has neither the queues nor the primary's
// sessions, it fails with [pgxlock.ErrReadOnly]. With an error it returns the waiters that it has read.
func (m *Monitor) Waiters(ctx context.Context, f Filter) ([]Waiter, error) {
	var waiters []Waiter
	err := m.inspect(ctx, f, "", func(in *inspection) error {
		locks, err := in.advisory(ctx) // its liveness locks say which processes live
		if err != nil {
			return err
		}
		tickets, err := in.tickets(ctx, locks)
		waiters = append(tickets, locks.waiters...)
		unread := in.unread
		if f.Kind == pgxlock.KindLease {
			unread.Advisory = nil
		} else if f.Kind == pgxlock.KindAdvisory && in.schema == "" && errors.Is(unread.Queues, lockerr.ErrSchema) {
			unread.Queues = nil
		}
		return cmp.Or(err, unread.Queues, unread.Advisory)
	})
	sortWaiters(waiters)
	return waiters, fail("waiters", f.Key, f.Kind, err)
}

// sorted returns holders by kind and key. A database may have many, and a Holder is large:
// pointers are cheaper to move.
func sorted(found []*pgxlock.Holder) []pgxlock.Holder {
	if len(found) == 0 {
		return nil
	}
	slices.SortFunc(found, func(a, b *pgxlock.Holder) int {
		if c := cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Key, b.Key)); c != 0 {
			return c
		}
		return cmp.Or(cmp.Compare(a.PID, b.PID), strings.Compare(a.ID, b.ID))
	})
	list := make([]pgxlock.Holder, len(found))
	for i, h := range found {
		list[i] = *h
	}
	return list
}

func sortWaiters(waiters []Waiter) {
	slices.SortFunc(waiters, func(a, b Waiter) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Key, b.Key), cmp.Compare(a.Ticket, b.Ticket), a.Since.Compare(b.Since), cmp.Compare(a.PID, b.PID))
	})
}

// Watch yields a Snapshot now, and another after each interval every, which is at least 1
// s. While the server cannot be asked it yields the error once and keeps trying. An error
// that is not transient ends it, and so does ctx. From snapshot to snapshot it sees which
// leases are not renewed any more: [pgxlock.Holder].Late.
func (m *Monitor) Watch(ctx context.Context, every time.Duration) iter.Seq2[Snapshot, error] {
	return func(yield func(Snapshot, error) bool) {
		if err := missing(ctx, m); err != nil {
			yield(Snapshot{}, fail("watch", "", 0, err))
			return
		}
		if every < time.Second {
			yield(Snapshot{}, fail("watch", "", 0, fmt.Errorf("every is %s, it must be at least 1 s, because each snapshot blocks the server's lock table for a moment", every)))
			return
		}
		var renewals *Renewals
		for failing := false; ctx.Err() == nil; clock.Sleep(ctx, every) {
			shot, err := m.Snapshot(ctx)
			if err == nil {
				renewals = renewals.With(&shot)
			}
			switch {
			case ctx.Err() != nil:
				return
			case err == nil || !failing:
				if !yield(shot, err) {
					return
				}
			}
			if failing = err != nil; failing && !lockerr.Transient(err) {
				return
			}
		}
	}
}
