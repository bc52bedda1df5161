// Package ratelimit limits how often events happen, for each key and over all processes
// that use the same database. Its methods are named as in golang.org/x/time/rate.
//
//	limiter, err := ratelimit.New(pool, 10, 20, nil) // 10 events per second, 20 at once
//
//	ok, err := limiter.Allow(ctx, "api:alice")
//
// # Choosing a call
//
//	drop or refuse what is too much       Limiter.Allow
//	wait until the event may happen       Limiter.Wait
//	count now, do it later                Limiter.Reserve
//	say how long to wait                  Limiter.Reserve with pgxlock.NoWait
//	test without a server                 NewMemory
//
// # Connections
//
// A [Limiter] has one connection of its own and one statement in flight; requests that
// arrive meanwhile share the next one. [NewMemory] counts in this process.
package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/observe"
)

// ErrLimited means that the call exceeds the limit. RetryAfter in the [*pgxlock.Error] is how long to
// wait until it would not. After a wait that ended with its context the error matches the
// context's error as well.
var ErrLimited = lockerr.ErrLimited

// Limit is a rate: events per second.
type Limit float64

// Every returns the Limit of one event per interval.
func Every(interval time.Duration) Limit {
	if interval <= 0 {
		return Limit(math.Inf(1))
	}
	return 1 / Limit(interval.Seconds())
}

// A Limiter limits how often events happen, for each key and over all processes that share
// the database: limit events per second on average, and at most burst of them at once. Its
// methods are named as in golang.org/x/time/rate: Allow drops excess events, Reserve
// postpones them, and Wait waits. Most callers should use Wait.
//
// Each key has a bucket that holds burst events, is full at first, and refills with limit
// events per second: in any t seconds at most burst + limit × t events happen, so with a limit
// of 10 and a burst of 20 there may be 30 in the first second. Each decision is one statement, by the server's clock alone;
// concurrent requests of a process share a statement.
//
// Limiters, and callers of the SQL functions allow_rate and reserve_rate, share the bucket
// of a key. Use the same limit and burst everywhere for one key: different limits do not
// add up. A call is refused if the bucket, without its events, would take longer to refill
// than the caller's whole burst takes. So the caller whose burst takes longer to refill goes
// on while the other is refused, and can starve it.
//
// If the server crashes or a standby is promoted, the buckets are forgotten: each key may
// then have one burst too many. If a connection breaks during a call, the events may count
// twice. While the server cannot be reached no decision is made: the call returns an error,
// and the caller chooses whether to go on.
//
// A Limiter is safe for concurrent use. The zero value is not usable.
type Limiter struct {
	rule    rule
	backend backend
	observe func(context.Context, pgxlock.Event) // nil: nobody
	log     *slog.Logger                         // of observe

	calls     batcher.Calls
	closeOnce sync.Once
	closed    chan struct{} // closed when the connection has gone
}

// Config configures a [Limiter]. A nil *Config means the defaults.
type Config struct {
	// Owner is shown to operators in the application_name of the connection. Up to
	// 200 characters, not beginning with "*". Default host:pid.
	Owner string

	// Schema is where the migrations were run. To name it is to trust its owner, see
	// [pgxlock.LeaseConfig]. Default: as there.
	Schema string

	// Logger receives what no call can return: housekeeping that failed. Default: nothing
	// is logged.
	Logger *slog.Logger

	// Observe receives a [pgxlock.Event] with EventLimit for each call of Allow, Reserve
	// and Wait, before the call returns. See Event for what it may do. Default: nobody
	// receives them.
	Observe func(context.Context, pgxlock.Event)
}

// backend is where a Limiter's buckets are.
type backend interface {
	// ask settles each of the requests, in order, now or later.
	ask(requests ...*request)

	// close ends the traffic after what is under way.
	close()
}

// New returns a Limiter of limit events per second, up to burst at once, for each key.
// limit is more than 0 and at most a million. burst is at least 1, and at most as many as
// limit allows in 100 years.
//
// The Limiter uses only the pool's configuration. It opens one connection of its own, at
// its first use; [Limiter.Close] closes it. It needs the migrations ([pgxlock.ErrSchema]).
func New(pool *pgxpool.Pool, limit Limit, burst int, cfg *Config) (*Limiter, error) {
	r, err := newRule(limit, burst)
	if err != nil {
		return nil, fail("new", "", err)
	}
	if pool == nil {
		return nil, fail("new", "", errors.New("the pool is nil; make one with pgxpool.New"))
	}
	l := newLimiter(r)
	if l.backend, err = newTable(l.calls.Closing(), pool.Config(), r, cfg); err != nil {
		return nil, fail("new", "", err)
	}
	if cfg != nil {
		l.observe, l.log = cfg.Observe, cfg.Logger
	}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	return l, nil
}

// NewMemory returns a Limiter that keeps its buckets in the memory of this process. Use it
// in unit tests, also in testing/synctest bubbles, and in programs that run alone. It
// behaves as a Limiter of [New] whose server always answers.
func NewMemory(limit Limit, burst int) (*Limiter, error) {
	r, err := newRule(limit, burst)
	if err != nil {
		return nil, fail("new", "", err)
	}
	l := newLimiter(r)
	l.backend = newMemory(r)
	return l, nil
}

// begin counts a call under ctx, which calls.End ends.
func (l *Limiter) begin(ctx context.Context) error {
	if err := missing(ctx, l == nil, "the Limiter is nil; make one with ratelimit.New"); err != nil {
		return err
	}
	return l.calls.Begin()
}

// newLimiter makes a Limiter that still lacks its backend.
func newLimiter(r rule) *Limiter {
	return &Limiter{rule: r, calls: batcher.NewCalls(), closed: make(chan struct{})}
}

// Allow reports whether an event may happen now, and counts it if so. Use it to drop or
// refuse excess events. To learn how long to wait, use Reserve with [pgxlock.NoWait]: its
// error says.
func (l *Limiter) Allow(ctx context.Context, key string) (bool, error) { return l.AllowN(ctx, key, 1) }

// AllowN is Allow for n events: all of them or none. n is between 1 and the burst.
func (l *Limiter) AllowN(ctx context.Context, key string, n int) (bool, error) {
	_, err := l.take(ctx, "allow", key, n, pgxlock.NoWait)
	if errors.Is(err, ErrLimited) {
		return false, nil
	}
	return err == nil, err
}

// Reserve counts an event that will happen later, after the Delay of the Reservation.
// Events are served first come, first served. With [pgxlock.MaxWait], if the delay would be
// longer, Reserve counts nothing and fails with [ErrLimited]; RetryAfter in the
// [*pgxlock.Error] says after how long the event could happen. ctx is for the call only.
// MaxWait is the only option.
//
//	_, err := limiter.Reserve(ctx, "login:"+user, pgxlock.NoWait)
//	if e, ok := errors.AsType[*pgxlock.Error](err); ok && errors.Is(err, ratelimit.ErrLimited) {
//		return tooManyRequests(e.RetryAfter)
//	}
func (l *Limiter) Reserve(ctx context.Context, key string, opts ...pgxlock.MaxWait) (*Reservation, error) {
	return l.ReserveN(ctx, key, 1, opts...)
}

// ReserveN is Reserve for n events that happen together. n is between 1 and the burst.
func (l *Limiter) ReserveN(ctx context.Context, key string, n int, opts ...pgxlock.MaxWait) (*Reservation, error) {
	return l.take(ctx, "reserve", key, n, opts...)
}

// Wait waits until an event may happen. Waiters are served first come, first served, over
// all processes. If the wait would last longer than ctx's deadline or a [pgxlock.MaxWait]
// allows, Wait returns [ErrLimited] at once and counts nothing. If ctx ends during
// the wait, the event is returned as by [Reservation.Cancel], and the error matches
// [ErrLimited] and ctx's error. If the Limiter is closed during the wait, the error
// is [pgxlock.ErrClosed]. MaxWait is the only option.
func (l *Limiter) Wait(ctx context.Context, key string, opts ...pgxlock.MaxWait) error {
	return l.WaitN(ctx, key, 1, opts...)
}

// WaitN is Wait for n events that happen together. n is between 1 and the burst.
func (l *Limiter) WaitN(ctx context.Context, key string, n int, opts ...pgxlock.MaxWait) (err error) {
	if err := l.begin(ctx); err != nil {
		return fail("wait", key, err)
	}
	defer l.calls.End()
	if err := l.check(ctx, key, n); err != nil {
		return fail("wait", key, err)
	}
	until, _ := ctx.Deadline()
	o := l.observeCall(ctx, key, n)
	defer func() { o.over(err) }()
	r, err := l.ask(ctx, "wait", key, n, until, opts...)
	if err != nil {
		return err
	}
	delay := r.Delay()
	if delay <= 0 {
		return nil
	}
	switch closed, ended := clock.Rest(ctx, delay, l.calls.Closing().Done()); {
	case ended:
		l.backend.ask(r.back())
		return fail("wait", key, fmt.Errorf("%w: %w", &limitedError{rule: l.rule, after: max(r.Delay(), 0)}, lockerr.ContextError(ctx)))
	case closed:
		l.backend.ask(r.back())
		return fail("wait", key, lockerr.ErrClosed)
	}
	return nil
}

// Close refuses new calls, ends running waits with [pgxlock.ErrClosed], and closes the
// connection. It waits for that until ctx ends, and then returns ctx's error; the rest
// happens in the background, in bounded time. Counted events stay counted.
func (l *Limiter) Close(ctx context.Context) error {
	if err := missing(ctx, l == nil, "the Limiter is nil; make one with ratelimit.New"); err != nil {
		return fail("close", "", err)
	}
	l.closeOnce.Do(func() {
		l.calls.Close()
		go func() {
			defer close(l.closed)
			l.calls.Wait()
			l.backend.close()
		}()
	})
	select {
	case <-l.closed:
		return nil
	case <-ctx.Done():
		return fail("close", "", lockerr.ContextError(ctx))
	}
}

// take is a call that asks for n events and does not wait for them.
func (l *Limiter) take(ctx context.Context, op, key string, n int, opts ...pgxlock.MaxWait) (*Reservation, error) {
	if err := l.begin(ctx); err != nil {
		return nil, fail(op, key, err)
	}
	defer l.calls.End()
	if err := l.check(ctx, key, n); err != nil {
		return nil, fail(op, key, err)
	}
	o := l.observeCall(ctx, key, n)
	r, err := l.ask(ctx, op, key, n, time.Time{}, opts...)
	o.over(err)
	return r, err
}

// check returns what is wrong with a call.
func (l *Limiter) check(ctx context.Context, key string, n int) error {
	return cmp.Or(lockkey.Check(key), l.rule.check(n), endedError(ctx))
}

// An observedCall is the event of one call. A nil one tells nobody.
type observedCall struct {
	limiter *Limiter
	ctx     context.Context
	event   pgxlock.Event
	began   time.Time
}

func (l *Limiter) observeCall(ctx context.Context, key string, n int) *observedCall {
	if l.observe == nil {
		return nil
	}
	return &observedCall{l, ctx, pgxlock.Event{Op: pgxlock.EventLimit, Key: key, Call: observe.Call(), N: n}, time.Now()}
}

// over tells that the call returns that error.
func (o *observedCall) over(err error) {
	if o == nil {
		return
	}
	e := o.event
	e.Time, e.Granted, e.Err = time.Now(), err == nil, err
	e.Wait = e.Time.Sub(o.began)
	observe.Tell(o.ctx, o.limiter.log, o.limiter.observe, e)
}

// ask asks for n events that happen until then, if that is not zero.
func (l *Limiter) ask(ctx context.Context, op, key string, n int, until time.Time, opts ...pgxlock.MaxWait) (*Reservation, error) {
	bounded := len(opts) > 0
	var bound time.Duration
	if bounded {
		bound = time.Duration(opts[len(opts)-1]) // the last one counts, as of a lock's options
	}
	r := &request{key: key, n: n, noWait: bounded && bound <= 0, until: until, Future: batcher.NewFuture()}
	wait := ctx
	if r.noWait {
		bound = dbconn.Timeout // a call that waits for no event must not wait long for the server
	} else if latest := time.Now().Add(bound); bounded && (until.IsZero() || latest.Before(until)) {
		r.until = latest
	}
	if bounded {
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeoutCause(ctx, bound, lockerr.ErrNoAnswer)
		defer cancel()
	}
	l.backend.ask(r)
	err := r.Await(wait, nil)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, fail(op, key, lockerr.ContextError(ctx))
	case err != nil:
		return nil, fail(op, key, err)
	case !r.got.Granted:
		return nil, fail(op, key, &limitedError{rule: l.rule, after: r.got.Delay})
	}
	return &Reservation{limiter: l, key: key, n: n, tat: r.got.TAT, act: time.Now().Add(r.got.Delay)}, nil
}

// endedError says that ctx has ended.
func endedError(ctx context.Context) error {
	if ctx.Err() != nil {
		return lockerr.ContextError(ctx)
	}
	return nil
}

// A Reservation is events that were counted, and may happen after a delay.
type Reservation struct {
	limiter  *Limiter
	key      string
	n        int
	tat      int64
	act      time.Time
	canceled atomic.Bool
}

// Delay is how long to wait from now before the events may happen. If it is zero or less,
// they may happen now. It counts from the arrival of the server's answer.
func (r *Reservation) Delay() time.Duration {
	if r == nil {
		return 0
	}
	return time.Until(r.act)
}

// Cancel says that the events will not happen. It returns them to the bucket unless later
// reservations of the key exist: those keep their promised times, and with the returned
// events too many could happen at once. Events that the bucket has refilled meanwhile are
// not returned again. Once the [Reservation.Delay] is over the events may have happened,
// and Cancel does nothing, so it is safe to defer. For a Reservation without a delay it
// never does anything. ctx ends only the wait for the answer; the request continues. If
// Cancel fails, the events stay counted. A second Cancel does nothing.
func (r *Reservation) Cancel(ctx context.Context) error {
	if err := missing(ctx, r == nil, "the Reservation is nil; it is there only if Reserve returned no error"); err != nil {
		return fail("cancel", "", err)
	}
	if r.Delay() <= 0 || !r.canceled.CompareAndSwap(false, true) {
		return nil
	}
	if err := r.limiter.begin(ctx); err != nil {
		return fail("cancel", r.key, err)
	}
	defer r.limiter.calls.End()
	back := r.back()
	r.limiter.backend.ask(back)
	err := back.Await(ctx, nil)
	if err != nil && ctx.Err() != nil {
		err = lockerr.ContextError(ctx)
	}
	return fail("cancel", r.key, err)
}

// back is what asks to give the events back, which have surely not happened.
func (r *Reservation) back() *request {
	return &request{key: r.key, n: r.n, unused: &r.tat, Future: batcher.NewFuture()}
}

// limitedError says that a limit is exceeded, and for how long.
type limitedError struct {
	rule  rule
	after time.Duration
}

func (e *limitedError) Error() string {
	return fmt.Sprintf("%v: %v per second, %d at once; try again in %s", ErrLimited, float64(e.rule.limit), e.rule.burst, e.after)
}

func (e *limitedError) Unwrap() error { return ErrLimited }

// fail makes the error that a call returns; nil of nil.
func fail(op, key string, err error) error {
	if err == nil {
		return nil
	}
	e := &pgxlock.Error{Op: op, Key: key, Err: lockerr.Typed(err)}
	if limited, ok := errors.AsType[*limitedError](err); ok {
		e.RetryAfter = limited.after
	}
	return e
}

// missing returns what keeps a method from doing anything: a nil receiver, or a nil context.
func missing(ctx context.Context, isNil bool, says string) error {
	if isNil {
		return errors.New(says)
	}
	return lockerr.MissingContext(ctx)
}
