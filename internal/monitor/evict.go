package monitor

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

const (
	// evictPatience is how long Evict waits for a session to give a lock back.
	evictPatience = 5 * time.Second

	// askEvery is how often it asks, and looks whether it has.
	askEvery = 250 * time.Millisecond

	// reapStep is how much is reaped in one transaction.
	reapStep = 1000
)

// EvictLease takes a lease, a permit or a share away from the hold with this id and token,
// and reports whether there was one.
func (m *Monitor) EvictLease(ctx context.Context, key, id string, token int64, reason string) (evicted bool, err error) {
	err = m.write(ctx, func(s *sight) error {
		if err := checkReason(reason); err != nil {
			return err
		}
		evicted, err = call[bool](ctx, s, statements.EvictLease, key, id, token, reason)
		return err
	})
	return evicted && err == nil, err
}

// EvictAdvisory asks the session of a server's process for an advisory lock until it has
// given it back, and reports whether it had it.
func (m *Monitor) EvictAdvisory(ctx context.Context, key string, shared bool, pid int32, reason string) (evicted bool, err error) {
	err = m.write(ctx, func(s *sight) error {
		if err := checkReason(reason); err != nil {
			return err
		}
		if pid == 0 {
			return fmt.Errorf("the lock is a prepared transaction's, which has no session; COMMIT PREPARED or ROLLBACK PREPARED ends it: %w", errors.ErrUnsupported)
		}
		if m.internal(key) {
			return fmt.Errorf("%w (%s); evict the holder of the lock that it belongs to, or end the session with Monitor.Terminate", lockerr.ErrInternalLock, lockkey.Identify(key).OwnLabel(shared))
		}
		evicted, err = s.evictSession(ctx, key, pid, reason)
		return err
	})
	return evicted && err == nil, err
}

// internal reports whether a key is one of pgxlock's own: one that has a name is a user's.
func (m *Monitor) internal(key string) bool {
	_, raw := lockkey.ParseRaw(key)
	return raw && lockkey.Identify(key).IsOwn() && !slices.Contains(m.Config.Names, key)
}

func (s *sight) evictSession(ctx context.Context, key string, pid int32, reason string) (asked bool, err error) {
	id := lockkey.Identify(key)
	patient, cancel := context.WithTimeout(ctx, evictPatience)
	defer cancel()
	for {
		holds, err := call[bool](ctx, s, statements.EvictAdvisory, pid, id.Number, reason, id.Space())
		switch {
		case err != nil:
			return false, err
		case !holds:
			return asked, nil
		}
		asked = true
		if !clock.Sleep(patient, askEvery) {
			return false, errors.Join(fmt.Errorf("%w by process %d; Monitor.Terminate ends its session, with all that it holds", lockerr.ErrStillHeld, pid), lockerr.ContextError(ctx))
		}
	}
}

// A Session is a pgxlock.Session.
type Session struct {
	Application, Role, Client string
	Holders                   []*Holder
	Waiters                   []Waiter
	Started                   int64 // as sql/conn/backend.sql says it; 0: this role may not see it
}

// Session returns the session of a server's process, or an error that matches
// pgx.ErrNoRows.
func (m *Monitor) Session(ctx context.Context, pid int32) (Session, error) {
	var found Session
	err := m.look(ctx, Filter{Kind: KindAdvisory}, "", func(s *sight) error {
		locks, err := s.advisory(ctx)
		if err != nil {
			return err
		}
		found.Holders = slices.DeleteFunc(locks.holders, func(h *Holder) bool { return h.PID != pid })
		for _, w := range locks.waiters {
			if w.PID == pid {
				found.Waiters = append(found.Waiters, w)
			}
		}
		err = s.conn.QueryRow(ctx, statements.MonitorSession.Text(), pgx.QueryExecModeExec, pid).Scan(&found.Started, &found.Application, &found.Role, &found.Client)
		if errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("this database has no session with process %d: %w", pid, err)
		}
		return err
	})
	sortHolders(found.Holders)
	sortWaiters(found.Waiters)
	return found, err
}

// Terminate ends the session of a server's process that began at started, and records that
// of each of the keys that it holds. It reports whether the session was there.
func (m *Monitor) Terminate(ctx context.Context, pid int32, started int64, keys []string, reason string) (terminated bool, err error) {
	err = m.write(ctx, func(s *sight) error {
		if started == 0 {
			return fmt.Errorf("role %q may not see when the session of process %d began, by which it is known from a later one with that number; GRANT pg_monitor TO it", s.conn.Config().User, pid)
		}
		if err := checkReason(reason); err != nil {
			return err
		}
		if s.schema != "" {
			for _, key := range keys {
				if m.internal(key) {
					continue // it is nobody's hold
				}
				id := lockkey.Identify(key)
				if _, err := call[bool](ctx, s, statements.EvictAdvisory, pid, id.Number, "the session was ended: "+reason, id.Space()); err != nil {
					return err
				}
			}
		}
		// Each try waits for a second.
		for range 5 {
			ended, err := pgx.CollectExactlyOneRow(s.ask(ctx, statements.MonitorReadWrite, statements.EvictTerminate, pid, started), pgx.RowTo[bool])
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
		return fmt.Errorf("process %d was told to end, and is still there", pid)
	})
	return terminated, err
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

// Reap removes leases, permits and shares that expired longer ago than age.
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
	return removed, err
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
