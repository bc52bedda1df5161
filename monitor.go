package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/monitor"
	"github.com/pgxlock/pgxlock/internal/place"
)

// This file is the monitor: who holds what, who waits for it, and what is left behind,
// in all processes that use the database.

// A Monitor shows the locks of a database, whoever has them, and takes them away:
// leases, permits and shares, the advisory locks of sessions and of transactions, and
// those who wait for them. It is for people and for programs that watch others; what it
// says is out of date when it arrives.
//
// It asks on connections of the pool, one at a time, in transactions that only read, and
// takes part in no lock. It works through a pooler in every mode; a session that the
// pooler has with the server is shown as the pooler's, and so are the locks of its
// clients. Looking at the advisory locks stops the server's lock table for a moment: ask
// every few seconds, not in a loop.
//
// It needs no installation to show advisory locks; [Snapshot.Missing] says what it could
// not show, and why. What it asks stands in sql/monitor/*.sql, which psql -f runs as it is.
//
// A Monitor is safe for concurrent use. The zero value is of no use.
type Monitor struct {
	pool *pgxpool.Pool
	cfg  MonitorConfig
}

// MonitorConfig is what a [Monitor] needs to know. A nil *MonitorConfig means the
// defaults.
type MonitorConfig struct {
	// Schema is where the migrations were run. Default: the schema in which
	// acquire_lock is found by the search_path of a connection, else the only one in
	// the database that has pgxlock, if there is one.
	Schema string

	// Names are keys of advisory locks to be shown by name: the server knows only
	// their numbers. Lockers publish the names of what they hold for longer than some
	// seconds, where the migrations are installed.
	Names []string

	// Internal shows pgxlock's own advisory locks as well, also in snapshots: those by
	// which sessions show that they live, guards, and pins of fenced transactions. They
	// are recognised by a mark in their numbers, which one number of a user in 8 million
	// has by chance. A lock with the mark whose name is known is a user's, and always
	// shown; for one that is locked by its number, put its [RawKey] into Names.
	Internal bool
}

// NewMonitor returns a Monitor that asks on the pool's connections. Nothing is sent
// before the first use.
func NewMonitor(pool *pgxpool.Pool, cfg *MonitorConfig) (*Monitor, error) {
	m := &Monitor{pool: pool}
	if cfg != nil {
		m.cfg = MonitorConfig{cfg.Schema, slices.Clone(cfg.Names), cfg.Internal}
	}
	if pool == nil {
		return nil, fail("new", "", 0, errors.New("the pool is nil; make one with pgxpool.New"))
	}
	if err := place.CheckName(m.cfg.Schema); err != nil {
		return nil, fail("new", "", 0, fmt.Errorf("MonitorConfig.Schema %.80q %w", m.cfg.Schema, err))
	}
	for _, name := range m.cfg.Names {
		if err := lockkey.CheckAdvisory(name); err != nil {
			return nil, fail("new", name, 0, fmt.Errorf("MonitorConfig.Names: %w", err))
		}
	}
	return m, nil
}

// A Waiter is one who waits for a lock: a session that the server keeps waiting, or a
// process with its place in the queue of a lock.
type Waiter struct {
	Key   string // of a [Semaphore], its name with # behind it
	Kind  Kind
	Owner string // as the process calls itself

	// Since when it waits; zero if the server does not say.
	Since time.Time `json:",omitzero"`

	// Of a process: its place, the lowest first; how many others in it wait for the
	// lock as well; whether it was told to try; and the ids of what they hold meanwhile.
	Ticket int64
	Behind int
	Woken  bool
	Holds  []string

	// Of a session: the server's process, and those that keep it from the lock; 0 is a
	// prepared transaction. They may be others who wait, before it.
	PID       int32
	BlockedBy []int32

	Mode Mode // of a session

	Label    string // as [Holder] has it
	Internal bool   // as [Holder] has it
}

// String says who waits for what, and as much of the rest as is known.
func (w Waiter) String() string {
	text := fmt.Sprintf("%s waits for %s %s", w.Owner, w.Kind, lockkey.Shown(w.Key))
	if !w.Since.IsZero() {
		text += " since " + w.Since.Format(time.RFC3339)
	}
	if w.Behind > 0 {
		text += fmt.Sprintf(", and %d more of it", w.Behind)
	}
	return text
}

// LogValue makes slog write what is known of the waiter.
func (w Waiter) LogValue() slog.Value {
	attrs := lockAttrs(w.Kind, w.Key, w.Mode, w.Label)
	attrs = append(attrs, slog.String("waiter", w.Owner))
	attrs = appendKnown(attrs, "ticket", w.Ticket)
	attrs = appendKnown(attrs, "behind", int64(w.Behind))
	attrs = appendKnown(attrs, "pid", int64(w.PID))
	return slog.GroupValue(appendTime(attrs, "since", w.Since)...)
}

// Filter says what to show. The zero value shows all but pgxlock's own advisory locks.
type Filter struct {
	Kind     Kind   // 0: every kind
	Key      string // "": every key; an advisory lock is found by its name, or [RawKey]
	Prefix   string // what the key begins with; advisory locks whose name is not known have none
	Internal bool   // also pgxlock's own advisory locks, see MonitorConfig.Internal; one whose RawKey is Key is shown anyway
}

func (f Filter) check() error {
	if f.Kind > KindLease {
		return fmt.Errorf("Filter.Kind is %v; what such a Locker holds is known to its process alone, use Advisory, Lease or 0: %w", f.Kind, errors.ErrUnsupported)
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

// admits reports whether a key passes.
func (f Filter) admits(kind Kind, key string) bool {
	return (f.Kind == 0 || f.Kind == kind) && (f.Key == "" || f.Key == key) && strings.HasPrefix(key, f.Prefix)
}

// A Snapshot is how things stood at one moment, give or take the time that it took to
// ask.
type Snapshot struct {
	At      time.Time // the server's clock
	Holders []Holder  // by kind and key
	Expired []Holder  // leases that ran out and were not given back; anybody may take them
	Waiters []Waiter  // by kind and key, in the order of their queue
	Missing []string  // what this role, or this schema, does not show, and what to do about it
}

// Snapshot looks at everything at once. What cannot be seen is left out, and Missing
// says so; it is an error only if the server could not be asked.
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
		holders, expired := locks.holders, []*Holder(nil)
		for _, lease := range leases {
			if lease.State == StateLive {
				holders = append(holders, lease)
			} else {
				expired = append(expired, lease)
			}
		}
		shot.Holders, shot.Expired = sorted(holders), sorted(expired)
		shot.Waiters = append(tickets, locks.waiters...)
		load := monitor.Load{Locks: locks.taken, Room: locks.room}
		if shot.At, err = s.server(ctx, &load); err != nil {
			return err
		}
		monitor.Report(ctx, load)
		shot.Missing = s.missing
		return nil
	})
	sortWaiters(shot.Waiters)
	return shot, fail("snapshot", "", 0, err)
}

// Holders returns who holds locks now, by kind and key. It is an error if leases cannot be
// seen and the filter's Kind is not Advisory: an empty answer means that nobody holds such a
// lock. Who wants what can be seen takes a [Monitor.Snapshot].
func (m *Monitor) Holders(ctx context.Context, f Filter) ([]Holder, error) {
	return m.holders(ctx, f, StateLive)
}

// Expired returns the leases that ran out and were not given back, by key: their holders
// died, or cannot reach the server. Anybody may take them.
func (m *Monitor) Expired(ctx context.Context) ([]Holder, error) {
	return m.holders(ctx, Filter{Kind: KindLease}, StateExpired, StateAbandoned)
}

func (m *Monitor) holders(ctx context.Context, f Filter, states ...LeaseState) ([]Holder, error) {
	var holders []*Holder
	wanted := make([]string, len(states))
	for i, state := range states {
		wanted[i] = string(state)
	}
	err := m.look(ctx, f, strings.Join(wanted, ","), func(s *sight) (err error) {
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
	return sorted(holders), fail("holders", f.Key, f.Kind, err)
}

// Waiters returns who waits for locks, by kind and key, in the order of their queue. It is
// an error if the queues cannot be seen, unless the filter's Kind is Advisory and there are
// none: the sessions that the server keeps waiting are always seen.
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
	return waiters, fail("waiters", f.Key, f.Kind, err)
}

// Watch yields a Snapshot now, and one each time that every has passed; at least 1 s.
// While the server cannot be asked it yields the error once, and goes on; errors that
// do not pass by themselves end it, and so does ctx.
func (m *Monitor) Watch(ctx context.Context, every time.Duration) iter.Seq2[Snapshot, error] {
	return func(yield func(Snapshot, error) bool) {
		if err := missing(ctx, m); err != nil {
			yield(Snapshot{}, fail("watch", "", 0, err))
			return
		}
		if every < time.Second {
			yield(Snapshot{}, fail("watch", "", 0, fmt.Errorf("every is %s, it must be at least 1 s: to look stops the server's lock table for a moment", every)))
			return
		}
		for failing := false; ctx.Err() == nil; clock.Sleep(ctx, every) {
			shot, err := m.Snapshot(ctx)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil || !failing:
				if !yield(shot, err) {
					return
				}
			}
			if failing = err != nil; failing && !transient(err) {
				return
			}
		}
	}
}

// sorted returns holders by kind and key. They are many: what is moved while they are sorted
// is their addresses, and their list is made once.
func sorted(holders []*Holder) []Holder {
	slices.SortFunc(holders, func(a, b *Holder) int {
		if c := cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Key, b.Key)); c != 0 {
			return c
		}
		return cmp.Or(cmp.Compare(a.PID, b.PID), strings.Compare(a.ID, b.ID))
	})
	if len(holders) == 0 {
		return nil
	}
	list := make([]Holder, len(holders))
	for i, h := range holders {
		list[i] = *h
	}
	return list
}

func sortWaiters(waiters []Waiter) {
	slices.SortFunc(waiters, func(a, b Waiter) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), strings.Compare(a.Key, b.Key), cmp.Compare(a.Ticket, b.Ticket), a.Since.Compare(b.Since), cmp.Compare(a.PID, b.PID))
	})
}
