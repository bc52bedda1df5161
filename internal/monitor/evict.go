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

const (
	// evictPatience is how long EvictAdvisory waits for a session to release a lock.
	evictPatience = 5 * time.Second

	// askEvery is how often it asks the session, and checks whether it has.
	askEvery = 250 * time.Millisecond

	// reapStep is how many rows one transaction removes.
	reapStep = 1000
)

// EvictLease ends the hold of a lease, a permit or a share with this id and token, and
// reports whether there was one.
func (m *Monitor) EvictLease(ctx context.Context, key, id string, token int64, reason string) (evicted bool, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if err := checkReason(reason); err != nil {
			return err
		}
		evicted, err = call[bool](ctx, in, statements.EvictLease, key, id, token, reason)
		return err
	})
	return evicted && err == nil, err
}

// EvictAdvisory asks the session of process pid to give up an advisory lock, until it has,
// and reports whether it held it. After 5 s, and when ctx ends, the error matches
// lockerr.ErrStillHeld.
func (m *Monitor) EvictAdvisory(ctx context.Context, key string, shared bool, pid int32, reason string) (evicted bool, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if err := checkReason(reason); err != nil {
			return err
		}
		if pid == 0 {
			return fmt.Errorf("a prepared transaction holds the lock, and has no session; end it with COMMIT PREPARED or ROLLBACK PREPARED: %w", errors.ErrUnsupported)
		}
		if m.internal(key) {
			return fmt.Errorf("%w (%s); evict the holder of the lock that it guards, or end the session with Monitor.Terminate", lockerr.ErrInternalLock, lockkey.Identify(key).OwnLabel(shared))
		}
		evicted, err = in.evictSession(ctx, key, pid, reason)
		return err
	})
	return evicted && err == nil, err
}

// internal reports whether a key is one of pgxlock's own. One that has a name is a user's.
func (m *Monitor) internal(key string) bool {
	_, raw := lockkey.ParseRaw(key)
	return raw && lockkey.Identify(key).IsOwn() && !slices.Contains(m.Config.Names, key)
}

// evictSession asks until the session no longer holds the lock.
func (in *inspection) evictSession(ctx context.Context, key string, pid int32, reason string) (asked bool, err error) {
	id := lockkey.Identify(key)
	patient, cancel := context.WithTimeout(ctx, evictPatience)
	defer cancel()
	for {
		holds, err := call[bool](ctx, in, statements.EvictAdvisory, pid, id.Number, reason, id.Space())
		switch {
		case err != nil:
			return false, err
		case !holds:
			return asked, nil
		}
		asked = true
		if !clock.Sleep(patient, askEvery) {
			return false, errors.Join(fmt.Errorf("%w: process %d has not released it; Monitor.Terminate ends its session and frees all its advisory locks", lockerr.ErrStillHeld, pid), lockerr.ContextError(ctx))
		}
	}
}

// A Session is a pgxlock.Session.
type Session struct {
	Application, Role, Client string
	Holders                   []*Holder
	Waiters                   []Waiter
	Started                   int64 // when it began, as sql/conn/backend.sql has it; 0: this role may not see it
}

// Session returns the session of process pid. If there is none, the error matches
// pgx.ErrNoRows.
func (m *Monitor) Session(ctx context.Context, pid int32) (Session, error) {
	var found Session
	err := m.inspect(ctx, Filter{Kind: KindAdvisory}, "", func(in *inspection) error {
		locks, err := in.advisory(ctx)
		if err != nil {
			return err
		}
		found.Holders = slices.DeleteFunc(locks.holders, func(h *Holder) bool { return h.PID != pid })
		for _, w := range locks.waiters {
			if w.PID == pid {
				found.Waiters = append(found.Waiters, w)
			}
		}
		lives := false
		err = in.read(ctx, statements.MonitorSession, []any{&found.Started, &found.Application, &found.Role, &found.Client}, func() { lives = true }, pid)
		if err == nil && !lives {
			return fmt.Errorf("this database has no session with process %d: %w", pid, pgx.ErrNoRows)
		}
		return err
	})
	sortHolders(found.Holders)
	sortWaiters(found.Waiters)
	return found, err
}

// Terminate ends the session of process pid that began at started, after it has recorded the
// eviction for each of keys. It reports whether there was such a session.
func (m *Monitor) Terminate(ctx context.Context, pid int32, started int64, keys []string, reason string) (terminated bool, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if started == 0 {
			return fmt.Errorf("role %q may not see when the session of process %d began, which tells it from a later session with that process id; GRANT pg_monitor TO the role", in.conn.Config().User, pid)
		}
		if err := checkReason(reason); err != nil {
			return err
		}
		if in.schema != "" {
			for _, key := range keys {
				if m.internal(key) {
					continue // no caller's hold
				}
				id := lockkey.Identify(key)
				if _, err := call[bool](ctx, in, statements.EvictAdvisory, pid, id.Number, "the session was ended: "+reason, id.Space()); err != nil {
					return err
				}
			}
		}
		// The statement waits for up to a second.
		for range 5 {
			ended, err := pgx.CollectExactlyOneRow(in.ask(ctx, statements.MonitorReadWrite, statements.EvictTerminate, pid, started), pgx.RowTo[bool])
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
		return fmt.Errorf("process %d was asked to end, but is still running", pid)
	})
	return terminated, err
}

// maxReason is the longest reason, in bytes. It leaves room for the words that Terminate
// puts before it.
const maxReason = 900

func checkReason(reason string) error {
	if reason == "" || len(reason) > maxReason {
		return fmt.Errorf("the reason has %d bytes, it must have 1 to %d: it is shown to the holder and recorded", len(reason), maxReason)
	}
	return nil
}

// Reap removes leases, permits and shares that expired longer ago than age, and returns how
// many.
func (m *Monitor) Reap(ctx context.Context, age time.Duration) (removed int64, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if age < 0 {
			return fmt.Errorf("age is %s, it must be 0 or more", age)
		}
		for _, what := range []statements.Name{statements.LeaseReapOlder, statements.LeaseReapOlderShared} {
			for n := int64(reapStep); n == reapStep; removed += n {
				var err error
				if n, err = call[int64](ctx, in, what, age.Seconds(), reapStep); err != nil {
					return err
				}
			}
		}
		return nil
	})
	return removed, err
}

// call runs a statement that calls a function of the schema, in a transaction that may
// write. Without an installation it returns why there is none.
func call[T any](ctx context.Context, in *inspection, name statements.Name, args ...any) (result T, err error) {
	if in.absent != nil {
		return result, in.absent
	}
	return pgx.CollectExactlyOneRow(in.ask(ctx, statements.MonitorReadWrite, name, args...), pgx.RowTo[T])
}
