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
	"github.com/pgxlock/pgxlock/internal/observe"
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
	locks   monitor.Monitor
	observe func(context.Context, Event) // nil: nobody
}

// MonitorConfig configures a [Monitor]. A nil *MonitorConfig means the defaults.
type MonitorConfig struct {
	// Schema is where the migrations were run. To name it is to trust its owner, see
	// [LeaseConfig]. Default: as there, if there is such a schema.
	Schema string

	// Names are keys of advisory locks to show by name: the server knows only their
	// numbers. Where the migrations are installed, Lockers publish the names of locks that
	// they hold for more than a few seconds.
	Names []string

	// Internal also shows pgxlock's own advisory locks, in snapshots too: the liveness of
	// sessions, guards, and pins of fenced transactions. A mark in their numbers identifies
	// them; one of 8 million numbers of users has it by chance. A lock with the mark whose
	// name is known is a user's and is always shown. For a lock that is locked by its
	// number, put its [RawKey] into Names.
	Internal bool

	// Observe receives an [Event] for each lock that Evict or Terminate is to end. See
	// Event for when. Default: nobody receives them.
	Observe func(context.Context, Event)
}

// NewMonitor returns a Monitor that uses connections of the pool. It sends nothing before
// the first call.
func NewMonitor(pool *pgxpool.Pool, cfg *MonitorConfig) (*Monitor, error) {
	m := &Monitor{locks: monitor.Monitor{Pool: pool}}
	if cfg != nil {
		m.observe = cfg.Observe
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

// Filter selects locks. The zero value selects all but pgxlock's own advisory locks.
type Filter struct {
	Kind     Kind   // 0: every kind
	Key      string // "": every key; an advisory lock is found by its name or its [RawKey]
	Prefix   string // of the key; only "" matches an advisory lock whose name is unknown
	Internal bool   // also select pgxlock's own advisory locks, see MonitorConfig.Internal; a lock whose RawKey is Key is always selected
}

func (f Filter) check() error {
	if f.Kind > KindLease {
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

// wanted returns the filter for the monitor below.
func (f Filter) wanted() monitor.Filter {
	return monitor.Filter{Kind: monitor.Kind(f.Kind), Key: f.Key, Prefix: f.Prefix, Internal: f.Internal}
}

// A Snapshot is the state of all locks at one moment, except for the time that it took to
// read it.
//
// Its size has a bound, whatever other programs store: at most 200,000 leases, permits and
// shares, of about 32 MiB, and as many tickets of waiters. Missing says if there are more.
// Of a Holder's Metadata it has the first 1,000 characters, and only ... where more than
// 1,000 leases have long ones; [Locker.Holders] returns all of it.
type Snapshot struct {
	At      time.Time // the server's clock
	Holders []Holder  // by kind and key
	Expired []Holder  // leases that expired and were not released; anybody may take them over
	Waiters []Waiter  // by kind and key, in the order of their queue
	Missing []string  // what this role, this schema or this server cannot show, and what to do about it
	Unread  Unread    // why holders or waiters are left out
}

// Unread says why a [Snapshot] lacks holders or waiters. An empty list means that there are none
// only if the error is nil; if it is not, the Snapshot may have some of them. Each error is an
// [*Error] that matches [ErrSchema] if the installation is missing or out of date, and
// [ErrReadOnly] on a standby, which knows neither the queues nor the primary's advisory locks.
// Missing details, such as names of advisory locks, are in Snapshot.Missing alone.
type Unread struct {
	Leases   error // leases, permits and shares, held and expired
	Advisory error // advisory locks, and the sessions that the server keeps waiting for them
	Queues   error // waiters in queues, for locks of every kind
}

// Snapshot reads everything at once. It leaves out what it cannot read: Missing lists what and
// why, and Unread has the error if holders or waiters are among it. It fails only if the server
// cannot be asked.
func (m *Monitor) Snapshot(ctx context.Context) (Snapshot, error) {
	if err := missing(ctx, m); err != nil {
		return Snapshot{}, fail("snapshot", "", 0, err)
	}
	shot, err := m.locks.Snapshot(ctx)
	unread := Unread{fail("snapshot", "", KindLease, shot.Unread.Leases), fail("snapshot", "", KindAdvisory, shot.Unread.Advisory), fail("snapshot", "", 0, shot.Unread.Queues)}
	return Snapshot{shot.At, holdersOf(shot.Holders), holdersOf(shot.Expired), waitersOf(shot.Waiters), shot.Missing, unread}, fail("snapshot", "", 0, err)
}

// Holders returns the holders of locks, sorted by kind and key. An empty result without an error
// means that no such lock is held: if leases cannot be read, or there are more than a [Snapshot]
// has, Holders fails unless the filter's Kind is [KindAdvisory]; on a standby, which does not know
// the primary's advisory locks, it fails with [ErrReadOnly] unless Kind is [KindLease]. With the
// error it returns the holders that it has read. [Monitor.Snapshot] returns everything that can
// be read.
func (m *Monitor) Holders(ctx context.Context, f Filter) ([]Holder, error) {
	return m.holders(ctx, f, StateLive)
}

// Expired returns the leases that expired and were not released, sorted by key: their
// holders died, or cannot reach the server. Anybody may take them over.
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

// Waiters returns the waiters for locks, sorted by kind and key, in the order of their
// queue. If the queues cannot be read, it fails unless the filter's Kind is [KindAdvisory]
// and no queues are installed. On a standby, which has neither the queues nor the primary's
// sessions, it fails with [ErrReadOnly]. With an error it returns the waiters that it has read.
func (m *Monitor) Waiters(ctx context.Context, f Filter) ([]Waiter, error) {
	if err := cmp.Or(missing(ctx, m), f.check()); err != nil {
		return nil, fail("waiters", f.Key, f.Kind, err)
	}
	waiters, err := m.locks.Waiters(ctx, f.wanted())
	return waitersOf(waiters), fail("waiters", f.Key, f.Kind, err)
}

// Watch yields a Snapshot now, and another after each interval every, which is at least 1
// s. While the server cannot be asked it yields the error once and keeps trying. An error
// that is not transient ends it, and so does ctx.
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
// [Snapshot] returned, and records who did it, when, and why. It reports whether h held the
// lock: if h is no longer the holder, nothing happens. The reason has 1 to 900 bytes, and
// is in the error that the holder receives.
//
// For a lease, a permit or a share, exactly that acquisition ends, and others may acquire
// the lock at once. The holder notices at its next renewal, within a third of its TTL, by
// an error that matches [ErrLost] and [ErrEvicted]. Until then it believes that it holds
// the lock. Its writes under [Lock.Fence] are refused from now on, and so is its token
// where a resource compares tokens, but nothing else is. A transaction that it has already
// fenced may still commit, and nobody else acquires the lock before that transaction has
// ended.
//
// Only its session can release an advisory lock. The session of a Locker does so when
// asked, after its callers have lost the lock. Evict keeps asking until the lock is
// released, for 5 s or until ctx ends, and then returns [ErrStillHeld]: the session is not
// a Locker's, or it cannot listen, as behind a pooler, or it hangs. In that case use
// [Monitor.Terminate]. Callers in one process that share an advisory lock lose it together.
//
// Evict refuses pgxlock's own locks, which [Filter].Internal shows: the error matches
// [ErrInternalLock], and nothing happens.
//
// Evict needs the migrations ([ErrSchema]) and a role of the kind administration.
func (m *Monitor) Evict(ctx context.Context, h Holder, reason string) (evicted bool, err error) {
	if err := missing(ctx, m); err != nil {
		return false, fail("evict", h.Key, h.Kind, err)
	}
	began := time.Now()
	switch h.Kind {
	case KindLease:
		evicted, err = m.locks.EvictLease(ctx, h.Key, h.ID, h.Token, reason)
	case KindAdvisory:
		evicted, err = m.locks.EvictAdvisory(ctx, h.Key, h.Mode == Shared, h.PID, reason)
	default:
		err = fmt.Errorf("Holder.Kind is %v; only leases and advisory locks can be evicted: %w", h.Kind, errors.ErrUnsupported)
	}
	err = fail("evict", h.Key, h.Kind, err)
	m.evicted(ctx, began, reason, evicted, err, h)
	return evicted, err
}

// evicted calls Observe for each holder that a call was to evict.
func (m *Monitor) evicted(ctx context.Context, began time.Time, reason string, evicted bool, err error, holders ...Holder) {
	if m.observe == nil {
		return
	}
	now, call := time.Now(), observe.Call()
	for _, h := range holders {
		m.observe(ctx, Event{Op: EventEvicted, Time: now, Key: h.Key, Kind: h.Kind, Mode: h.Mode, Call: call, Token: h.Token, Holder: h.ID, Wait: now.Sub(began), Granted: evicted, EvictionReason: reason, Err: err})
	}
}

// A Session is a connection to the server, with all advisory locks that it holds or waits
// for; they end with it. It includes pgxlock's own locks only with
// [MonitorConfig.Internal].
type Session struct {
	PID                       int32
	Application, Role, Client string
	Holders                   []Holder
	Waiters                   []Waiter

	started int64 // when it began, as sql/conn/backend.sql has it; 0: unknown
}

// Session returns the session of the server process pid, so that it can be shown before it
// is ended. If the session has ended, the error matches pgx.ErrNoRows.
func (m *Monitor) Session(ctx context.Context, pid int32) (Session, error) {
	if err := missing(ctx, m); err != nil {
		return Session{PID: pid}, fail("session", "", KindAdvisory, err)
	}
	found, err := m.locks.Session(ctx, pid)
	return Session{pid, found.Application, found.Role, found.Client, holdersOf(found.Holders), waitersOf(found.Waiters), found.Started}, fail("session", "", KindAdvisory, err)
}

// Terminate ends a session that [Monitor.Session] returned. All advisory locks that it
// holds become free, including any acquired since, and their holders notice as after a
// broken connection. It is the last resort after [Monitor.Evict] returned [ErrStillHeld].
// It reports whether it ended the session; a later session with the same process id is left
// alone. Where the migrations are installed it records for each lock who did this, when,
// and why. The reason has 1 to 900 bytes, as for Evict.
//
// The server lets a role end its own sessions, those of roles that it is a member of, and,
// as a member of pg_signal_backend, those of all roles but superusers. The role must also
// be allowed to see when the session began: it may for its own sessions, and as a member of
// pg_monitor for all.
func (m *Monitor) Terminate(ctx context.Context, session Session, reason string) (terminated bool, err error) {
	if err := missing(ctx, m); err != nil {
		return false, fail("terminate", "", KindAdvisory, err)
	}
	keys := make([]string, len(session.Holders))
	for i, h := range session.Holders {
		keys[i] = h.Key
	}
	began := time.Now()
	terminated, err = m.locks.Terminate(ctx, session.PID, session.started, keys, reason)
	err = fail("terminate", "", KindAdvisory, err)
	m.evicted(ctx, began, reason, terminated, err, session.Holders...)
	return terminated, err
}

// Reap removes leases, permits and shares that expired longer ago than age, and returns how
// many. It is housekeeping: no acquire needs it, and tokens do not depend on it. Lockers
// reap what expired more than an hour ago.
func (m *Monitor) Reap(ctx context.Context, age time.Duration) (removed int64, err error) {
	if err := missing(ctx, m); err != nil {
		return 0, fail("reap", "", KindLease, err)
	}
	removed, err = m.locks.Reap(ctx, age)
	return removed, fail("reap", "", KindLease, err)
}
