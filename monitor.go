package pgxlock

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
	locks monitor.Monitor
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
	m := &Monitor{monitor.Monitor{Pool: pool}}
	if cfg != nil {
		m.locks.Config = monitor.Config{Schema: cfg.Schema, Names: slices.Clone(cfg.Names), Internal: cfg.Internal}
	}
	if pool == nil {
		return nil, fail("new", "", 0, errors.New("the pool is nil; make one with pgxpool.New"))
	}
	if err := place.CheckName(m.locks.Config.Schema); err != nil {
		return nil, fail("new", "", 0, fmt.Errorf("MonitorConfig.Schema %.80q %w", m.locks.Config.Schema, err))
	}
	for _, name := range m.locks.Config.Names {
		if err := lockkey.CheckAdvisory(name); err != nil {
			return nil, fail("new", name, 0, fmt.Errorf("MonitorConfig.Names: %w", err))
		}
	}
	return m, nil
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

// wanted is the filter as the room below knows it.
func (f Filter) wanted() monitor.Filter {
	return monitor.Filter{Kind: monitor.Kind(f.Kind), Key: f.Key, Prefix: f.Prefix, Internal: f.Internal}
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
	if err := missing(ctx, m); err != nil {
		return Snapshot{}, fail("snapshot", "", 0, err)
	}
	shot, err := m.locks.Snapshot(ctx)
	return Snapshot{shot.At, holdersOf(shot.Holders), holdersOf(shot.Expired), waitersOf(shot.Waiters), shot.Missing}, fail("snapshot", "", 0, err)
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
	if err := cmp.Or(missing(ctx, m), f.check()); err != nil {
		return nil, fail("holders", f.Key, f.Kind, err)
	}
	wanted := make([]string, len(states))
	for i, state := range states {
		wanted[i] = string(state)
	}
	holders, err := m.locks.Holders(ctx, f.wanted(), wanted...)
	return holdersOf(holders), fail("holders", f.Key, f.Kind, err)
}

// Waiters returns who waits for locks, by kind and key, in the order of their queue. It is
// an error if the queues cannot be seen, unless the filter's Kind is Advisory and there are
// none: the sessions that the server keeps waiting are always seen.
func (m *Monitor) Waiters(ctx context.Context, f Filter) ([]Waiter, error) {
	if err := cmp.Or(missing(ctx, m), f.check()); err != nil {
		return nil, fail("waiters", f.Key, f.Kind, err)
	}
	waiters, err := m.locks.Waiters(ctx, f.wanted())
	return waitersOf(waiters), fail("waiters", f.Key, f.Kind, err)
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

// Evict takes a lock away from a holder that [Monitor.Holders], [Monitor.Expired] or a
// [Snapshot] returned, and records who did it, when, and why. It reports whether h had it:
// if it is no longer the holder, nothing happens. The reason must not be empty, nor
// longer than 900 bytes; the holder is told of it.
//
// Of a lease, a permit or a share exactly that acquisition ends, and others may have the
// lock at once. Its holder finds out at its next renewal, within a third of its TTL, by
// an error that matches [ErrLost] and [ErrEvicted]. Until then it believes in the lock:
// what it writes under [Lock.Fence] is refused from now on, as is a token that a resource
// compares, and nothing else is. A transaction that it had fenced before goes on, and
// nobody else has the lock before that has ended.
//
// An advisory lock only its session can give back. A Locker's does so when it is asked,
// after its callers have lost the lock. Evict asks until it has, for 5 s or until ctx
// ends, and returns [ErrStillHeld] if it has not: because it is no Locker's, or one that
// cannot listen, as behind a pooler, or it hangs. Then there is [Monitor.Terminate].
// Several in one process who share an advisory lock lose it together.
//
// One of pgxlock's own locks, which are shown with [Filter].Internal, is no caller's to lose:
// the error matches [ErrInternalLock], and nothing happens.
//
// It needs the migrations ([ErrSchema]), and a role of the kind administration.
func (m *Monitor) Evict(ctx context.Context, h Holder, reason string) (evicted bool, err error) {
	switch err = missing(ctx, m); {
	case err != nil:
	case h.Kind == KindLease:
		evicted, err = m.locks.EvictLease(ctx, h.Key, h.ID, h.Token, reason)
	case h.Kind == KindAdvisory:
		evicted, err = m.locks.EvictAdvisory(ctx, h.Key, h.Mode == Shared, h.PID, reason)
	default:
		err = fmt.Errorf("Holder.Kind is %v, and only what Advisory and Lease Lockers hold can be evicted: %w", h.Kind, errors.ErrUnsupported)
	}
	return evicted, fail("evict", h.Key, h.Kind, err)
}

// A Session is a connection to the server with all advisory locks that it holds or
// waits for, which end with it; pgxlock's own only with MonitorConfig.Internal.
type Session struct {
	PID                       int32
	Application, Role, Client string
	Holders                   []Holder
	Waiters                   []Waiter

	started int64 // as sql/conn/backend.sql says it
}

// Session returns the session of a server's process, to be shown before it is ended. If
// there is none any more the error matches pgx.ErrNoRows.
func (m *Monitor) Session(ctx context.Context, pid int32) (Session, error) {
	if err := missing(ctx, m); err != nil {
		return Session{PID: pid}, fail("session", "", KindAdvisory, err)
	}
	found, err := m.locks.Session(ctx, pid)
	return Session{pid, found.Application, found.Role, found.Client, holdersOf(found.Holders), waitersOf(found.Waiters), found.Started}, fail("session", "", KindAdvisory, err)
}

// Terminate ends a session that [Monitor.Session] returned: all advisory locks that it
// holds are free then, also those that it took since, and whoever used them finds out as
// from a broken connection. It is the last resort, where [Monitor.Evict] returned
// [ErrStillHeld]. It reports whether the session was there; another one that has the same
// process id by now is left alone. Where the migrations are installed it is recorded of
// each lock who did this, when, and why.
//
// The server lets a role end sessions of its own, of roles that it is a member of, and,
// as a member of pg_signal_backend, of all that are no superuser's. When the session
// began it must be allowed to see, as it is of its own and as a member of pg_monitor.
func (m *Monitor) Terminate(ctx context.Context, session Session, reason string) (terminated bool, err error) {
	if err := missing(ctx, m); err != nil {
		return false, fail("terminate", "", KindAdvisory, err)
	}
	keys := make([]string, len(session.Holders))
	for i, h := range session.Holders {
		keys[i] = h.Key
	}
	terminated, err = m.locks.Terminate(ctx, session.PID, session.started, keys, reason)
	return terminated, fail("terminate", "", KindAdvisory, err)
}

// Reap removes leases, permits and shares that expired longer ago than age, and says how
// many. It is housekeeping: acquiring never needs it, and tokens do not depend on it. A
// Locker does it now and then, for those that expired more than an hour ago.
func (m *Monitor) Reap(ctx context.Context, age time.Duration) (removed int64, err error) {
	if err := missing(ctx, m); err != nil {
		return 0, fail("reap", "", KindLease, err)
	}
	removed, err = m.locks.Reap(ctx, age)
	return removed, fail("reap", "", KindLease, err)
}
