package pgxlock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// LeaseConfig is the policy of a Lease Locker. A nil *LeaseConfig means the
// defaults.
type LeaseConfig struct {
	// TTL is how long a lease lasts from its grant and from each renewal: how
	// long others wait when this process has died. At least 1 s; default 30 s.
	// The option [TTL] changes it for one lock.
	TTL time.Duration

	// Renew is how often leases with that TTL are renewed: at most, and by
	// default, a third of it. Those with a TTL of their own are renewed after a
	// third of that.
	Renew time.Duration

	// Margin is how much earlier than the server we stop believing in a lease:
	// what the clocks of both may drift apart within one TTL. At least, and by
	// default, a tenth of TTL, but not less than 100 ms; at most a third of TTL.
	// A lock with a TTL of its own has a margin in proportion.
	Margin time.Duration

	// Owner is shown to operators as the holder, with an id of each acquisition
	// behind it. Up to 200 characters, not beginning with "*". Default host:pid.
	Owner string

	// Schema is where the migrations were run. Default: the schema in which
	// acquire_lock is found by the search_path of a new connection, else the only
	// one in the database that has pgxlock.
	Schema string

	// Backoff is how long to wait before asking again for a key that is busy, in
	// the attempt-th try of one wait, counted from 0. It may be called by many
	// goroutines. Default: exponential from 10 ms to 500 ms, with jitter. The
	// wait is never longer than the holder's lease lasts.
	Backoff func(attempt int) time.Duration

	// Logger gets what no caller is told: renewals that failed, releases that did
	// not get through. Default: nothing is logged.
	Logger *slog.Logger
}

// withDefaults checks a configuration and fills in what was left out.
func (c *LeaseConfig) withDefaults() (LeaseConfig, error) {
	var cfg LeaseConfig
	if c != nil {
		cfg = *c
	}
	if cfg.TTL == 0 {
		cfg.TTL = 30 * time.Second
	}
	if err := checkTTL("LeaseConfig.TTL", cfg.TTL); err != nil {
		return cfg, err
	}
	if cfg.Renew == 0 {
		cfg.Renew = cfg.TTL / 3
	}
	if cfg.Renew < 0 || cfg.Renew > cfg.TTL/3 {
		return cfg, fmt.Errorf("LeaseConfig.Renew is %s, it must be more than 0 and at most a third of the TTL, %s", cfg.Renew, cfg.TTL/3)
	}
	least := max(cfg.TTL/10, 100*time.Millisecond)
	if cfg.Margin == 0 {
		cfg.Margin = least
	}
	if cfg.Margin < least || cfg.Margin > cfg.TTL/3 {
		return cfg, fmt.Errorf("LeaseConfig.Margin is %s, it must be between %s and a third of the TTL, %s", cfg.Margin, least, cfg.TTL/3)
	}
	if cfg.Owner == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "localhost"
		}
		cfg.Owner = fmt.Sprintf("%.150s:%d", host, os.Getpid())
	}
	if n := utf8.RuneCountInString(cfg.Owner); n > 200 || !utf8.ValidString(cfg.Owner) || cfg.Owner[0] == '*' || checkKey(cfg.Owner) != nil {
		return cfg, fmt.Errorf("LeaseConfig.Owner %.40q must be valid UTF-8 of 1 to 200 characters without zero bytes, not beginning with *", cfg.Owner)
	}
	if cfg.Backoff == nil {
		cfg.Backoff = defaultBackoff
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return cfg, nil
}

// NewLease returns a Locker whose locks are leases: rows in the table
// distributed_locks that expire unless they are renewed, which the Locker does.
// They survive a crash of the server, work with SQL callers of acquire_lock, and
// need the migrations.
//
// The pool gives its configuration only: the Locker has two connections of its
// own, one for requests and one for renewals. Nothing is sent before the first
// use. [Locker.Close] ends the connections.
func NewLease(pool *pgxpool.Pool, cfg *LeaseConfig) (*Locker, error) {
	return newLease(pool, cfg, systemClock)
}

func newLease(pool *pgxpool.Pool, config *LeaseConfig, now clock) (*Locker, error) {
	if pool == nil {
		return nil, &Error{Op: "new", Kind: Lease, Err: errors.New("the pool is nil; make one with pgxpool.New")}
	}
	cfg, err := config.withDefaults()
	if err != nil {
		return nil, &Error{Op: "new", Kind: Lease, Err: err}
	}
	l := &Locker{kind: Lease, now: now, backoff: cfg.Backoff, log: cfg.Logger, held: make(map[*Lock]struct{})}
	l.closing, l.beginClose = context.WithCancelCause(context.Background())
	t := &leaseTable{locker: l, cfg: cfg, place: installation{asked: cfg.Schema}}
	t.requests = t.newSession(pool.Config())
	t.renewals = t.newSession(pool.Config())
	t.acquiring = combiner[*leaseRequest]{run: t.acquire, limit: maxRequests}
	t.releasing = combiner[*leaseReturn]{run: t.giveBack, limit: maxRequests}
	t.renewer = renewer{table: t, classes: make(map[time.Duration]*renewalClass)}
	l.backend = t
	return l, nil
}

// maxRequests bounds a batch whose entries take advisory locks until its commit.
const maxRequests = 256

// leaseTable is the backend of a Lease Locker.
type leaseTable struct {
	locker *Locker
	cfg    LeaseConfig
	place  installation

	requests  *session
	renewals  *session
	acquiring combiner[*leaseRequest]
	releasing combiner[*leaseReturn]
	renewer   renewer
	reaping   housekeeping
}

func (t *leaseTable) newSession(config *pgxpool.Config) *session {
	s := &session{name: fmt.Sprintf("pgxlock %.50s", t.cfg.Owner), config: config}
	s.prepare = func(ctx context.Context, conn *pgx.Conn) error {
		if err := t.place.find(ctx, conn); err != nil {
			return err
		}
		if !s.direct(conn) {
			return nil // a setting would reach other clients of the pooler
		}
		_, err := conn.Exec(ctx, statement("session", ""))
		return err
	}
	return s
}

func (t *leaseTable) options() options { return options{ttl: t.cfg.TTL} }

// leaseRequest is one acquisition under way.
type leaseRequest struct {
	lock     *Lock
	metadata *string

	settled atomic.Bool   // by the answer, or by the caller who left
	done    chan struct{} // closed with the answer
	err     error         // the answer
}

func (t *leaseTable) try(ctx context.Context, key string, o options) (*Lock, error) {
	margin := time.Duration(float64(t.cfg.Margin) * float64(o.ttl) / float64(t.cfg.TTL))
	lock := t.locker.newLock(key, t.cfg.Owner+":"+rand.Text(), o.ttl, max(margin, 100*time.Millisecond))
	r := &leaseRequest{lock: lock, metadata: o.metadata, done: make(chan struct{})}
	t.acquiring.add(r)
	select {
	case <-r.done:
	case <-ctx.Done():
		if r.settled.CompareAndSwap(false, true) {
			return nil, context.Cause(ctx)
		}
		<-r.done
	}
	return lock, r.err
}

// answer tells the caller, and reports false if it has left.
func (r *leaseRequest) answer(err error) bool {
	r.err = err // nobody reads it before done is closed
	if !r.settled.CompareAndSwap(false, true) {
		return false
	}
	close(r.done)
	return true
}

// acquire sends a batch of requests.
func (t *leaseTable) acquire(requests []*leaseRequest) {
	var batch []*leaseRequest
	var names, holders []string
	var ttls []int64
	var metadata []*string
	for _, r := range requests {
		if r.settled.Load() {
			continue // the caller left while it stood in the queue
		}
		batch = append(batch, r)
		names = append(names, r.lock.key)
		holders = append(holders, r.lock.holder)
		ttls = append(ttls, r.lock.ttl.Milliseconds())
		metadata = append(metadata, r.metadata)
	}
	if len(batch) == 0 {
		return
	}

	type grant struct {
		Acquired  bool
		Token     *int64
		HeldBy    *string
		Remaining *time.Duration
	}
	var grants []grant
	var asked bool
	var sent time.Duration
	err := t.do(t.requests, ioTimeout, func(ctx context.Context, conn *pgx.Conn, _ bool) (err error) {
		asked, sent = true, t.locker.now()
		rows, _ := conn.Query(ctx, statement("acquire", t.place.schema), names, holders, ttls, metadata) // CollectRows returns the error
		grants, err = pgx.CollectRows(rows, pgx.RowToStructByPos[grant])
		return err
	})
	if err == nil && len(grants) != len(batch) {
		err = fmt.Errorf("%d answers for %d requests", len(grants), len(batch))
	}
	if err != nil {
		for _, r := range batch {
			if asked && !refused(err) {
				t.cleanUp(r.lock) // it may have been granted
			}
			r.answer(err)
		}
		return
	}
	t.reaping.start(t)
	for i, r := range batch {
		switch g := grants[i]; {
		case !g.Acquired:
			busy := &busyError{}
			if g.HeldBy != nil {
				busy.holder = *g.HeldBy
			}
			if g.Remaining != nil {
				busy.remaining = *g.Remaining
			}
			r.answer(busy)
		case !r.lock.granted(*g.Token, sent):
			t.cleanUp(r.lock)
			r.answer(fmt.Errorf("%w: the grant arrived after its deadline", ErrLost))
		case !r.answer(nil):
			t.cleanUp(r.lock)
		}
	}
}

// refused reports whether err is the server's word that nothing was done. A
// FATAL error may come after a commit.
func refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.SeverityUnlocalized == "ERROR"
}

// do runs an exchange on one of our sessions. No caller's context reaches it.
func (t *leaseTable) do(s *session, patience time.Duration, fn func(context.Context, *pgx.Conn, bool) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return s.do(ctx, fn)
}

// What became of an entry of release.sql or renew.sql.
const (
	outcomeReleased = "released"
	outcomeExpired  = "expired"
	outcomeGone     = "gone"
	outcomeRenewed  = "renewed"
	outcomeSkipped  = "skipped"
)

// leaseReturn is one release under way.
type leaseReturn struct {
	lock    *Lock
	token   *int64 // nil: whichever the holder has
	done    chan struct{}
	outcome string
	err     error
}

// giveBack sends a batch of releases.
func (t *leaseTable) giveBack(returns []*leaseReturn) {
	names := make([]string, len(returns))
	holders := make([]string, len(returns))
	tokens := make([]*int64, len(returns))
	for i, r := range returns {
		names[i], holders[i], tokens[i] = r.lock.key, r.lock.holder, r.token
	}
	var outcomes []string
	var second bool
	err := t.do(t.requests, ioTimeout, func(ctx context.Context, conn *pgx.Conn, again bool) (err error) {
		second = again
		rows, _ := conn.Query(ctx, statement("release", t.place.schema), names, holders, tokens)
		outcomes, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err == nil && len(outcomes) != len(returns) {
		err = fmt.Errorf("%d answers for %d releases", len(outcomes), len(returns))
	}
	for i, r := range returns {
		r.err = err
		if err == nil {
			r.outcome = outcomes[i]
			if second && r.outcome == outcomeGone {
				r.outcome = outcomeReleased // by the first attempt, whose answer was lost
			}
		}
		close(r.done)
	}
}

// sendBack releases once and waits for the answer.
func (t *leaseTable) sendBack(lock *Lock, token *int64) (outcome string, err error) {
	r := &leaseReturn{lock: lock, token: token, done: make(chan struct{})}
	t.releasing.add(r)
	<-r.done // at most ioTimeout for each batch before it
	return r.outcome, r.err
}

// fencePatience is how long a release waits for fenced transactions.
const fencePatience = 5 * time.Second

func (t *leaseTable) release(lock *Lock) error {
	give := time.Now().Add(fencePatience)
	for attempt := 0; ; attempt++ {
		outcome, err := t.sendBack(lock, &lock.token)
		switch {
		case err != nil:
			return fmt.Errorf("the lease is left to its expiry: %w", err)
		case outcome == outcomeReleased:
			return nil
		case outcome != outcomeSkipped:
			return fmt.Errorf("%w: it was %s before the release", ErrLost, outcome)
		case time.Now().After(give):
			return fmt.Errorf("a transaction that fenced the lock, or one that has its row locked, is still open after %s; the lease is left to its expiry", fencePatience)
		}
		time.Sleep(defaultBackoff(attempt))
	}
}

// cleanUp gives back, in the background, a grant that nobody got to hear of: at
// once, which session.do makes late enough by ending the backend that may still
// be at it, and once more when the lease would have expired.
func (t *leaseTable) cleanUp(lock *Lock) {
	giveBack := func() {
		if outcome, err := t.sendBack(lock, nil); (err != nil && !errors.Is(err, ErrClosed)) || outcome == outcomeSkipped {
			t.locker.log.Warn("pgxlock: a lease of unknown outcome is left to its expiry", "key", lock.key, "holder", lock.holder, "error", err)
		}
	}
	go giveBack()
	time.AfterFunc(lock.ttl, giveBack)
}

func (t *leaseTable) fence(lock *Lock) (string, []any, error) {
	return statement("fence", t.place.schema), []any{lock.key, lock.holder, lock.token}, nil
}

func (t *leaseTable) renew(ctx context.Context, lock *Lock) error { return t.renewer.now(ctx, lock) }

func (t *leaseTable) keep(lock *Lock) { t.renewer.add(lock) }
func (t *leaseTable) drop(lock *Lock) { t.renewer.remove(lock) }

func (t *leaseTable) close() {
	t.reaping.stop()
	t.renewer.stop()
	t.requests.close()
	t.renewals.close()
}

// housekeeping removes, now and then, leases that nobody released and nobody
// wants. Nothing depends on it.
type housekeeping struct {
	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// reapInterval is about how often each Locker reaps.
const reapInterval = 10 * time.Minute

func (h *housekeeping) start(t *leaseTable) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.timer != nil || h.stopped {
		return
	}
	h.timer = time.AfterFunc(withJitter(reapInterval), func() {
		err := t.do(t.requests, ioTimeout, func(ctx context.Context, conn *pgx.Conn, _ bool) error {
			_, err := conn.Exec(ctx, statement("reap", t.place.schema))
			return err
		})
		if err != nil && !errors.Is(err, ErrClosed) {
			t.locker.log.Warn("pgxlock: reaping expired leases failed", "error", err)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if !h.stopped {
			h.timer.Reset(withJitter(reapInterval))
		}
	})
}

func (h *housekeeping) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = true
	if h.timer != nil {
		h.timer.Stop()
	}
}
