package pgxlock

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
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/waitqueue"
)

// NewAdvisoryLocker returns a Locker whose locks are PostgreSQL's session-level advisory
// locks. They are the fastest kind, and the server frees them at once when the session that
// holds them ends. Nothing needs to be installed. The lock for a key is the advisory lock
// with the number [AdvisoryID](key), so a Locker excludes callers of pg_advisory_lock in
// any language, and of [LockTx] and pg_advisory_xact_lock. Use [RawKey] and [RawKey2] for
// locks that already have numbers.
//
// Where the migrations are installed and the role may use the queue of waiters, processes
// wake each other. This takes two more connections: one that listens, and one for the
// queue, which is closed when it has been idle for the pool's MaxConnIdleTime, but for at
// least 2 s. Otherwise a caller that waits for another process polls.
//
// The Locker uses only the pool's configuration. It opens one connection of its own, at its
// first use, and holds all its locks on it. The connection ends at Close, when the process
// or the server ends, at a failover, or when the server has received nothing for the TTL of
// [AdvisoryConfig], which the server measures. Then all locks are lost together.
// [Lock.Lost] is closed within milliseconds of the server's message, or when that message
// can no longer be expected in time. The Locker connects again for the next locks. When the
// server ends a session, it frees the locks before the client can know.
//
// The connection must lead to the server itself. The Locker refuses a standby
// ([ErrReadOnly]) and a pooler in transaction or statement mode ([ErrPooler]); for a pooler
// in session mode see [AdvisoryConfig.SessionPooler]. If a proxy passes a message to a
// backend other than the session's, all locks are lost with ErrPooler at that message, and
// the other backend takes none. Where the server reports addresses of the connection other
// than this process sees, as behind a proxy or a published port of a container, an
// uncontended acquisition costs the server somewhat more.
//
// See https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
func NewAdvisoryLocker(pool *pgxpool.Pool, cfg *AdvisoryConfig) (*Locker, error) {
	c, err := cfg.withDefaults()
	if err == nil && pool == nil {
		err = errors.New("the pool is nil; make one with pgxpool.New")
	}
	if err != nil {
		return nil, &Error{Op: "new", Kind: KindAdvisory, Err: err}
	}
	return newAdvisory(pool.Config(), c, clock.System), nil
}

// leastQueueIdle keeps the connection of the queue open between two checks of a waiter, even if
// MaxConnIdleTime is shorter.
const leastQueueIdle = 2 * hold.CheckInterval

func newAdvisory(config *pgxpool.Config, cfg AdvisoryConfig, now clock.Clock) *Locker {
	l := newLocker(KindAdvisory, now, cfg.Backoff, cfg.Logger)
	l.observe = cfg.Observe
	a := &advisoryLocks{cfg: cfg, room: cmp.Or(cfg.MaxLocks, maxAdvisoryLocks), held: make(map[lockkey.ID]*advisoryEntry), yields: make(turns), vain: make(turns)}
	if cfg.TTL > 0 {
		a.ttl, a.margin = cfg.TTL, max(cfg.TTL/10, 100*time.Millisecond)
	}
	a.Dialer = dbconn.Dialer{Name: dbconn.ApplicationName(cfg.Owner), Config: config}
	a.place = dbconn.Installation{Asked: cfg.Schema, Config: "AdvisoryConfig"}
	a.reaping = batcher.Housekeeping{Reap: a.reap, Log: cfg.Logger}
	a.queueing = &dbconn.Session{Dialer: a.Dialer, Place: &a.place, Idle: max(config.MaxConnIdleTime, leastQueueIdle)}
	l.connect(waitqueue.Server{Owner: cfg.Owner, Place: &a.place, Runner: queueing{a.queueing}, Dialer: a.Dialer, Session: a})
	a.host = l.host()
	a.evicting = batcher.Batcher[struct{}]{Limit: hold.MaxTickets, Run: a.lookEvicted}
	a.wire = &wire{connect: a.connect, backoff: cfg.Backoff, clock: now, ttl: a.ttl, margin: a.margin, alive: a.alive, lost: a.lost, gone: make(chan struct{})}
	l.use(a)
	return l
}

// advisoryLocks is the backend of an Advisory Locker. It records which locks this process has
// or requests, because the server does not exclude the callers of one session from each other:
// it grants a lock again to the session that has it.
type advisoryLocks struct {
	dbconn.Dialer
	host        hold.Host
	cfg         AdvisoryConfig
	ttl, margin time.Duration // 0: there is no bound
	wire        *wire
	unfinished  dbconn.Backend      // the backend of the last connection
	place       dbconn.Installation // of the queue, if there is one, and of the rows of locks with Tokens
	queueing    *dbconn.Session     // the connection for the queue
	reaping     batcher.Housekeeping
	evicting    batcher.Batcher[struct{}]

	// mu guards what follows, and the entries.
	mu      sync.Mutex
	held    map[lockkey.ID]*advisoryEntry
	room    int    // how many entries there may be
	holder  string // the holder's name for locks of the present session
	pid     int32  // the backend of that session
	session int64  // the random number of that session

	// yields are locks that other processes waited for when this one released them: callers
	// here that have not queued leave the locks to them. vain are locks that others waited for
	// when this process did not have them any more: one wake-up is enough.
	yields, vain turns
}

// queueing runs the exchanges of the queue.
type queueing struct{ *dbconn.Session }

func (q queueing) Do(fn dbconn.Exchange) error { return q.Session.Do(dbconn.Timeout, fn) }

// advisoryEntry is a lock that the lock session has or requests, for one or many holds.
type advisoryEntry struct {
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
	back lockCall      // the call that releases it
	ask1 [1]ask        // the request in back
}

// ask returns the request for the mode of the lock.
func (h *advisoryEntry) ask(exclusive, shared lockkey.Ask) ask {
	if h.mode == hold.Shared {
		return ask{shared, h.id}
	}
	return ask{exclusive, h.id}
}

func (h *advisoryEntry) try() ask    { return h.ask(lockkey.AskTry, lockkey.AskTryShared) }
func (h *advisoryEntry) unlock() ask { return h.ask(lockkey.AskUnlock, lockkey.AskUnlockShared) }

// admits reports whether a hold of that mode may join the entry.
func (h *advisoryEntry) admits(mode hold.Mode) bool {
	return mode == h.mode && (mode == hold.Shared || len(h.locks) == 0)
}

// unused reports whether the entry has no holds and no caller waits for its answer.
func (h *advisoryEntry) unused() bool { return len(h.locks) == 0 && h.pending == 0 }

// advisoryRequest is one caller's request for some locks.
type advisoryRequest struct {
	lockCall
	locks *advisoryLocks
	mode  hold.Mode
	turn  int64 // its ticket
	slots []advisorySlot
	got   []hold.Attempt // a copy for each slot

	// The request was refused only because of another caller's request for the same lock, so
	// that a second try may succeed. outdated: that request may have been refused before this
	// call began, or its lock was released or lost before this call could share it. leftover:
	// it was granted in another mode, and its caller has left.
	outdated, leftover bool

	oneAsk  [1]ask // most requests are for one lock: no allocation
	oneSlot [1]advisorySlot
	oneGot  [1]hold.Attempt
}

type advisorySlot struct {
	id      lockkey.ID
	entry   *advisoryEntry // nil if the request was refused without asking the server
	granted bool           // by the server
	token   int64          // of the grant
	asks    bool           // it sends a request; otherwise it waits for the answer to an earlier one
}

// Try implements [hold.Backend].
func (a *advisoryLocks) Try(ctx context.Context, o hold.Request, attempts []hold.Attempt) {
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
func (a *advisoryLocks) request(ctx context.Context, attempts []hold.Attempt, behind []bool, o hold.Request) (r *advisoryRequest) {
	r = &advisoryRequest{locks: a, mode: o.Mode, turn: o.Turn.Ticket}
	r.asker, r.closing = r, a.host.Closing
	r.asks, r.slots, r.got = r.oneAsk[:0], r.oneSlot[:0], r.oneGot[:0]
	for _, attempt := range attempts {
		h := attempt.Hold
		h.TTL, h.Margin = a.ttl, a.margin
		r.slots = append(r.slots, advisorySlot{id: h.Queue.ID})
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
		leads := a.wire.submit(ctx, &r.lockCall)
		a.mu.Unlock()
		answered = a.wire.await(&r.lockCall, leads)
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
		return &advisoryRequest{} // the leader still writes to r
	}
	return r
}

// reserveLocked enters a request for a lock, or returns why it is refused. The caller keeps
// a.mu until the request is in the wire's queue. So the release of a lock always comes before
// the next try for it, and a try before the calls that wait for its answer. Until that answer
// the key is not busy: no server has said so.
func (a *advisoryLocks) reserveLocked(id lockkey.ID, o hold.Request) (*advisoryEntry, error) {
	h := a.held[id]
	switch {
	case h == nil && !o.Turn.SkipQueue && !o.Turn.First && a.yields.last(id):
		return nil, &hold.Busy{Left: true}
	case h == nil:
		if len(a.held) >= a.room {
			return nil, fmt.Errorf("%w: %d; release some, or raise AdvisoryConfig.MaxLocks within the server's max_locks_per_transaction", ErrMaxLocks, a.room)
		}
		h = &advisoryEntry{id: id, mode: o.Mode}
		h.locks = h.one[:0]
		a.held[id] = h
	case h.granted && (len(h.locks) > 0 && !h.admits(o.Mode) || h.wanted && !o.Turn.SkipQueue && !o.Turn.First): // an entry without holds is about to be released
		return nil, a.busyLocked(h) // waiters for a shared lock want it exclusively: later readers come after them
	}
	h.pending++
	return h, nil
}

// busyLocked is the error for a lock that this process has.
func (a *advisoryLocks) busyLocked(h *advisoryEntry) error {
	return &hold.Busy{Holder: a.holder, Here: true, Wanted: h.wanted}
}

// answered processes the answer to a request.
func (r *advisoryRequest) answered(left bool, now time.Duration) {
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
			a.wire.do(a.removeLocked(h))
		}
	}
	r.outdated = r.outdated || r.bound && errors.Is(r.err, lockerr.ErrSessionEnded)
	if final {
		r.outdated, r.leftover = false, false
	}
}

// removeLocked removes an entry, and returns the call that releases its lock.
func (a *advisoryLocks) removeLocked(h *advisoryEntry) *lockCall {
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
func (a *advisoryLocks) entryOfLocked(lock *hold.Hold) (h *advisoryEntry, at int) {
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
func (a *advisoryLocks) withdrawLocked(lock *hold.Hold) *lockCall {
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
	return &lockCall{bound: true}
}

func (a *advisoryLocks) Release(lock *hold.Hold) error {
	a.mu.Lock()
	c := a.withdrawLocked(lock)
	if c == nil {
		a.mu.Unlock()
		return fmt.Errorf("%w: %w", ErrLost, lockerr.ErrSessionEnded)
	}
	// If other holds share the lock, c releases nothing, but its answer shows whether the session
	// still lives.
	leads := a.wire.submit(context.Background(), c)
	a.mu.Unlock()
	a.wire.await(c, leads)
	switch {
	case errors.Is(c.err, lockerr.ErrSessionEnded):
		return fmt.Errorf("%w: %w", ErrLost, c.err)
	case c.err != nil:
		return nil // a statement that failed is undone, which releases the lock
	case len(c.asks) > 0 && !c.answers[0].granted:
		return fmt.Errorf("%w: the server says that the lock was not held", ErrLost)
	}
	return nil
}

// Discard implements [hold.Backend].
func (a *advisoryLocks) Discard(lock *hold.Hold) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.withdrawLocked(lock); c != nil && len(c.asks) > 0 {
		a.wire.do(c)
	}
}

// Keep does nothing: the wire's pings keep the session alive with all its locks.
func (a *advisoryLocks) Keep(*hold.Hold) {}

// Drop releases a lock that is lost while its session lives: its deadline passed between two
// answers of the server.
func (a *advisoryLocks) Drop(lock *hold.Hold, lost bool) {
	if lost {
		a.Discard(lock)
	}
}

func (a *advisoryLocks) Renew(ctx context.Context, lock *hold.Hold) error {
	c := &lockCall{bound: true}
	if !a.wire.await(c, a.wire.submit(ctx, c)) {
		return lockerr.ContextError(ctx)
	}
	if c.err != nil {
		return cmp.Or(lock.Err(), c.err)
	}
	return lock.Renewed(c.sent)
}

// alive moves the deadlines of all locks. The session was alive at sent.
func (a *advisoryLocks) alive(sent time.Duration) {
	for _, lock := range a.all() {
		_ = lock.Renewed(sent) // a lost lock stays lost
	}
}

// lost ends all locks of a session that has ended.
func (a *advisoryLocks) lost(why error) {
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
func (a *advisoryLocks) all() []*hold.Hold {
	a.mu.Lock()
	defer a.mu.Unlock()
	var locks []*hold.Hold
	for _, h := range a.held {
		locks = append(locks, h.locks...)
	}
	return locks
}

func (a *advisoryLocks) Close(ctx context.Context) error {
	a.reaping.Stop()
	err := batcher.Until(ctx, a.host.Queue.Close)
	err = cmp.Or(err, batcher.Until(ctx, func() { <-a.evicting.Done() }))
	a.queueing.Close()
	return cmp.Or(err, a.wire.close(ctx))
}
