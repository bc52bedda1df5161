package monitor

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A Monitor is a pgxlock.Monitor without its checks of arguments.
type Monitor struct {
	Pool   *pgxpool.Pool
	Config Config
}

// Config is pgxlock.MonitorConfig.
type Config struct {
	Schema   string
	Names    []string
	Internal bool
}

// A Kind is a pgxlock.Kind that a server knows, by the same number.
type Kind uint8

// The kinds, with the numbers that they have in the root package.
const (
	KindAdvisory Kind = iota + 1
	KindLease
)

// Filter is pgxlock.Filter.
type Filter struct {
	Kind     Kind // 0: every kind
	Key      string
	Prefix   string
	Internal bool
}

// admits reports whether a key passes.
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
	State                            string // as the views lock_leases and lock_shares say it
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

// evictedHolder is the holder of a lease that was taken away.
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
}

// Snapshot looks at everything at once.
func (m *Monitor) Snapshot(ctx context.Context) (Snapshot, error) {
	var shot Snapshot
	err := m.look(ctx, Filter{}, "", func(s *sight) error {
		leases, err := s.leases(ctx)
		if err != nil {
			return err
		}
		locks, err := s.advisory(ctx)
		if err != nil {
			return err
		}
		if err := s.evictions(ctx, slices.Concat(leases, locks.holders)); err != nil {
			return err
		}
		tickets, err := s.tickets(ctx, locks)
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
		if shot.At, err = s.server(ctx, &load); err != nil {
			return err
		}
		report(ctx, load)
		shot.Missing = s.missing
		return nil
	})
	sortHolders(shot.Holders)
	sortHolders(shot.Expired)
	sortWaiters(shot.Waiters)
	return shot, err
}

// Holders returns who holds locks, leases in these states only.
func (m *Monitor) Holders(ctx context.Context, f Filter, states ...string) ([]*Holder, error) {
	var holders []*Holder
	err := m.look(ctx, f, strings.Join(states, ","), func(s *sight) (err error) {
		if f.Kind != KindAdvisory {
			if holders, err = s.leases(ctx); err != nil {
				return err
			}
		}
		if f.Kind != KindLease {
			locks, err := s.advisory(ctx)
			if err != nil {
				return err
			}
			holders = append(holders, locks.holders...)
		}
		return cmp.Or(s.evictions(ctx, holders), s.unseen())
	})
	sortHolders(holders)
	return holders, err
}

// Waiters returns who waits for locks.
func (m *Monitor) Waiters(ctx context.Context, f Filter) ([]Waiter, error) {
	var waiters []Waiter
	err := m.look(ctx, f, "", func(s *sight) error {
		locks, err := s.advisory(ctx) // they tell which processes live
		if err != nil {
			return err
		}
		tickets, err := s.tickets(ctx, locks)
		waiters = append(tickets, locks.waiters...)
		return cmp.Or(err, s.unseen())
	})
	sortWaiters(waiters)
	return waiters, err
}

// sortHolders sorts by kind and key. Holders are many: what is moved is their addresses.
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
