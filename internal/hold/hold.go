package hold

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/oneline"
)

// A Hold is one acquisition of a lock, with its local deadline and its end. Its owner
// contains it by value, and calls Group.Begin before anything else.
type Hold struct {
	// These are constant from the grant on, except for Changed, and the backend's until then.
	Key    string
	Queue  lockkey.Name // wait name: the semaphore's for a permit, otherwise the key's
	Holder string       // unique to this acquisition, or to the session of advisory locks
	TTL    time.Duration
	Margin time.Duration // by how much the local deadline is earlier than the server's
	Mode   Mode
	Token  int64
	Since  time.Time // the grant by our clock, where the server's time is unknown
	Waited bool      // the caller had to queue, so others probably queue as well

	owner Owner
	group *Group

	mu       sync.Mutex
	deadline time.Duration // on the Group's clock; the lock is lost after it
	ended    error         // why it is not held any more; nil while it is
	closing  error         // why its contexts end while it is held
	contexts map[*holdContext]struct{}
	ending   []func()      // cancel functions of contexts, for unlock to call
	lost     chan struct{} // closed when the lock is lost; nil until the first call of Lost
}

// forever is the deadline of a hold without a TTL.
const forever = time.Duration(math.MaxInt64)

// Group returns the group that the hold belongs to.
func (h *Hold) Group() *Group { return h.group }

// Err returns nil while the lock is held, and afterwards why it is not.
func (h *Hold) Err() error {
	h.mu.Lock()
	defer h.unlock()
	return h.checkLocked(h.group.Clock())
}

// Lost returns a channel that is closed when the lock is lost.
func (h *Hold) Lost() <-chan struct{} {
	h.mu.Lock()
	defer h.unlock()
	if h.lost == nil {
		h.lost = make(chan struct{})
		if errors.Is(h.ended, lockerr.ErrLost) {
			close(h.lost)
		}
	}
	return h.lost
}

// Lasts returns the TTL, which Changed may change.
func (h *Hold) Lasts() time.Duration {
	h.mu.Lock()
	defer h.unlock()
	return h.TTL
}

// Deadline returns the local deadline as a local time; ok is false without a TTL. It reads the
// local time before the Group's clock: if the process is frozen between the two, the deadline
// is too early, and never too late.
func (h *Hold) Deadline() (t time.Time, ok bool) {
	now := time.Now()
	until, _ := h.Ended()
	if until == forever {
		return time.Time{}, false
	}
	return now.Add(until - h.group.Clock()), true
}

// Close releases the lock, unless it is still in use, because its Locker is closed.
func (h *Hold) Close(ctx context.Context) error { return h.owner.Close(ctx) }

// ID returns the id by which other processes know the hold; empty: none.
func (h *Hold) ID() string { return h.group.Backend.ID(h) }

// Granted records the answer to a request. It returns false if the answer came so late that
// the local deadline has passed. sent is the time before the request, and now the time after
// the answer.
func (h *Hold) Granted(token int64, sent, now time.Duration) bool {
	h.mu.Lock()
	defer h.unlock()
	h.Token = token
	h.deadline = h.deadlineAfter(sent)
	return now < h.deadline
}

// deadlineAfter returns the local deadline after a successful request.
func (h *Hold) deadlineAfter(sent time.Duration) time.Duration {
	if h.TTL == 0 {
		return forever
	}
	return sent + h.TTL - h.Margin
}

// Admit starts the hold: from now on the backend renews it, and the Group watches it.
func (h *Hold) Admit() error {
	h.mu.Lock()
	defer h.unlock()
	now := h.group.Clock()
	if err := h.checkLocked(now); err != nil {
		return err
	}
	h.group.add(h, h.patienceLocked(now), now)
	h.group.Backend.Keep(h)
	return nil
}

// Renewed moves the deadline, unless it has passed: a lock that was once reported as lost
// stays lost.
func (h *Hold) Renewed(sent time.Duration) error {
	h.mu.Lock()
	defer h.unlock()
	if err := h.checkLocked(h.group.Clock()); err != nil {
		return err
	}
	if until := h.deadlineAfter(sent); until > h.deadline {
		h.deadline = until
		h.owner.Renewed(nil)
	}
	return nil
}

// Changing is called before each request that changes the TTL, for a renewal at sent. From then on
// the server may know the new one: the deadline is that of the shorter one until a request is
// answered, this one or a later renewal.
func (h *Hold) Changing(ttl, margin, sent time.Duration) error {
	h.mu.Lock()
	defer h.unlock()
	now := h.group.Clock()
	if err := h.checkLocked(now); err != nil {
		return err
	}
	h.deadline = min(h.deadline, sent+ttl-margin)
	h.group.add(h, h.patienceLocked(now), now)
	return nil
}

// Changed records that the request at sent has changed the TTL, and so renewed the lock. No
// renewal that was sent before may be recorded after it.
func (h *Hold) Changed(ttl, margin, sent time.Duration) error {
	h.mu.Lock()
	defer h.unlock()
	now := h.group.Clock()
	if err := h.checkLocked(now); err != nil {
		return err
	}
	h.owner.Renewed(nil) // whether it is late goes by the TTL until now
	h.group.Backend.Drop(h, false)
	h.TTL, h.Margin, h.deadline = ttl, margin, sent+ttl-margin
	if err := h.checkLocked(now); err != nil {
		return err
	}
	h.group.add(h, h.patienceLocked(now), now)
	h.group.Backend.Keep(h)
	return nil
}

// NotRenewed records a renewal that failed and is tried again.
func (h *Hold) NotRenewed(err error) {
	h.mu.Lock()
	defer h.unlock()
	if h.ended == nil {
		h.owner.Renewed(err)
	}
}

// Lose ends the hold because of what the server said.
func (h *Hold) Lose(why error) error {
	h.mu.Lock()
	defer h.unlock()
	if err := h.checkLocked(h.group.Clock()); err != nil {
		return err
	}
	h.finishLocked(&LostError{why})
	return h.ended
}

// End ends the hold for its owner. It returns why the lock was lost, if it was lost before.
func (h *Hold) End(why error) (lost error) {
	h.mu.Lock()
	defer h.unlock()
	if lost := h.checkLocked(h.group.Clock()); lost != nil {
		return lost
	}
	h.finishLocked(why)
	return nil
}

// Ended returns the local deadline on the Group's clock, and why the hold has ended; nil: it has
// not, as far as is known without reading the clock.
func (h *Hold) Ended() (until time.Duration, why error) {
	h.mu.Lock()
	defer h.unlock()
	return h.deadline, h.ended
}

// ErrLateGrant means that the grant took longer to arrive than it lasts.
var ErrLateGrant = errors.New("the grant arrived after its deadline and was released")

// ErrTakenAway means that another caller has the lease, or that there is no lease.
var ErrTakenAway = errors.New("the server says that the lease expired, was released or was taken over")

var errDeadlinePassed = errors.New("the lock was not renewed before its deadline")

// A LostError is ErrLost, and why.
type LostError struct{ Why error }

func (e *LostError) Error() string {
	return lockerr.ErrLost.Error() + ": " + oneline.Join(e.Why.Error())
}

// Unwrap returns ErrLost, and why.
func (e *LostError) Unwrap() []error { return []error{lockerr.ErrLost, e.Why} }

// checkLocked reads the clock, and returns why the lock is no longer held, or nil.
func (h *Hold) checkLocked(now time.Duration) error {
	if h.ended == nil && now >= h.deadline {
		h.finishLocked(&LostError{errDeadlinePassed})
	}
	return h.ended
}

func (h *Hold) finishLocked(why error) {
	lost := errors.Is(why, lockerr.ErrLost)
	if lost && h.lost != nil {
		close(h.lost)
	}
	h.ended = h.owner.Ended(why, h.deadline)
	h.cancelContextsLocked(h.ended)
	h.group.forget(h)
	h.group.Backend.Drop(h, lost)
}

// patienceLocked returns how long the Group's timer may leave the hold unchecked.
func (h *Hold) patienceLocked(now time.Duration) time.Duration {
	if h.deadline == forever {
		return forever
	}
	return max(min(h.Margin/2, h.deadline-now), 0)
}

// unlock unlocks h.mu and then ends contexts: ending a context calls methods of its parents,
// which are the caller's and may check this hold.
func (h *Hold) unlock() {
	ending := h.ending
	h.ending = nil
	h.mu.Unlock()
	for _, end := range ending {
		end()
	}
}
