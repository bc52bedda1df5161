package pgxlock

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/place"
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

// minRenew keeps a forgotten unit from becoming a storm of renewals.
const minRenew = 100 * time.Millisecond

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
	if cfg.Renew < minRenew || cfg.Renew > cfg.TTL/3 {
		return cfg, fmt.Errorf("LeaseConfig.Renew is %s, it must be between %s and a third of the TTL, %s", cfg.Renew, minRenew, cfg.TTL/3)
	}
	if err := place.CheckName(cfg.Schema); err != nil {
		return cfg, fmt.Errorf("LeaseConfig.Schema %.80q %w", cfg.Schema, err)
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
	l := newLocker(Lease, now, cfg.Backoff, cfg.Logger)
	t := &leaseTable{locker: l, cfg: cfg, place: installation{asked: cfg.Schema}}
	t.requests, t.renewals = t.newSession(pool.Config()), t.newSession(pool.Config())
	t.acquiring = combiner[*leaseRequest]{limit: maxRequests, run: t.acquire, fail: failRequests}
	t.releasing = combiner[*leaseReturn]{limit: maxRequests, run: t.giveBack, fail: failReturns}
	t.renewer = newRenewer(t)
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
	renewer   *renewer
	reaping   housekeeping
	cleaning  background
}

func (t *leaseTable) newSession(config *pgxpool.Config) *session {
	return &session{name: fmt.Sprintf("pgxlock %.50s", t.cfg.Owner), config: config, place: &t.place}
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

func failRequests(requests []*leaseRequest, err error) {
	for _, r := range requests {
		r.answer(err)
	}
}

// errLateGrant means that the grant took longer to arrive than it lasts.
var errLateGrant = errors.New("the grant arrived after its deadline, and was given back")

// acquire sends a batch of requests.
func (t *leaseTable) acquire(requests []*leaseRequest) error {
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
		return nil
	}

	type grant struct {
		Acquired    bool
		Token       *int64
		HeldBy      *string
		RemainingMS *int64
	}
	var grants []grant
	var asked, second bool
	var sent time.Duration
	err := t.requests.do(ioTimeout, func(ctx context.Context, q querier, again bool) (err error) {
		asked, second, sent = true, again, t.locker.now()
		grants, err = pgx.CollectRows(q.query(ctx, t.place.statement("acquire"), names, holders, ttls, metadata), pgx.RowToStructByPos[grant])
		return err
	})
	if err == nil && len(grants) != len(batch) {
		err = fmt.Errorf("%d answers for %d requests", len(grants), len(batch))
	}
	if spoilt(err) && len(batch) > 1 {
		for _, r := range batch { // one of them spoils it: find out which
			if err := t.acquire([]*leaseRequest{r}); err != nil {
				return err
			}
		}
		return nil
	}
	for i, r := range batch {
		switch {
		case err != nil:
			if asked && (second || !refused(err)) {
				t.discard(r.lock) // it may have been granted
			}
			r.answer(err)
		case !grants[i].Acquired:
			if second {
				t.discard(r.lock) // the first attempt may have been granted, and be in our own way
			}
			busy := &busyError{}
			if holder := grants[i].HeldBy; holder != nil && *holder != r.lock.holder {
				busy.holder = *holder
			}
			if ms := grants[i].RemainingMS; ms != nil {
				busy.remaining = time.Duration(*ms) * time.Millisecond
			}
			r.answer(busy)
		case !r.lock.granted(*grants[i].Token, sent):
			t.discard(r.lock)
			r.answer(errLateGrant)
		case !r.answer(nil):
			t.discard(r.lock)
		}
	}
	if err != nil && !t.requests.reached() {
		return err
	}
	t.reaping.start(t)
	return nil
}

// refused reports whether err is the server's word that nothing was done. A
// FATAL error may come after a commit.
func refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.SeverityUnlocalized == "ERROR"
}

// spoilt reports whether err may be about one entry only: bad input, a token that
// does not fit its row, or more locks than the server has room for.
func spoilt(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && refused(err) && (strings.HasPrefix(pgErr.Code, "22") || pgErr.Code == stateTokensNeedRepair || pgErr.Code == stateOutOfMemory)
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

func failReturns(returns []*leaseReturn, err error) {
	for _, r := range returns {
		r.err = err
		close(r.done)
	}
}

// giveBack sends a batch of releases.
func (t *leaseTable) giveBack(returns []*leaseReturn) error {
	names := make([]string, len(returns))
	holders := make([]string, len(returns))
	tokens := make([]*int64, len(returns))
	for i, r := range returns {
		names[i], holders[i], tokens[i] = r.lock.key, r.lock.holder, r.token
	}
	var outcomes []string
	var second bool
	err := t.requests.do(ioTimeout, func(ctx context.Context, q querier, again bool) (err error) {
		second = again
		outcomes, err = pgx.CollectRows(q.query(ctx, t.place.statement("release"), names, holders, tokens), pgx.RowTo[string])
		return err
	})
	if err == nil && len(outcomes) != len(returns) {
		err = fmt.Errorf("%d answers for %d releases", len(outcomes), len(returns))
	}
	if err != nil {
		failReturns(returns, err)
		if t.requests.reached() {
			return nil
		}
		return err
	}
	for i, r := range returns {
		r.outcome = outcomes[i]
		if second && r.outcome == outcomeGone {
			r.outcome = outcomeReleased // by the first attempt, whose answer was lost
		}
		close(r.done)
	}
	return nil
}

// sendBack releases once and waits for the answer.
func (t *leaseTable) sendBack(lock *Lock, token *int64) (outcome string, err error) {
	r := &leaseReturn{lock: lock, token: token, done: make(chan struct{})}
	t.releasing.add(r)
	<-r.done // in bounded time: a batch under way, and ours
	return r.outcome, r.err
}

// releasePatience is how long a release is tried while fenced transactions are
// open or the server is away.
const releasePatience = 5 * time.Second

func (t *leaseTable) release(lock *Lock) error { return t.handBack(lock, &lock.token) }

// handBack releases, and tries again while that may help.
func (t *leaseTable) handBack(lock *Lock, token *int64) error {
	giveUp := time.Now().Add(releasePatience)
	unknown := false // an attempt may have gone through
	for attempt := 0; ; attempt++ {
		outcome, err := t.sendBack(lock, token)
		late := time.Now().After(giveUp)
		switch {
		case err != nil && (late || !passing(err)):
			return fmt.Errorf("the lease is left to its expiry: %w", err)
		case err != nil:
			unknown = true
		case outcome == outcomeReleased || outcome == outcomeExpired || unknown && outcome == outcomeGone:
			return nil // expired: it was ours until Release was called, and nobody had it since
		case outcome == outcomeGone:
			return fmt.Errorf("%w: it was gone before the release", ErrLost)
		case late:
			return fmt.Errorf("a transaction that fenced the lock, or one that has its row locked, is still open after %s; the lease is left to its expiry", releasePatience)
		}
		time.Sleep(defaultBackoff(attempt))
	}
}

// discard gives back, in the background, a grant that nobody got to hear of or
// believes in: at once, which session.do makes late enough by ending the backend
// that may still be at it, and once more when the lease would have expired.
func (t *leaseTable) discard(lock *Lock) {
	t.cleaning.run(func() {
		err := t.handBack(lock, nil)
		if err == nil || errors.Is(err, ErrLost) { // lost: there is nothing
			return
		}
		t.locker.log.Warn("pgxlock: a lease of unknown outcome is left to its expiry", "key", lock.key, "holder", lock.holder, "error", err)
		time.AfterFunc(lock.ttl, func() { _, _ = t.sendBack(lock, nil) })
	})
}

func (t *leaseTable) fence(lock *Lock) (string, []any, error) {
	return t.place.statement("fence"), []any{lock.key, lock.holder, lock.token}, nil
}

func (t *leaseTable) renew(ctx context.Context, lock *Lock) error { return t.renewer.renew(ctx, lock) }
func (t *leaseTable) check(lock *Lock)                            { t.renewer.soon(lock) }
func (t *leaseTable) keep(lock *Lock)                             { t.renewer.add(lock) }
func (t *leaseTable) drop(lock *Lock)                             { t.renewer.remove(lock) }

func (t *leaseTable) close(ctx context.Context) error {
	t.reaping.stop()
	err := until(ctx, func() {
		<-t.acquiring.done() // a grant under way, whose caller has left,
		t.cleaning.wait()    // is given back
	})
	t.renewer.stop()
	t.requests.close()
	t.renewals.close()
	return err
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
		err := t.requests.do(ioTimeout, func(ctx context.Context, q querier, _ bool) error {
			return q.exec(ctx, t.place.statement("reap"))
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
