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
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// NewAdvisoryLocker returns a Locker whose locks are PostgreSQL's session-level advisory
// locks: the fastest ones, and the server frees them at once when the session that
// holds them ends. Nothing needs to be installed. A key is the advisory lock
// number [AdvisoryID](key), so that a Locker and pg_advisory_lock in any language
// exclude each other, and so do [LockTx] and pg_advisory_xact_lock; [RawKey] and
// [RawKey2] name locks that have numbers already.
//
// Where the migrations are installed, and the role may use the queue of waiters,
// processes wake each other. This takes two more connections: one that listens, and one for
// the queue, which is closed when it has been idle for the pool's MaxConnIdleTime, and for
// 2 s at least. Otherwise a caller who waits for another process polls.
//
// The pool gives its configuration only: the Locker has one connection of its own,
// on which it holds all its locks, and which dies with the first of these: Close,
// the end of the process or of the server, a failover, or a silence of the TTL of
// [AdvisoryConfig], which the server itself measures. All locks are lost together
// then: [Lock.Lost] fires within milliseconds of the server's word, or when that
// can no longer be expected in time; and the Locker connects anew for those that
// are acquired next. A session that the server ends frees its locks before its
// client can know. Nothing is sent before the first use.
//
// It must be connected to the server itself: a pooler in transaction or statement
// mode is refused ([ErrPooler]), see [AdvisoryConfig.SessionPooler] for one in
// session mode; and so is a standby ([ErrReadOnly]). A proxy that passes a message to
// another backend than the session's loses all locks with ErrPooler at that message,
// and none is taken there. Where the server reports other addresses of the connection
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

// leastQueueIdle keeps the connection of the queue between two looks of a call that waits,
// whatever MaxConnIdleTime is.
const leastQueueIdle = 2 * lookEvery

func newAdvisory(config *pgxpool.Config, cfg AdvisoryConfig, now clock.Clock) *Locker {
	l := newLocker(KindAdvisory, now, cfg.Backoff, cfg.Logger)
	l.observe = cfg.Observe
	a := &advisoryLocks{locker: l, cfg: cfg, room: cmp.Or(cfg.MaxLocks, maxAdvisoryLocks), held: make(map[lockkey.ID]*advisoryHold), yields: make(turns), vain: make(turns)}
	if cfg.TTL > 0 {
		a.ttl, a.margin = cfg.TTL, max(cfg.TTL/10, 100*time.Millisecond)
	}
	a.Dialer = dbconn.Dialer{Name: dbconn.ApplicationName(cfg.Owner), Config: config}
	a.place = dbconn.Installation{Asked: cfg.Schema, Config: "AdvisoryConfig"}
	a.reaping = batcher.Housekeeping{Reap: a.reap, Log: cfg.Logger}
	a.queueing = &dbconn.Session{Dialer: a.Dialer, Place: &a.place, Idle: max(config.MaxConnIdleTime, leastQueueIdle)}
	l.queue = newQueue(l, &a.place, cfg.Owner, func(fn dbconn.Exchange) error { return a.queueing.Do(dbconn.Timeout, fn) }, a.queueing.Reached, a.Dialer)
	a.evicting = batcher.Batcher[struct{}]{Limit: maxTickets, Run: a.lookEvicted}
	l.queue.wanted, l.queue.evicted, l.queue.names = a.wanted, a.evicted, a.unpublished
	a.wire = &wire{connect: a.connect, backoff: cfg.Backoff, clock: now, ttl: a.ttl, margin: a.margin, alive: a.alive, lost: a.lost, gone: make(chan struct{})}
	l.backend = a
	return l
}

// advisoryLocks is the backend of an Advisory Locker: which locks this process
// has, or is asking for. The server cannot keep its callers apart: to the session
// that has a lock it grants it again.
type advisoryLocks struct {
	dbconn.Dialer
	locker      *Locker
	cfg         AdvisoryConfig
	ttl, margin time.Duration // 0: there is no bound
	wire        *wire
	unfinished  dbconn.Backend      // the backend of the last connection
	place       dbconn.Installation // where the queue is, if there is one, and the rows of locks with Tokens
	queueing    *dbconn.Session     // for what concerns the queue
	reaping     batcher.Housekeeping
	evicting    batcher.Batcher[struct{}]

	mu      sync.Mutex
	held    map[lockkey.ID]*advisoryHold
	room    int    // how many there may be
	holder  string // of what the present session has
	pid     int32  // of that session's backend
	session int64  // a number that it has drawn for itself

	// yields are locks that other processes waited for when they were given back:
	// who has not queued leaves them to those. vain are locks that others wanted
	// which this process did not have any more: it does not wake them for that
	// reason again.
	yields, vain turns
}

// advisoryHold is a lock that the session has, or is asking for.
type advisoryHold struct {
	id      lockkey.ID
	mode    Mode
	granted bool
	token   int64     // of the grant: all who share it have this one
	failed  error     // why callers who wait for its answer do not get it
	locks   []*Lock   // one, or many who share it
	pending int       // callers whose answer has not come
	wanted  bool      // other processes wait for it
	named   time.Time // when its name was published

	one  [1]*Lock // room for locks
	back lockCall // gives it back in the end,
	ask1 [1]ask   // with this
}

// ask returns what takes the lock, or gives it back.
func (h *advisoryHold) ask(exclusive, shared lockkey.Ask) ask {
	if h.mode == Shared {
		return ask{shared, h.id}
	}
	return ask{exclusive, h.id}
}

func (h *advisoryHold) take() ask     { return h.ask(lockkey.AskTry, lockkey.AskTryShared) }
func (h *advisoryHold) giveBack() ask { return h.ask(lockkey.AskUnlock, lockkey.AskUnlockShared) }

// admits reports whether a lock of that mode may be one of those.
func (h *advisoryHold) admits(mode Mode) bool {
	return mode == h.mode && (mode == Shared || len(h.locks) == 0)
}

// unused reports that nobody has the lock or waits for it.
func (h *advisoryHold) unused() bool { return len(h.locks) == 0 && h.pending == 0 }

func (a *advisoryLocks) options() options { return options{} }

func (a *advisoryLocks) takes(opt Option) bool {
	switch opt.(type) {
	case MaxWait, Mode:
		return true
	}
	return false
}

func (a *advisoryLocks) check(key string) error { return lockkey.CheckAdvisory(key) }

func (a *advisoryLocks) name(key string) lockkey.Name { return lockkey.Name{ID: lockkey.Identify(key)} }

// advisoryRequest is one caller's request for some locks.
type advisoryRequest struct {
	lockCall
	locks *advisoryLocks
	mode  Mode
	turn  int64 // see options
	slots []advisorySlot
	got   []attempt // for each slot

	// Nothing was granted because of another caller's request. hearsay: that may have been
	// refused before this call began, or its lock was given back, or lost, before this
	// call could have it. leftover: it was granted, in another mode, to nobody who waits.
	hearsay, leftover bool

	oneAsk  [1]ask // most are for one lock
	oneSlot [1]advisorySlot
	oneGot  [1]attempt
}

type advisorySlot struct {
	id      lockkey.ID
	hold    *advisoryHold // nil if it was refused here
	granted bool          // to it,
	token   int64         // with this
	asks    bool          // for itself; else it sees what another one gets that asked before
}

func (a *advisoryLocks) try(ctx context.Context, keys []string, o options) []attempt {
	var behind []bool // others, which a try that shares a lock does not pass
	if o.mode == Shared && o.turn == barges {
		behind = a.waitedFor(ctx, keys)
	}
	for first := true; ; first = false {
		r, got := a.request(ctx, keys, behind, o)
		again := r.leftover || first && r.hearsay // what is asked the second time is not older than this call
		if !again || ctx.Err() != nil {
			return got
		}
	}
}

// request is one try. behind may be nil.
func (a *advisoryLocks) request(ctx context.Context, keys []string, behind []bool, o options) (r *advisoryRequest, got []attempt) {
	r = &advisoryRequest{locks: a, mode: o.mode, turn: o.turn}
	r.asker = r
	r.asks, r.slots, r.got = r.oneAsk[:0], r.oneSlot[:0], r.oneGot[:0]
	for _, key := range keys {
		r.slots = append(r.slots, advisorySlot{id: lockkey.Identify(key)})
		r.got = append(r.got, attempt{lock: a.locker.newLock(key, "", a.ttl, a.margin)})
	}
	a.mu.Lock()
	asking := false
	for i := range r.slots {
		s := &r.slots[i]
		if behind != nil && behind[i] {
			r.got[i].err = &busyError{}
			continue
		}
		if s.hold, r.got[i].err = a.reserve(s.id, o); s.hold == nil {
			continue
		}
		asking = true
		if s.asks = s.hold.pending == 1 && !s.hold.granted; s.asks {
			r.asks = append(r.asks, s.hold.take())
		} else if s.hold.granted {
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
	if answered {
		return r, r.got
	}
	attempts := make([]attempt, len(keys)) // the others are still to come
	for i := range r.slots {
		if r.slots[i].hold == nil {
			attempts[i] = r.got[i]
		} else {
			attempts[i].err = context.Cause(ctx)
		}
	}
	return &advisoryRequest{}, attempts // r is still to be answered
}

// reserve enters a request for a lock, or says why it is refused. a.mu is held
// until the request stands in the queue of the wire: so what gives a lock back
// always stands before what takes it anew, and who asks for a lock before those
// who wait to see whether it is granted. Until then the key is not busy: nobody
// has said so.
func (a *advisoryLocks) reserve(id lockkey.ID, o options) (*advisoryHold, error) {
	h := a.held[id]
	switch {
	case h == nil && o.turn != barges && !o.first && a.yields.last(id):
		return nil, &busyError{left: true}
	case h == nil:
		if len(a.held) >= a.room {
			return nil, fmt.Errorf("%w: %d; release some, or raise AdvisoryConfig.MaxLocks within what the server has room for", ErrMaxLocks, a.room)
		}
		h = &advisoryHold{id: id, mode: o.mode}
		h.locks = h.one[:0]
		a.held[id] = h
	case h.granted && (len(h.locks) > 0 && !h.admits(o.mode) || h.wanted && o.turn != barges && !o.first): // without any it is about to be given back
		return nil, a.busy(h) // who wants what is shared needs it alone: later ones come behind
	}
	h.pending++
	return h, nil
}

// busy says that this process has the lock. a.mu is held.
func (a *advisoryLocks) busy(h *advisoryHold) error {
	return &busyError{holder: a.holder, here: true, wanted: h.wanted}
}

// answered takes the answer to a request.
func (r *advisoryRequest) answered(left bool, now time.Duration) {
	a := r.locks
	answers := r.answers
	for i := range r.slots {
		s, got := &r.slots[i], &r.got[i]
		if s.asks && r.err == nil {
			s.granted, s.token = answers[0].granted, answers[0].token
			answers = answers[1:]
		}
		switch {
		case s.hold == nil:
		case r.err != nil:
			got.err = r.err
		case !got.lock.granted(0, r.sent, now): // the token is the hold's
			got.err = errLateGrant
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range r.slots {
		s, got := &r.slots[i], &r.got[i]
		if s.hold == nil {
			continue
		}
		h := s.hold
		h.pending--
		if s.asks {
			h.granted, h.token = s.granted, s.token
		}
		if s.asks && !s.granted {
			delete(a.held, h.id) // those who came after will see
			h.failed = r.err
		}
		switch {
		case got.err != nil:
		case !h.granted:
			got.err = cmp.Or(h.failed, error(&busyError{}))
			r.hearsay = r.hearsay || !s.asks
		case !h.admits(r.mode):
			got.err = a.busy(h)
			r.leftover = r.leftover || len(h.locks) == 0
		case !left:
			got.lock.token, got.lock.holder, got.lock.since, got.lock.hold = h.token, a.holder, time.Now(), h
			h.locks = append(h.locks, got.lock)
			h.wanted = h.wanted || r.turn > 0 && a.locker.queue.othersWait(lockkey.Name{ID: h.id}) // who had to queue is seldom the last one
		}
		if h.granted && h.unused() {
			a.wire.do(a.remove(h))
		}
		if got.err != nil {
			got.lock = nil
		}
	}
	r.hearsay = r.hearsay || r.bound && errors.Is(r.err, lockerr.ErrSessionEnded)
	if slices.ContainsFunc(r.got, func(got attempt) bool { return got.lock != nil }) {
		r.hearsay, r.leftover = false, false
	}
}

// remove ends a hold, and returns what tells the server.
func (a *advisoryLocks) remove(h *advisoryHold) *lockCall {
	delete(a.held, h.id)
	h.granted = false
	if queued := a.locker.lines.freed(lockkey.Name{ID: h.id}); queued || h.wanted {
		a.yield(h)
	}
	h.ask1[0] = h.giveBack()
	h.back.bound, h.back.asks = true, h.ask1[:]
	return &h.back
}

// has reports whether the session has the lock for that caller. a.mu is held.
func (a *advisoryLocks) has(lock *Lock) bool {
	return lock.hold != nil && lock.hold.granted && slices.Contains(lock.hold.locks, lock)
}

// withdraw takes a lock out of its hold, and returns what tells the server, which
// asks for nothing while others share it; nil if the lock is in none. a.mu is held.
func (a *advisoryLocks) withdraw(lock *Lock) *lockCall {
	h := lock.hold
	if h == nil || !h.granted {
		return nil
	}
	i := slices.Index(h.locks, lock)
	if i < 0 {
		return nil
	}
	h.locks = slices.Delete(h.locks, i, i+1)
	if h.unused() {
		return a.remove(h)
	}
	if a.cfg.Tokens && h.mode == Exclusive { // a fence may be open: those who wait ask the server themselves
		h.failed = a.busy(h)
		return a.remove(h)
	}
	return &lockCall{bound: true}
}

func (a *advisoryLocks) release(lock *Lock) error {
	a.mu.Lock()
	c := a.withdraw(lock)
	if c == nil {
		a.mu.Unlock()
		return fmt.Errorf("%w: %w", ErrLost, lockerr.ErrSessionEnded)
	}
	// What others share is not given back, but whether it was still held is asked.
	leads := a.wire.submit(context.Background(), c)
	a.mu.Unlock()
	a.wire.await(c, leads)
	switch {
	case errors.Is(c.err, lockerr.ErrSessionEnded):
		return fmt.Errorf("%w: %w", ErrLost, c.err)
	case c.err != nil:
		return nil // a statement that failed is undone, and that gives the lock back
	case len(c.asks) > 0 && !c.answers[0].granted:
		return fmt.Errorf("%w: the server says that it was not held", ErrLost)
	}
	return nil
}

// discard gives back what is left of a lock that nobody believes in.
func (a *advisoryLocks) discard(lock *Lock) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.withdraw(lock); c != nil && len(c.asks) > 0 {
		a.wire.do(c)
	}
}

// keep: the session is kept alive with all that it holds.
func (a *advisoryLocks) keep(*Lock) {}

// drop gives back a lock that is lost while its session lives: its deadline passed
// between two signs of life.
func (a *advisoryLocks) drop(lock *Lock) {
	if errors.Is(lock.ended, ErrLost) {
		a.discard(lock)
	}
}

func (a *advisoryLocks) renew(ctx context.Context, lock *Lock) error {
	c := &lockCall{bound: true}
	if !a.wire.await(c, a.wire.submit(ctx, c)) {
		return lockerr.ContextError(ctx)
	}
	if c.err != nil {
		return cmp.Or(lock.Err(), c.err)
	}
	return lock.renewed(c.sent)
}

// alive moves the deadlines of all locks.
func (a *advisoryLocks) alive(sent time.Duration) {
	for _, lock := range a.all() {
		_ = lock.renewed(sent) // one that is lost stays so
	}
}

// lost ends all locks of a session that has ended.
func (a *advisoryLocks) lost(why error) {
	locks := a.all()
	a.mu.Lock()
	for _, h := range a.held {
		if h.granted {
			a.remove(h)
			h.failed = lockerr.ErrSessionEnded
		}
	}
	a.mu.Unlock()
	for _, lock := range locks {
		_ = lock.lose(why)
	}
	if len(locks) > 0 {
		a.locker.log.Warn("pgxlock: the session of advisory locks has ended", "locks", len(locks), "error", why)
	}
}

// all returns the locks that callers have.
func (a *advisoryLocks) all() []*Lock {
	a.mu.Lock()
	defer a.mu.Unlock()
	var locks []*Lock
	for _, h := range a.held {
		locks = append(locks, h.locks...)
	}
	return locks
}

func (a *advisoryLocks) close(ctx context.Context) error {
	a.reaping.Stop()
	err := until(ctx, a.locker.queue.close)
	err = cmp.Or(err, until(ctx, func() { <-a.evicting.Done() }))
	a.queueing.Close()
	return cmp.Or(err, a.wire.close(ctx))
}
