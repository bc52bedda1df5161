package advisory

import (
	"fmt"
	"slices"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// When the lock session ends, first its locks are lost here, so that their holders are notified
// before another process can be granted one of them; then the connection is closed.

// end ends the session. A call without an answer is sent once more in the next session, unless
// it is bound to this one.
//
// lost is called first: before the server learns that the locks are free, and so that every
// call about a lock of this session is in the queue by then and fails with the session.
func (m *mux) end(why error) {
	m.lost(why)
	m.mu.Lock()
	conn := m.conn
	m.conn = nil
	waiting := m.queue
	m.queue = nil
	var failed []*call
	for i, c := range slices.Concat(m.batch, waiting) {
		if c.bound || c.retried {
			failed = append(failed, c)
			continue
		}
		c.retried = i < len(m.batch)
		m.queue = append(m.queue, c)
		m.timeLocked(c)
	}
	m.batch = nil
	m.dismissLocked(m.queue)
	m.mu.Unlock()
	conn.close()
	for _, c := range failed {
		c.settle(fmt.Errorf("%w: %w", lockerr.ErrSessionEnded, why), m.now())
	}
}

// lost ends all locks of a session that has ended.
func (a *Locks) lost(why error) {
	locks := a.all()
	a.mu.Lock()
	for _, e := range a.held {
		if e.granted {
			a.removeLocked(e)
			e.failed = lockerr.ErrSessionEnded
		}
	}
	a.mu.Unlock()
	for _, lock := range locks {
		_ = lock.Lose(why)
	}
	if len(locks) > 0 {
		a.host.Log.Warn("pgxlock: the session of advisory locks has ended", "locks", len(locks), "error", why)
	}
}

// moved ends the lock session if it is on another cluster than the last connection. Where that is the
// lock session's own, the one before has ended.
func (a *Locks) moved(was, is int64) {
	a.host.Log.Warn("pgxlock: all advisory locks are lost", "error", dbconn.ErrMoved(was, is))
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.end != nil {
		a.end()
	}
}
