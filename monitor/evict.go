package monitor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/observe"
	"github.com/pgxlock/pgxlock/sql"
)

// The errors of [Monitor.Evict], for errors.Is.
var (
	// ErrStillHeld: the session that holds the advisory lock was asked to release it, and
	// has not.
	ErrStillHeld = errors.New("pgxlock: still held after an eviction request")

	// ErrInternalLock: the advisory lock is one of pgxlock's own, from which nobody can be
	// evicted.
	ErrInternalLock = errors.New("pgxlock: this is an internal lock of pgxlock")
)

const (
	// evictPatience is how long Evict waits for a session to release an advisory lock.
	evictPatience = 5 * time.Second

	// askEvery is how often it asks the session, and checks whether it has.
	askEvery = 250 * time.Millisecond

	// lastWord is how long Terminate waits for a session to release what it ends, so that the
	// holders in a Locker learn who ended it, and why.
	lastWord = time.Second

	// reapStep is how many leases, and how many shares, one transaction removes at most.
	reapStep = 1000
)

// Evict takes a lock away from a holder that [Monitor.Holders], [Monitor.Expired] or a
// [Snapshot] returned, and records who did it, when, and why. It reports whether h held the
// lock: if h is no longer the holder, nothing happens. The reason has 1 to 900 bytes, and
// is in the error that the holder receives.
//
// For a lease, a permit or a share, exactly that acquisition ends, and others may acquire
// the lock at once. The holder notices at its next renewal, within a third of its TTL, by
// an error that matches [pgxlock.ErrLost] and [pgxlock.ErrEvicted]. Until then it believes
// that it holds the lock. Its writes under [pgxlock.Lock.Fence] are refused from now on, and
// so is its token where a resource compares tokens, but nothing else is. A transaction that
// it has already fenced may still commit, and nobody else acquires the lock before that
// transaction has ended.
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
// Evict needs the migrations ([pgxlock.ErrSchema]) and a role of the kind administration.
func (m *Monitor) Evict(ctx context.Context, h pgxlock.Holder, reason string) (evicted bool, err error) {
	key := h.LockKey()
	if err := missing(ctx, m); err != nil {
		return false, fail("evict", key, h.Kind, err)
	}
	began := time.Now()
	switch h.Kind {
	case pgxlock.KindLease:
		evicted, err = m.evictLease(ctx, h, reason)
	case pgxlock.KindAdvisory:
		evicted, err = m.evictAdvisory(ctx, key, h.Mode == pgxlock.Shared, h.PID, reason)
	default:
		err = fmt.Errorf("Holder.Kind is %v; only leases and advisory locks can be evicted: %w", h.Kind, errors.ErrUnsupported)
	}
	err = fail("evict", key, h.Kind, err)
	m.evicted(ctx, began, reason, evicted, err, h)
	return evicted, err
}

// evicted calls Observe for each holder that a call was to evict.
func (m *Monitor) evicted(ctx context.Context, began time.Time, reason string, evicted bool, err error, holders ...pgxlock.Holder) {
	if m.cfg.Observe == nil {
		return
	}
	now, call := time.Now(), observe.Call()
	for _, h := range holders {
		m.cfg.Observe(ctx, pgxlock.Event{Op: pgxlock.EventEvicted, Time: now, Key: h.LockKey(), Kind: h.Kind, Mode: h.Mode, Call: call, Token: h.Token, Holder: h.ID, Wait: now.Sub(began), Granted: evicted, EvictionReason: reason, Err: err})
	}
}

// evictLease ends the hold of a lease, a permit or a share, and reports whether there was one.
func (m *Monitor) evictLease(ctx context.Context, h pgxlock.Holder, reason string) (evicted bool, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if err := checkReason(reason); err != nil {
			return err
		}
		evicted, err = call[bool](ctx, in, statements.EvictLease, h.Key, h.ID, h.Token, reason)
		return err
	})
	return evicted && err == nil, err
}

// evictAdvisory asks the session of process pid to give up an advisory lock, until it has,
// and reports whether it held it. After 5 s, and when ctx ends, the error matches
// ErrStillHeld.
func (m *Monitor) evictAdvisory(ctx context.Context, key string, shared bool, pid int32, reason string) (evicted bool, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if err := checkReason(reason); err != nil {
			return err
		}
		if pid == 0 {
			return fmt.Errorf("a prepared transaction holds the lock, and has no session; end it with COMMIT PREPARED or ROLLBACK PREPARED: %w", errors.ErrUnsupported)
		}
		if m.internal(key) {
			return fmt.Errorf("%w (%s); evict the holder of the lock that it guards, or end the session with Monitor.Terminate", ErrInternalLock, lockkey.Identify(key).OwnLabel(shared))
		}
		evicted, err = in.evictSession(ctx, key, pid, reason, evictPatience)
		return err
	})
	return evicted && err == nil, err
}

// internal reports whether a key is one of pgxlock's own. One that has a name is a user's.
func (m *Monitor) internal(key string) bool {
	return lockkey.IsNumber(key) && lockkey.Identify(key).IsOwn() && !slices.Contains(m.cfg.Names, key)
}

// evictSession asks until the session no longer holds the lock, at least once.
func (in *inspection) evictSession(ctx context.Context, key string, pid int32, reason string, patience time.Duration) (asked bool, err error) {
	id := lockkey.Identify(key)
	var name *string // for the record, where Lockers forget it
	if !lockkey.IsNumber(key) {
		text, _ := lockkey.Split(key)
		name = &text
	}
	patient, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		holds, err := call[bool](ctx, in, statements.EvictAdvisory, pid, id.Number, reason, id.Space(), name)
		switch {
		case err != nil:
			return false, err
		case !holds:
			return asked, nil
		}
		asked = true
		if !clock.Sleep(patient, askEvery) {
			return false, errors.Join(fmt.Errorf("%w: process %d has not released it; Monitor.Terminate ends its session and frees all its advisory locks", ErrStillHeld, pid), lockerr.ContextError(ctx))
		}
	}
}

// A Session is a connection to the server, with all advisory locks that it holds or waits
// for; they end with it. It includes pgxlock's own locks only with [Config].Internal.
type Session struct {
	PID                       int32
	Application, Role, Client string
	Holders                   []pgxlock.Holder
	Waiters                   []Waiter

	started int64 // when it began, as sql/conn/backend.sql has it; 0: unknown
}

// Session returns the session of the server process pid, so that it can be shown before it
// is ended. If the session has ended, the error matches pgx.ErrNoRows.
func (m *Monitor) Session(ctx context.Context, pid int32) (Session, error) {
	found := Session{PID: pid}
	err := m.inspect(ctx, Filter{Kind: pgxlock.KindAdvisory}, "", func(in *inspection) error {
		locks, err := in.advisory(ctx)
		if err != nil {
			return err
		}
		found.Holders = sorted(slices.DeleteFunc(locks.holders, func(h *pgxlock.Holder) bool { return h.PID != pid }))
		found.Waiters = slices.DeleteFunc(locks.waiters, func(w Waiter) bool { return w.PID != pid })
		sortWaiters(found.Waiters)
		lives := false
		err = in.read(ctx, statements.MonitorSession, []any{&found.started, &found.Application, &found.Role, &found.Client}, func() { lives = true }, pid)
		if err == nil && !lives {
			return fmt.Errorf("this database has no session with process %d: %w", pid, pgx.ErrNoRows)
		}
		return err
	})
	return found, fail("session", "", pgxlock.KindAdvisory, err)
}

// Terminate ends a session that [Monitor.Session] returned. All advisory locks that it
// holds become free, including any acquired since. Before that the session has a second to
// release what Session returned, as for [Monitor.Evict]; holders in a Locker that does not
// answer notice as after a broken connection. It is the last resort after [ErrStillHeld].
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
		return false, fail("terminate", "", pgxlock.KindAdvisory, err)
	}
	began := time.Now()
	terminated, err = m.terminate(ctx, session, reason)
	err = fail("terminate", "", pgxlock.KindAdvisory, err)
	m.evicted(ctx, began, reason, terminated, err, session.Holders...)
	return terminated, err
}

// terminate ends the session, after it has recorded the eviction for each lock that it holds.
func (m *Monitor) terminate(ctx context.Context, session Session, reason string) (terminated bool, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if session.started == 0 {
			role := in.role(ctx)
			return mayNotEnd(role, fmt.Errorf("role %q may not see when the session of process %d began, which tells it from a later session with that process id", role, session.PID))
		}
		if err := checkReason(reason); err != nil {
			return err
		}
		if in.schema != "" {
			held := slices.DeleteFunc(slices.Clone(session.Holders), func(h pgxlock.Holder) bool { return m.internal(h.LockKey()) }) // no caller's
			for i, h := range held {
				patience := time.Duration(0)
				if i == len(held)-1 { // a Locker that answers releases all of them at once
					patience = lastWord
				}
				terminated, err = in.evictSession(ctx, h.LockKey(), session.PID, "the session was ended: "+reason, patience) // a session that has released all may end
				if err != nil && !errors.Is(err, ErrStillHeld) {
					return err
				}
			}
		}
		// The statement waits for up to a second.
		for range 5 {
			ended, err := pgx.CollectExactlyOneRow(in.ask(ctx, statements.ConnReadWrite, statements.EvictTerminate, session.PID, session.started), pgx.RowTo[bool])
			switch {
			case errors.Is(err, pgx.ErrNoRows): // by now, or before
				return nil
			case lockerr.SQLState(err) == lockerr.StateNoRights:
				return mayNotEnd(in.role(ctx), err)
			case err != nil:
				return err
			}
			if terminated = true; ended {
				return nil
			}
		}
		return fmt.Errorf("process %d was asked to end, but is still running", session.PID)
	})
	return terminated && err == nil, err
}

// mayNotEnd adds to an error what lets a role end sessions of others.
func mayNotEnd(role string, err error) error {
	return &lockerr.RefusedError{Err: err, Lack: "GRANT pg_monitor, pg_signal_backend TO " + pgx.Identifier{role}.Sanitize() +
		"; a superuser's session is ended only by a superuser"}
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
// many. It is housekeeping: no acquire needs it, and tokens do not depend on it. Lockers
// reap what expired more than an hour ago.
func (m *Monitor) Reap(ctx context.Context, age time.Duration) (removed int64, err error) {
	err = m.inspect(ctx, Filter{}, "", func(in *inspection) error {
		if age < 0 {
			return fmt.Errorf("age is %s, it must be 0 or more", age)
		}
		for n := int64(reapStep); n >= reapStep; removed += n {
			var err error
			if n, err = call[int64](ctx, in, statements.LeaseReap, age.Seconds(), reapStep); err != nil {
				return err
			}
		}
		return nil
	})
	return removed, fail("reap", "", pgxlock.KindLease, err)
}

// call runs a statement that calls a function of the schema, in a transaction that may
// write. Without an installation it returns why there is none.
func call[T any](ctx context.Context, in *inspection, name statements.Name, args ...any) (result T, err error) {
	if in.absent != nil {
		return result, in.absent
	}
	return pgx.CollectExactlyOneRow(in.ask(ctx, statements.ConnReadWrite, name, args...), pgx.RowTo[T])
}
