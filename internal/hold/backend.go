package hold

import (
	"context"
	"log/slog"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Mode says which other holds of the same lock a hold excludes.
type Mode uint8

// The modes of a hold.
const (
	Exclusive Mode = iota
	Shared
)

// A Turn is the queue position that a try carries.
type Turn struct {
	// Ticket is the number of the ticket for the first of the keys; 0: there is none.
	Ticket int64

	// First: no ticket was seen before it.
	First bool

	// Handed: the lock was left to this try, by HandOver or by a reader before it. The try passes callers
	// that wait elsewhere, and first finishes the Release, if there is one.
	Handed  bool
	Release Release

	// SkipQueue: the try passes callers that wait.
	SkipQueue bool
}

// Passes reports whether the try may have a lock that is left to callers elsewhere.
func (t Turn) Passes() bool { return t.First || t.Handed || t.SkipQueue }

// A Release is one that the next caller's try finishes. Return is called, with the mutex of the queue
// locked, if that caller leaves without a try.
type Release interface{ Return() }

// A Request is what a try asks for, beside the keys.
type Request struct {
	Mode     Mode
	TTL      time.Duration
	Metadata *string // JSON
	Permits  int     // how many the semaphore has; 0: the request is for the lock itself
	Together int     // how many of them are wanted, all or none
	Turn     Turn
}

// An Attempt is a hold that is asked for, and why it was not granted; nil: it was.
type Attempt struct {
	Hold *Hold
	Err  error
}

// A Tx is the caller's transaction that Fence protects.
type Tx interface {
	// Run runs a statement, given as its text, and returns how many rows it yields.
	Run(ctx context.Context, text string, args ...any) (rows int64, err error)

	// Database names the database; empty: it is not known.
	Database() string
}

// A Backend makes the holds of one kind of Locker. It owns the traffic with the server, and
// none of that runs under a caller's context: ctx ends the wait for an answer, never a
// statement that was sent.
type Backend interface {
	// Try asks once for each of the holds, in one go where all are free. The error of one is
	// a *Busy if another caller has the lock, and the cause of ctx if the answer did not
	// arrive before ctx ended; a grant that it still brings is released then. Permits are
	// granted to all of the holds, or to none.
	Try(ctx context.Context, r Request, attempts []Attempt)

	// Keep renews the hold automatically until Drop, which is called with h.mu locked. Renew
	// renews it now.
	Keep(h *Hold)
	Drop(h *Hold, lost bool)
	Renew(ctx context.Context, h *Hold) error

	// Change renews the hold now, with another TTL unless ttl is 0, and other metadata unless
	// that is nil.
	Change(ctx context.Context, h *Hold, ttl time.Duration, metadata *string) error

	// Release releases the lock. It returns ErrLost if it was taken away.
	Release(h *Hold) error

	// Share makes another hold, which shares the lock, of one that has ended and had it exclusively:
	// there is no moment in which a third could acquire it exclusively. If it fails, nothing of
	// both is left.
	Share(from, to *Hold) error

	// Discard removes, in the background, what may be left of the hold.
	Discard(h *Hold)

	// Fence pins the hold for a transaction.
	Fence(ctx context.Context, tx Tx, h *Hold) error

	// ID returns the id by which other processes know the hold; empty: none.
	ID(h *Hold) string

	// Holders returns the current holders of the keys.
	Holders(ctx context.Context, keys []string) ([]Holder, error)

	// Close ends the traffic, renewals included, after what is in flight, but not later than
	// ctx.
	Close(ctx context.Context) error
}

// A Host is the services of a Locker for its backend.
type Host struct {
	Clock   clock.Clock
	Log     *slog.Logger
	Closing context.Context // ends when the Locker is being closed: callers do not wait any longer
	Queue   Queue
}

// A LocalQueue is the callers of a Locker that wait.
type LocalQueue interface {
	// Freed wakes the first caller that waits for the lock, which may be free. It reports
	// whether a ticket of theirs decides when they try: then the release has to be followed
	// by a Wake. A mutex of the backend may be held: it comes before those of the queue.
	Freed(name lockkey.Name) (queued bool)
}

// A Queue is also the tickets of those callers among those of other processes.
type Queue interface {
	LocalQueue

	// Wake wakes, in the background, the first ticket for each of the locks. WakeOn returns
	// when they are woken, on the connection of run.
	Wake(names []lockkey.Name)
	WakeOn(run func(dbconn.Exchange) error, names []lockkey.Name)

	// HandOver leaves a lock that is being released to the caller here that is next, if it comes
	// before those elsewhere, and reports whether there is one. Then neither Freed nor Wake follows.
	// Its try finishes the release, unless that is nil. A mutex of the backend may be held.
	HandOver(name lockkey.Name, release Release) bool

	// Contended reports whether other processes were seen lately to have an advisory lock, or
	// to wait for it. A mutex of the backend may be held.
	Contended(name lockkey.Name) bool

	// WaitedFor reports for which of the locks others have a ticket; for none when ctx ends or
	// the Locker is closed.
	WaitedFor(ctx context.Context, names []lockkey.Name) []bool

	// Listen receives the notifications that are for the session of advisory locks with this
	// server process.
	Listen(pid int32)

	// Reap removes tickets of processes that died. Close ends the traffic of the queue, which
	// uses a connection of the backend, after the last call has ended.
	Reap() error
	Close()
}

// A Holder is what a backend knows of a holder of a lock.
type Holder struct {
	Key          string
	Mode         Mode
	ID, Metadata string
	Token        int64
	PID          int32
	Since        time.Time
	Expires      time.Time
}

// An Owner made a hold, and is notified of its end. Ended and Renewed are called with h.mu
// held, and must neither block nor call methods of the hold.
type Owner interface {
	// Ended returns the error that the hold reports from now on. until is the local deadline.
	Ended(why error, until time.Duration) error

	// Renewed reports a renewal: nil if it succeeded, otherwise why it failed. A renewal that
	// failed is tried again.
	Renewed(err error)

	// Close releases the lock, unless it is still in use, because the Locker is closed.
	Close(ctx context.Context) error
}

// A Busy is the error of a try that found another holder, or callers that come first.
type Busy struct {
	Holder    string
	Remaining time.Duration // how long the holder's lease lasts, unless it is renewed
	Here      bool          // a hold of the same Locker is in the way, so that its end is announced
	Wanted    bool          // other processes wait for the lock as well
	Left      bool          // the lock is left to other processes, which are woken; the server was not asked
	Soon      bool          // it is worth trying again soon, even without a release
	Ended     error         // the context's error, if that ended the wait
}

func (b *Busy) Error() string {
	if b.Ended == nil {
		return lockerr.ErrNotAcquired.Error()
	}
	return lockerr.ErrNotAcquired.Error() + ": " + b.Ended.Error()
}

// Unwrap returns ErrNotAcquired, and the error that ended the wait.
func (b *Busy) Unwrap() []error {
	if b.Ended == nil {
		return []error{lockerr.ErrNotAcquired}
	}
	return []error{lockerr.ErrNotAcquired, b.Ended}
}
