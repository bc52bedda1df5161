// Package monitor reads and evicts the locks of a database, for the root package's Monitor,
// and reads the load of its server, for the command.
//
// Each call takes one connection of the pool and runs one statement after the other, each in
// a transaction of its own: nothing is locked from one to the next, so that an answer may
// mix two moments. It keeps no state between calls and has no mutex.
package monitor

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// A Monitor does the work of a pgxlock.Monitor, which checks arguments, converts results
// and wraps errors. The types below have the same fields as those of the root package.
type Monitor struct {
	Pool   *pgxpool.Pool
	Config Config
}

// Config is a pgxlock.MonitorConfig.
type Config struct {
	Schema   string
	Names    []string
	Internal bool
}

// A Kind is a kind of locks that a server knows.
type Kind uint8

// The kinds, with the numbers that they have in the root package.
const (
	KindAdvisory Kind = iota + 1
	KindLease
)

// A Filter is a pgxlock.Filter.
type Filter struct {
	Kind     Kind // 0: every kind
	Key      string
	Prefix   string
	Internal bool
}

// admits reports whether a lock passes.
func (f Filter) admits(kind Kind, key string) bool {
	return (f.Kind == 0 || f.Kind == kind) && (f.Key == "" || f.Key == key) && strings.HasPrefix(key, f.Prefix)
}

// A Holder is a pgxlock.Holder.
type Holder struct {
	Key                              string
	Kind                             Kind
	Shared                           bool
	ID, Metadata                     string
	Token                            int64
	PID                              int32
	Since, Expires                   time.Time
	State                            string // as the view lock_leases has it
	Suspect                          bool
	Application, Role, Client, Label string
	Internal                         bool
	EvictedBy, EvictionReason        string
}

// The states of a lease.
const (
	stateLive      = "live"
	stateExpired   = "expired"
	stateAbandoned = "abandoned"
)

// evictedHolder is the holder id of a lease whose holder was evicted.
const evictedHolder = "*evicted"

// A Waiter is a pgxlock.Waiter.
type Waiter struct {
	Key       string
	Kind      Kind
	Shared    bool
	Owner     string
	Since     time.Time
	Ticket    int64
	Behind    int
	Woken     bool
	Holds     []string
	PID       int32
	BlockedBy []int32
	Label     string
	Internal  bool
}

// A Snapshot is a pgxlock.Snapshot.
type Snapshot struct {
	At               time.Time
	Holders, Expired []*Holder
	Waiters          []Waiter
	Missing          []string
	Unread           Unread
}

// An Unread is a pgxlock.Unread.
type Unread struct{ Leases, Advisory, Queues error }

// holders returns why holders of a kind are left out; 0: of any kind.
func (u Unread) holders(kind Kind) error {
	switch kind {
	case KindLease:
		return u.Leases
	case KindAdvisory:
		return u.Advisory
	}
	return cmp.Or(u.Leases, u.Advisory)
}

// Snapshot reads everything.
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
		if err := in.evictions(ctx, slices.Concat(leases, locks.holders)); err != nil {
			return err
		}
		tickets, err := in.tickets(ctx, locks)
		if err != nil {
			return err
		}
		shot.Holders = locks.holders
		for _, lease := range leases {
			if lease.State == stateLive {
				shot.Holders = append(shot.Holders, lease)
			} else {
				shot.Expired = append(shot.Expired, lease)
			}
		}
		shot.Waiters = append(tickets, locks.waiters...)
		load := Load{Locks: locks.taken, Room: locks.room}
		if shot.At, err = in.server(ctx, &load); err != nil {
			return err
		}
		report(ctx, load)
		shot.Missing, shot.Unread = in.missing, in.unread
		return nil
	})
	sortHolders(shot.Holders)
	sortHolders(shot.Expired)
	sortWaiters(shot.Waiters)
	return shot, err
}

// Holders returns the holders of locks, of leases only those in these states. It fails if
// locks that the filter names cannot be read.
func (m *Monitor) Holders(ctx context.Context, f Filter, states ...string) ([]*Holder, error) {
	var holders []*Holder
	err := m.inspect(ctx, f, strings.Join(states, ","), func(in *inspection) (err error) {
		if f.Kind != KindAdvisory {
			if holders, err = in.leases(ctx); err != nil {
				return err
			}
		}
		if f.Kind != KindLease {
			locks, err := in.advisory(ctx)
			if err != nil {
				return err
			}
			holders = append(holders, locks.holders...)
		}
		return cmp.Or(in.evictions(ctx, holders), in.unread.holders(f.Kind))
	})
	sortHolders(holders)
	return holders, err
}

// Waiters returns the waiters for locks. It fails if queues that the filter names cannot be
// read. Without an installation there are no queues for advisory locks.
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
		if f.Kind == KindLease {
			unread.Advisory = nil
		} else if f.Kind == KindAdvisory && in.schema == "" && errors.Is(unread.Queues, lockerr.ErrSchema) {
			unread.Queues = nil
		}
		return cmp.Or(err, unread.Queues, unread.Advisory)
	})
	sortWaiters(waiters)
	return waiters, err
}

// sortHolders sorts by kind and key. A database may have many holders, and a Holder is
// large: pointers are cheaper to move.
func sortHolders(holders []*Holder) {
	slices.SortFunc(holders, func(a, b *Holder) int {
		if c := cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Key, b.Key)); c != 0 {
			return c
		}
		return cmp.Or(cmp.Compare(a.PID, b.PID), strings.Compare(a.ID, b.ID))
	})
}

func sortWaiters(waiters []Waiter) {
	slices.SortFunc(waiters, func(a, b Waiter) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Key, b.Key), cmp.Compare(a.Ticket, b.Ticket), a.Since.Compare(b.Since), cmp.Compare(a.PID, b.PID))
	})
}

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
	OldestPID   int32
	OldestSince time.Time
}

type loadKey struct{}

// WithLoad returns a context with which each Snapshot of a Monitor also puts the server's
// load into to. A Snapshot reads the load in any case, in the statement that reads the
// lock table: reading it apart would block the lock table a second time.
func WithLoad(ctx context.Context, to *Load) context.Context {
	return context.WithValue(ctx, loadKey{}, to)
}

// report puts the load where WithLoad said, if it did.
func report(ctx context.Context, load Load) {
	if to, ok := ctx.Value(loadKey{}).(*Load); ok {
		*to = load
	}
}
