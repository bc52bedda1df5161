// Package advisory makes advisory locks: PostgreSQL's session-level ones, which the server
// frees when the session that has them ends.
//
// One connection, the lock session, has all advisory locks of a Locker. Its callers share it
// through a mux without a goroutine in between: the caller that leads sends the requests of
// all, and reads the answers. Because the server grants a lock again to the session that has
// it, Locks keeps an entry for each lock that the session has or requests, and refuses here
// what another hold of the Locker excludes.
//
// A call of the mux:
//
//	submit ─┬▶ queued ─┬▶ settled: another leader has read its answer, or it has failed
//	        │          ├▶ left: its caller's context has ended, or the Locker is being closed;
//	        │          │        what the answer grants goes to the callers that wait for the
//	        │          │        same lock, and is released if there are none
//	        │          ▼
//	        └───────▶ leads ─┬▶ settled: its caller has read the answer, and hands the lead on
//	                         ├▶ left: a goroutine reads the rest of the answer
//	                         └▶ queued: the session has ended, and the call waits for the next one
//
// The lock session:
//
//	none ──call──▶ connecting ──▶ alive ──────────────▶ ended ──▶ none
//	                    │          led by callers; 2 ms  1. the holds are lost
//	                    │          after the last call,  2. the connection is closed
//	                    ▼          a goroutine reads,    3. calls without an answer are sent once
//	              queued calls     and pings after a        more in the next session, and fail
//	              fail             third of the TTL         if they are bound to this one
//
// An attempt to connect lasts as long as dbconn.Dialer.Dial says, and outlives the callers that
// wait for it. They leave when their contexts end, and brief ones after dbconn.Timeout.
//
// While the session is alive, its answers move the deadlines of all holds, at most once in a
// quarter of the TTL, counted from before the message was sent. A message is never sent when
// the server may have ended the session already: the session ends instead, and the holds with
// it.
//
// Lock order: Hold.mu, Locks.mu, then mux.mu or the mutexes of the queue.
package advisory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Config configures Locks. Its fields are those of pgxlock.AdvisoryConfig, with the defaults
// filled in.
type Config struct {
	Owner, Schema string
	Namespace     string        // of the keys; "": none
	TTL           time.Duration // not positive: there is no bound
	MaxLocks      int           // 0: a part of the server's lock table, at most defaultMaxLocks
	Tokens        bool
	SessionPooler bool
}

// defaultMaxLocks is the default for MaxLocks on a large server.
const defaultMaxLocks = 2048

// leastQueueIdle keeps the connection of the queue open between two checks of a waiter, even if
// MaxConnIdleTime is shorter.
const leastQueueIdle = 2 * clock.CheckInterval

// Locks implements [hold.Backend] with advisory locks. It records which locks its session has
// or requests, because the server does not exclude the callers of one session from each other:
// it grants a lock again to the session that has it.
type Locks struct {
	attempts    dbconn.Attempts // to connect the lock session
	host        hold.Host
	cfg         Config
	ttl, margin time.Duration // 0: there is no bound
	mux         *mux
	unfinished  dbconn.Backend      // the backend of the last connection
	place       dbconn.Installation // of the queue, if there is one, and of the rows of locks with Tokens
	queueing    *dbconn.Session     // the connection for the queue
	reaping     batcher.Housekeeping
	evicting    batcher.Batcher[struct{}]

	// mu guards what follows, and the entries. A caller that enters a request, or a release, keeps
	// it until the call is in the mux's queue, so that calls for one lock are sent in the order
	// of these changes.
	mu      sync.Mutex
	held    map[lockkey.ID]*entry
	known   lockkey.Known[lockkey.ID] // those in held, and those that were there until a moment ago
	room    int                       // how many entries there may be
	holder  string                    // the holder's name for locks of the present session
	pid     int32                     // the backend of that session
	session int64                     // the random number of that session
	end     func()                    // ends it, as a broken connection does; nil: there was none

	// yielded are locks that other processes waited for when this one released them: callers
	// here that have not queued leave the locks to them. wakes are locks that others waited for
	// when this process did not have them any more: one wake-up is enough.
	yielded, wakes turns
}

// New returns Locks whose connections are made as the configuration says. Call Use before the
// first try.
func New(connections *pgxpool.Config, cfg Config) *Locks {
	a := &Locks{cfg: cfg, room: cmp.Or(cfg.MaxLocks, defaultMaxLocks), held: make(map[lockkey.ID]*entry), yielded: make(turns), wakes: make(turns)}
	if cfg.TTL > 0 {
		a.ttl, a.margin = cfg.TTL, max(cfg.TTL/10, 100*time.Millisecond)
	}
	a.attempts.Dialer = dbconn.Dialer{Name: dbconn.ApplicationName(cfg.Owner), Config: connections}
	a.place = dbconn.Installation{Asked: cfg.Schema, Config: "AdvisoryConfig", Moved: a.moved}
	a.queueing = &dbconn.Session{Dialer: a.attempts.Dialer, Place: &a.place, Idle: max(connections.MaxConnIdleTime, leastQueueIdle)}
	a.evicting = batcher.Batcher[struct{}]{Limit: batcher.MaxRows, Run: a.lookEvicted}
	a.mux = &mux{
		connect: a.connect, ttl: a.ttl, margin: a.margin, alive: a.alive, lost: a.lost,
		gone: make(chan struct{}),
	}
	a.mux.connecting, a.mux.stop = context.WithCancel(context.Background())
	return a
}

// Use completes the Locks.
func (a *Locks) Use(host hold.Host) {
	a.host = host
	a.mux.clock = host.Clock
	context.AfterFunc(host.Closing, a.mux.dismissAll)
	a.reaping = batcher.Housekeeping{Reap: a.reap, Log: host.Log}
}

// Installation returns where the schema is.
func (a *Locks) Installation() *dbconn.Installation { return &a.place }

// Dialer returns how the connections are made.
func (a *Locks) Dialer() dbconn.Dialer { return a.attempts.Dialer }

// Do runs an exchange for the queue of waiters, on the connection for the queue.
func (a *Locks) Do(fn dbconn.Exchange) error { return a.queueing.DoWithin(dbconn.Timeout, fn) }

// Reached reports whether the last exchange for the queue got an answer.
func (a *Locks) Reached() bool { return a.queueing.Reached() }

// Keep implements [hold.Backend]. It does nothing: the mux's pings keep the session alive with
// all its locks.
func (a *Locks) Keep(*hold.Hold) {}

// Renew implements [hold.Backend]. Any answer of the session shows that it still has the lock.
func (a *Locks) Renew(ctx context.Context, lock *hold.Hold) error {
	c := &call{bound: true}
	if !a.mux.await(c, a.mux.submit(ctx, c)) {
		return lockerr.ContextError(ctx)
	}
	if c.err != nil {
		return cmp.Or(lock.Err(), c.err)
	}
	return lock.Renewed(c.sent)
}

// Change implements [hold.Backend].
func (a *Locks) Change(context.Context, *hold.Hold, time.Duration, *string) error {
	return fmt.Errorf("an advisory lock has neither a TTL nor metadata of its own: %w", errors.ErrUnsupported)
}

// Share implements [hold.Backend].
func (a *Locks) Share(_, _ *hold.Hold) error {
	return fmt.Errorf("an advisory lock cannot become shared: %w", errors.ErrUnsupported)
}

// alive moves the deadlines of all locks. The session was alive at sent.
func (a *Locks) alive(sent time.Duration) {
	for _, lock := range a.all() {
		_ = lock.Renewed(sent) // a lost lock stays lost
	}
}

// all returns the holds of all entries.
func (a *Locks) all() []*hold.Hold {
	a.mu.Lock()
	defer a.mu.Unlock()
	var locks []*hold.Hold
	for _, e := range a.held {
		locks = append(locks, e.holds...)
	}
	return locks
}

// Close implements [hold.Backend].
func (a *Locks) Close(ctx context.Context) error {
	a.reaping.Stop()
	err := batcher.Until(ctx, a.host.Queue.Close)
	err = cmp.Or(err, batcher.Until(ctx, func() { <-a.evicting.Done() }))
	a.queueing.Close()
	return cmp.Or(err, a.mux.close(ctx))
}
