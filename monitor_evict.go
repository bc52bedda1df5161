package pgxlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// This file takes locks away, and clears away what nobody gave back.

// ErrStillHeld means that the session which has the lock was asked to give it back, and
// has not.
var ErrStillHeld = errors.New("pgxlock: asked for, and still held")

// ErrInternalLock means that an advisory lock is one of pgxlock's own, which nobody is to be
// evicted from.
var ErrInternalLock = errors.New("pgxlock: the lock is one of pgxlock's own")

const (
	// evictPatience is how long Evict waits for a session to give a lock back.
	evictPatience = 5 * time.Second

	// askEvery is how often it asks, and looks whether it has.
	askEvery = 250 * time.Millisecond

	// reapStep is how much is reaped in one transaction.
	reapStep = 1000
)

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
	err = m.write(ctx, func(s *sight) error {
		if err := checkReason(reason); err != nil {
			return err
		}
		switch h.Kind {
		case KindLease:
			evicted, err = call[bool](ctx, s, statements.EvictLease, h.Key, h.ID, h.Token, reason)
			return err
		case KindAdvisory:
			if h.PID == 0 {
				return fmt.Errorf("the lock is a prepared transaction's, which has no session; COMMIT PREPARED or ROLLBACK PREPARED ends it: %w", errors.ErrUnsupported)
			}
			if m.internal(h) {
				return fmt.Errorf("%w (%s); evict the holder of the lock that it belongs to, or end the session with Monitor.Terminate", ErrInternalLock, lockkey.Identify(h.Key).OwnLabel(h.Mode == Shared))
			}
			evicted, err = s.evictSession(ctx, h, reason)
			return err
		}
		return fmt.Errorf("Holder.Kind is %v, and only what Advisory and Lease Lockers hold can be evicted: %w", h.Kind, errors.ErrUnsupported)
	})
	return evicted && err == nil, fail("evict", h.Key, h.Kind, err)
}

// internal reports whether the lock of a holder is one of pgxlock's own: one that has a name
// is a user's.
func (m *Monitor) internal(h Holder) bool {
	_, raw := lockkey.ParseRaw(h.Key)
	return raw && lockkey.Identify(h.Key).IsOwn() && !slices.Contains(m.cfg.Names, h.Key)
}

func (s *sight) evictSession(ctx context.Context, h Holder, reason string) (asked bool, err error) {
	id := lockkey.Identify(h.Key)
	patient, cancel := context.WithTimeout(ctx, evictPatience)
	defer cancel()
	for {
		holds, err := call[bool](ctx, s, statements.EvictAdvisory, h.PID, id.Number, reason, id.Space())
		switch {
		case err != nil:
			return false, err
		case !holds:
			return asked, nil
		}
		asked = true
		if !clock.Sleep(patient, askEvery) {
			return false, errors.Join(fmt.Errorf("%w by process %d; Monitor.Terminate ends its session, with all that it holds", ErrStillHeld, h.PID), lockerr.ContextError(ctx))
		}
	}
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
	found := Session{PID: pid}
	err := m.look(ctx, Filter{Kind: KindAdvisory}, "", func(s *sight) error {
		locks, err := s.advisory(ctx)
		if err != nil {
			return err
		}
		found.Holders = sorted(slices.DeleteFunc(locks.holders, func(h *Holder) bool { return h.PID != pid }))
		for _, w := range locks.waiters {
			if w.PID == pid {
				found.Waiters = append(found.Waiters, w)
			}
		}
		err = s.conn.QueryRow(ctx, statements.MonitorSession.Text(), pgx.QueryExecModeExec, pid).Scan(&found.started, &found.Application, &found.Role, &found.Client)
		if errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("this database has no session with process %d: %w", pid, err)
		}
		return err
	})
	sortWaiters(found.Waiters)
	return found, fail("session", "", KindAdvisory, err)
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
	err = m.write(ctx, func(s *sight) error {
		if session.started == 0 {
			return fmt.Errorf("role %q may not see when the session of process %d began, by which it is known from a later one with that number; GRANT pg_monitor TO it", s.conn.Config().User, session.PID)
		}
		if err := checkReason(reason); err != nil {
			return err
		}
		if s.schema != "" {
			for _, h := range session.Holders {
				if m.internal(h) {
					continue // it is nobody's hold
				}
				id := lockkey.Identify(h.Key)
				if _, err := call[bool](ctx, s, statements.EvictAdvisory, session.PID, id.Number, "the session was ended: "+reason, id.Space()); err != nil {
					return err
				}
			}
		}
		// Each try waits for a second.
		for range 5 {
			ended, err := pgx.CollectExactlyOneRow(s.ask(ctx, statements.MonitorReadWrite, statements.EvictTerminate, session.PID, session.started), pgx.RowTo[bool])
			switch {
			case errors.Is(err, pgx.ErrNoRows): // by now, or before
				return nil
			case err != nil:
				return err
			}
			if terminated = true; ended {
				return nil
			}
		}
		terminated = false
		return fmt.Errorf("process %d was told to end, and is still there", session.PID)
	})
	return terminated, fail("terminate", "", KindAdvisory, err)
}

// maxReason is how long a reason may be, in bytes; what a session's end adds to it has
// room as well.
const maxReason = 900

func checkReason(reason string) error {
	if reason == "" || len(reason) > maxReason {
		return fmt.Errorf("the reason has %d bytes, it must have 1 to %d: say why, the holder and those who look later want to know", len(reason), maxReason)
	}
	return nil
}

// Reap removes leases, permits and shares that expired longer ago than age, and says how
// many. It is housekeeping: acquiring never needs it, and tokens do not depend on it. A
// Locker does it now and then, for those that expired more than an hour ago.
func (m *Monitor) Reap(ctx context.Context, age time.Duration) (removed int64, err error) {
	err = m.write(ctx, func(s *sight) error {
		if age < 0 {
			return fmt.Errorf("age is %s, it must be 0 or more", age)
		}
		for _, what := range []statements.Name{statements.LeaseReapOlder, statements.LeaseReapOlderShared} {
			for n := int64(reapStep); n == reapStep; removed += n {
				var err error
				if n, err = call[int64](ctx, s, what, age.Seconds(), reapStep); err != nil {
					return err
				}
			}
		}
		return nil
	})
	return removed, fail("reap", "", KindLease, err)
}

// write is look for what changes something.
func (m *Monitor) write(ctx context.Context, fn func(*sight) error) error {
	return m.look(ctx, Filter{}, "", fn)
}

// call calls a function of the schema, in a transaction of its own that is as the
// functions want it.
func call[T any](ctx context.Context, s *sight, name statements.Name, args ...any) (result T, err error) {
	if s.absent != nil {
		return result, s.absent
	}
	return pgx.CollectExactlyOneRow(s.ask(ctx, statements.MonitorReadWrite, name, args...), pgx.RowTo[T])
}
