// Package advisory makes advisory locks: PostgreSQL's session-level ones, all of a process on
// one connection.
package advisory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Config configures Locks. Its fields are those of pgxlock.AdvisoryConfig, with the defaults
// filled in.
type Config struct {
	Owner, Schema string
	TTL           time.Duration // not positive: there is no bound
	MaxLocks      int           // 0: a part of the server's lock table, at most defaultMaxLocks
	Tokens        bool
	SessionPooler bool
	Backoff       func(attempt int) time.Duration // between attempts to connect
}

// defaultMaxLocks is the default for MaxLocks on a large server.
const defaultMaxLocks = 2048

// leastQueueIdle keeps the connection of the queue open between two checks of a waiter, even if
// MaxConnIdleTime is shorter.
const leastQueueIdle = 2 * hold.CheckInterval

// Locks implements [hold.Backend] with advisory locks. It records which locks this process has
// or requests, because the server does not exclude the callers of one session from each other:
// it grants a lock again to the session that has it.
type Locks struct {
	dialer      dbconn.Dialer
	host        hold.Host
	cfg         Config
	ttl, margin time.Duration // 0: there is no bound
	mux         *mux
	unfinished  dbconn.Backend      // the backend of the last connection
	place       dbconn.Installation // of the queue, if there is one, and of the rows of locks with Tokens
	queueing    *dbconn.Session     // the connection for the queue
	reaping     batcher.Housekeeping
	evicting    batcher.Batcher[struct{}]

	// mu guards what follows, and the entries.
	mu      sync.Mutex
	held    map[lockkey.ID]*entry
	room    int    // how many entries there may be
	holder  string // the holder's name for locks of the present session
	pid     int32  // the backend of that session
	session int64  // the random number of that session

	// yields are locks that other processes waited for when this one released them: callers
	// here that have not queued leave the locks to them. vain are locks that others waited for
	// when this process did not have them any more: one wake-up is enough.
	yields, vain turns
}

// New returns Locks whose connections are made as the configuration says. Call Use before the
// first try.
func New(connections *pgxpool.Config, cfg Config) *Locks {
	a := &Locks{cfg: cfg, room: cmp.Or(cfg.MaxLocks, defaultMaxLocks), held: make(map[lockkey.ID]*entry), yields: make(turns), vain: make(turns)}
	if cfg.TTL > 0 {
		a.ttl, a.margin = cfg.TTL, max(cfg.TTL/10, 100*time.Millisecond)
	}
	a.dialer = dbconn.Dialer{Name: dbconn.ApplicationName(cfg.Owner), Config: connections}
	a.place = dbconn.Installation{Asked: cfg.Schema, Config: "AdvisoryConfig"}
	a.queueing = &dbconn.Session{Dialer: a.dialer, Place: &a.place, Idle: max(connections.MaxConnIdleTime, leastQueueIdle)}
	a.evicting = batcher.Batcher[struct{}]{Limit: hold.MaxTickets, Run: a.lookEvicted}
	a.mux = &mux{connect: a.connect, backoff: cfg.Backoff, ttl: a.ttl, margin: a.margin, alive: a.alive, lost: a.lost, gone: make(chan struct{})}
	return a
}

// Use completes the Locks.
func (a *Locks) Use(host hold.Host) {
	a.host = host
	a.mux.clock = host.Clock
	a.reaping = batcher.Housekeeping{Reap: a.reap, Log: host.Log}
}

// Installation returns where the schema is.
func (a *Locks) Installation() *dbconn.Installation { return &a.place }

// Dialer returns how the connections are made.
func (a *Locks) Dialer() dbconn.Dialer { return a.dialer }

// Do runs an exchange for the queue of waiters, on the connection for the queue.
func (a *Locks) Do(fn dbconn.Exchange) error { return a.queueing.Do(dbconn.Timeout, fn) }

// Reached reports whether the last exchange for the queue got an answer.
func (a *Locks) Reached() bool { return a.queueing.Reached() }

// entry is a lock that the lock session has or requests, for one or many holds.
type entry struct {
	id      lockkey.ID
	mode    hold.Mode
	granted bool
	token   int64        // of the grant: all holds that share the lock have this token
	failed  error        // why callers that wait for its answer fail
	locks   []*hold.Hold // one, or many that share the lock
	pending int          // callers whose answer has not arrived
	wanted  bool         // other processes wait for it
	named   time.Time    // when its name was published

	one  [1]*hold.Hold // room for locks
	back call          // the call that releases it
	ask1 [1]ask        // the request in back
}

// ask returns the request for the mode of the lock.
func (h *entry) ask(exclusive, shared lockkey.Ask) ask {
	if h.mode == hold.Shared {
		return ask{shared, h.id}
	}
	return ask{exclusive, h.id}
}

func (h *entry) try() ask    { return h.ask(lockkey.AskTry, lockkey.AskTryShared) }
func (h *entry) unlock() ask { return h.ask(lockkey.AskUnlock, lockkey.AskUnlockShared) }

// admits reports whether a hold of that mode may join the entry.
func (h *entry) admits(mode hold.Mode) bool {
	return mode == h.mode && (mode == hold.Shared || len(h.locks) == 0)
}

// unused reports whether the entry has no holds and no caller waits for its answer.
func (h *entry) unused() bool { return len(h.locks) == 0 && h.pending == 0 }

// request is one caller's request for some locks.
type request struct {
	call
	locks *Locks
	mode  hold.Mode
	turn  int64 // its ticket
	slots []slot
	got   []hold.Attempt // a copy for each slot

	// The request was refused only because of another caller's request for the same lock, so
	// that a second try may succeed. outdated: that request may have been refused before this
	// call began, or its lock was released or lost before this call could share it. leftover:
	// it was granted in another mode, and its caller has left.
	outdated, leftover bool

	oneAsk  [1]ask // most requests are for one lock: no allocation
	oneSlot [1]slot
	oneGot  [1]hold.Attempt
}

type slot struct {
	id      lockkey.ID
	entry   *entry // nil if the request was refused without asking the server
	granted bool   // by the server
	token   int64  // of the grant
	asks    bool   // it sends a request; otherwise it waits for the answer to an earlier one
}

// Try implements [hold.Backend].
func (a *Locks) Try(ctx context.Context, o hold.Request, attempts []hold.Attempt) {
	var behind []bool // waiters that a try for a shared lock must not pass
	if o.Mode == hold.Shared && o.Turn.SkipQueue {
		behind = a.waitedFor(ctx, attempts)
	}
	began := time.Now()
	for first := true; ; first = false {
		r := a.request(ctx, attempts, behind, o)
		again := r.leftover || first && r.outdated // a request that the second try meets was made during this call
		late := o.Turn.SkipQueue && time.Since(began) >= dbconn.Timeout
		if !again || late || r.why(ctx) != nil {
			return
		}
	}
}

// request tries once. behind says which of the locks others wait for; nil: none.
func (a *Locks) request(ctx context.Context, attempts []hold.Attempt, behind []bool, o hold.Request) (r *request) {
	r = &request{locks: a, mode: o.Mode, turn: o.Turn.Ticket}
	r.asker, r.closing = r, a.host.Closing
	r.asks, r.slots, r.got = r.oneAsk[:0], r.oneSlot[:0], r.oneGot[:0]
	for _, attempt := range attempts {
		h := attempt.Hold
		h.TTL, h.Margin = a.ttl, a.margin
		r.slots = append(r.slots, slot{id: h.Queue.ID})
		r.got = append(r.got, hold.Attempt{Hold: h})
	}
	a.mu.Lock()
	asking := false
	for i := range r.slots {
		s := &r.slots[i]
		if behind != nil && behind[i] {
			r.got[i].Err = &hold.Busy{}
			continue
		}
		if s.entry, r.got[i].Err = a.reserveLocked(s.id, o); s.entry == nil {
			continue
		}
		asking = true
		if s.asks = s.entry.pending == 1 && !s.entry.granted; s.asks {
			r.asks = append(r.asks, s.entry.try())
		} else if s.entry.granted {
			r.bound = true
		}
	}
	answered := true
	if asking {
		leads := a.mux.submit(ctx, &r.call)
		a.mu.Unlock()
		answered = a.mux.await(&r.call, leads)
	} else {
		a.mu.Unlock()
	}
	for i := range attempts {
		switch {
		case answered:
			attempts[i].Err = r.got[i].Err
		case r.slots[i].entry == nil:
			attempts[i].Err = r.got[i].Err
		default:
			attempts[i].Err = r.why(ctx)
		}
	}
	if !answered {
		return &request{} // the leader still writes to r
	}
	return r
}

// reserveLocked enters a request for a lock, or returns why it is refused. The caller keeps
// a.mu until the request is in the mux's queue. So the release of a lock always comes before
// the next try for it, and a try before the calls that wait for its answer. Until that answer
// the key is not busy: no server has said so.
func (a *Locks) reserveLocked(id lockkey.ID, o hold.Request) (*entry, error) {
	h := a.held[id]
	switch {
	case h == nil && !o.Turn.SkipQueue && !o.Turn.First && a.yields.last(id):
		return nil, &hold.Busy{Left: true}
	case h == nil:
		if len(a.held) >= a.room {
			return nil, fmt.Errorf("%w: %d; release some, or raise AdvisoryConfig.MaxLocks within the server's max_locks_per_transaction", lockerr.ErrMaxLocks, a.room)
		}
		h = &entry{id: id, mode: o.Mode}
		h.locks = h.one[:0]
		a.held[id] = h
	case h.granted && (len(h.locks) > 0 && !h.admits(o.Mode) || h.wanted && !o.Turn.SkipQueue && !o.Turn.First): // an entry without holds is about to be released
		return nil, a.busyLocked(h) // waiters for a shared lock want it exclusively: later readers come after them
	}
	h.pending++
	return h, nil
}

// busyLocked is the error for a lock that this process has.
func (a *Locks) busyLocked(h *entry) error {
	return &hold.Busy{Holder: a.holder, Here: true, Wanted: h.wanted}
}

// answered processes the answer to a request.
func (r *request) answered(left bool, now time.Duration) {
	a := r.locks
	answers, final := r.answers, false // final: a lock was granted, or refused here, so that a second try cannot help
	for i := range r.slots {
		s, got := &r.slots[i], &r.got[i]
		if s.asks && r.err == nil {
			s.granted, s.token = answers[0].granted, answers[0].token
			answers = answers[1:]
		}
		switch {
		case s.entry == nil:
			final = true
		case r.err != nil:
			got.Err = r.err
		case !got.Hold.Granted(0, r.sent, now): // the token is the hold's
			got.Err = hold.ErrLateGrant
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range r.slots {
		s, got := &r.slots[i], &r.got[i]
		if s.entry == nil {
			continue
		}
		h := s.entry
		h.pending--
		if s.asks {
			h.granted, h.token = s.granted, s.token
		}
		if s.asks && !s.granted {
			delete(a.held, h.id) // calls that wait for this answer see that it was not granted
			h.failed = r.err
		}
		switch {
		case got.Err != nil:
		case !h.granted:
			got.Err = cmp.Or(h.failed, error(&hold.Busy{}))
			r.outdated = r.outdated || !s.asks
		case !h.admits(r.mode):
			got.Err = a.busyLocked(h)
			r.leftover = r.leftover || len(h.locks) == 0
		case !left:
			got.Hold.Token, got.Hold.Holder, got.Hold.Since = h.token, a.holder, time.Now()
			h.locks = append(h.locks, got.Hold)
			final = true
			h.wanted = h.wanted || r.turn > 0 && a.host.Queue.Contended(lockkey.Name{ID: h.id}) // a caller that had to queue is seldom the last one
		}
		if h.granted && h.unused() {
			a.mux.do(a.removeLocked(h))
		}
	}
	r.outdated = r.outdated || r.bound && errors.Is(r.err, lockerr.ErrSessionEnded)
	if final {
		r.outdated, r.leftover = false, false
	}
}

// removeLocked removes an entry, and returns the call that releases its lock.
func (a *Locks) removeLocked(h *entry) *call {
	delete(a.held, h.id)
	h.granted = false
	if queued := a.host.Queue.Freed(lockkey.Name{ID: h.id}); queued || h.wanted {
		a.yieldLocked(h)
	}
	h.ask1[0] = h.unlock()
	h.back.bound, h.back.asks = true, h.ask1[:]
	return &h.back
}

// entryOfLocked returns the entry of a hold, and the hold's index in it. It returns nil if the
// session does not have the lock for that hold.
func (a *Locks) entryOfLocked(lock *hold.Hold) (h *entry, at int) {
	if h = a.held[lock.Queue.ID]; h == nil || !h.granted {
		return nil, 0
	}
	if at = slices.Index(h.locks, lock); at < 0 {
		return nil, 0
	}
	return h, at
}

// withdrawLocked takes a hold out of its entry, and returns the call that releases the lock.
// While other holds share the lock, that call has no requests. withdrawLocked returns nil if
// the hold is in no entry.
func (a *Locks) withdrawLocked(lock *hold.Hold) *call {
	h, i := a.entryOfLocked(lock)
	if h == nil {
		return nil
	}
	h.locks = slices.Delete(h.locks, i, i+1)
	if h.unused() {
		return a.removeLocked(h)
	}
	if a.cfg.Tokens && h.mode == hold.Exclusive { // a fence may be open: calls that wait for the answer must ask the server themselves
		h.failed = a.busyLocked(h)
		return a.removeLocked(h)
	}
	return &call{bound: true}
}

func (a *Locks) Release(lock *hold.Hold) error {
	a.mu.Lock()
	c := a.withdrawLocked(lock)
	if c == nil {
		a.mu.Unlock()
		return fmt.Errorf("%w: %w", lockerr.ErrLost, lockerr.ErrSessionEnded)
	}
	// If other holds share the lock, c releases nothing, but its answer shows whether the session
	// still lives.
	leads := a.mux.submit(context.Background(), c)
	a.mu.Unlock()
	a.mux.await(c, leads)
	switch {
	case errors.Is(c.err, lockerr.ErrSessionEnded):
		return fmt.Errorf("%w: %w", lockerr.ErrLost, c.err)
	case c.err != nil:
		return nil // a statement that failed is undone, which releases the lock
	case len(c.asks) > 0 && !c.answers[0].granted:
		return fmt.Errorf("%w: the server says that the lock was not held", lockerr.ErrLost)
	}
	return nil
}

// Discard implements [hold.Backend].
func (a *Locks) Discard(lock *hold.Hold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.withdrawLocked(lock); c != nil && len(c.asks) > 0 {
		a.mux.do(c)
	}
}

// Keep does nothing: the mux's pings keep the session alive with all its locks.
func (a *Locks) Keep(*hold.Hold) {}

// Drop releases a lock that is lost while its session lives: its deadline passed between two
// answers of the server.
func (a *Locks) Drop(lock *hold.Hold, lost bool) {
	if lost {
		a.Discard(lock)
	}
}

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

// alive moves the deadlines of all locks. The session was alive at sent.
func (a *Locks) alive(sent time.Duration) {
	for _, lock := range a.all() {
		_ = lock.Renewed(sent) // a lost lock stays lost
	}
}

// lost ends all locks of a session that has ended.
func (a *Locks) lost(why error) {
	locks := a.all()
	a.mu.Lock()
	for _, h := range a.held {
		if h.granted {
			a.removeLocked(h)
			h.failed = lockerr.ErrSessionEnded
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

// all returns the holds of all entries.
func (a *Locks) all() []*hold.Hold {
	a.mu.Lock()
	defer a.mu.Unlock()
	var locks []*hold.Hold
	for _, h := range a.held {
		locks = append(locks, h.locks...)
	}
	return locks
}

func (a *Locks) Close(ctx context.Context) error {
	a.reaping.Stop()
	err := batcher.Until(ctx, a.host.Queue.Close)
	err = cmp.Or(err, batcher.Until(ctx, func() { <-a.evicting.Done() }))
	a.queueing.Close()
	return cmp.Or(err, a.mux.close(ctx))
}
