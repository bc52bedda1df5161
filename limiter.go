package pgxlock

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

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// Limit is how often something may happen: events per second.
type Limit float64

// Every returns the Limit of one event per interval.
func Every(interval time.Duration) Limit {
	if interval <= 0 {
		return Limit(math.Inf(1))
	}
	return 1 / Limit(interval.Seconds())
}

// A Limiter says how often something may happen, for all processes that share the
// database together: for each key limit events per second on average, and at most
// burst of them at once. It has the words of golang.org/x/time/rate: drop what is
// too much with Allow, do it later with Reserve, and wait with Wait. Most callers
// should use Wait.
//
// It is a bucket for each key that holds burst events, fills with limit of them per
// second, and is full at first. Each decision is one statement, by the clock of the
// server alone; what a process asks for at the same time goes into one. Limiters,
// and callers of the SQL functions allow_rate and reserve_rate, share the bucket of
// a key, each taking from it by its own limit and burst. So different ones on one key
// do not add up: the greater goes on when the smaller is refused, and what it takes
// weighs on the smaller as much longer as its own events would have taken less time.
//
// What was taken is forgotten when the server crashes or a standby is promoted: each
// key may then have one burst too many. What a caller takes whose connection breaks
// may count twice. No decision is made while the server cannot be reached: a call
// returns an error, and whether to go on without is the caller's choice.
//
// A Limiter is safe for concurrent use. The zero value is of no use.
type Limiter struct {
	rule    limitRule
	backend limitBackend

	calls     batcher.Calls
	closeOnce sync.Once
	closed    chan struct{} // closed when the connection has gone
}

// LimiterConfig is what a [Limiter] needs to know beside its limit. A nil
// *LimiterConfig means the defaults.
type LimiterConfig struct {
	// Owner is shown to operators in the application_name of the connection. Up to
	// 200 characters, not beginning with "*". Default host:pid.
	Owner string

	// Schema is where the migrations were run. Default: the schema in which
	// acquire_lock is found by the search_path of a new connection, else the only
	// one in the database that has pgxlock.
	Schema string

	// Logger gets what no caller is told: housekeeping that failed. Default:
	// nothing is logged.
	Logger *slog.Logger
}

// limitBackend is where a Limiter's buckets are.
type limitBackend interface {
	// ask settles each of the requests, in order, now or later.
	ask(requests ...*limitRequest)

	// close ends the traffic after what is under way.
	close()
}

// NewLimiter returns a Limiter of limit events per second, up to burst at once, for
// each key. limit is more than 0 and at most a million, burst at least 1 and at most
// what limit gives in 100 years.
//
// The pool gives its configuration only: the Limiter has one connection of its own.
// Nothing is sent before the first use. It needs the migrations ([ErrSchema]).
// [Limiter.Close] ends the connection.
func NewLimiter(pool *pgxpool.Pool, limit Limit, burst int, cfg *LimiterConfig) (*Limiter, error) {
	rule, err := newLimitRule(limit, burst)
	if err != nil {
		return nil, fail("new", "", 0, err)
	}
	if pool == nil {
		return nil, fail("new", "", 0, errors.New("the pool is nil; make one with pgxpool.New"))
	}
	table, err := newLimitTable(pool.Config(), rule, cfg)
	if err != nil {
		return nil, fail("new", "", 0, err)
	}
	return newLimiter(rule, table), nil
}

// NewMemoryLimiter returns a Limiter whose buckets are in the memory of this process:
// for a program's own unit tests, also in [testing/synctest] bubbles, and for
// programs that run alone. It keeps the contract of [NewLimiter], but that nothing of
// it can fail.
func NewMemoryLimiter(limit Limit, burst int) (*Limiter, error) {
	rule, err := newLimitRule(limit, burst)
	if err != nil {
		return nil, fail("new", "", 0, err)
	}
	return newLimiter(rule, newLimitMemory(rule)), nil
}

// begin counts a call under ctx, which calls.End ends.
func (l *Limiter) begin(ctx context.Context) error {
	if err := missing(ctx, l); err != nil {
		return err
	}
	return l.calls.Begin()
}

func newLimiter(rule limitRule, backend limitBackend) *Limiter {
	return &Limiter{rule: rule, backend: backend, calls: batcher.NewCalls(), closed: make(chan struct{})}
}

// Allow reports whether an event may happen now, and counts it if so. Use it to drop
// or refuse what comes too often; to tell how long to stay away, use Reserve with
// [NoWait], whose error does.
func (l *Limiter) Allow(ctx context.Context, key string) (bool, error) { return l.AllowN(ctx, key, 1) }

// AllowN is Allow for n events: all of them or none. n is between 1 and the burst.
func (l *Limiter) AllowN(ctx context.Context, key string, n int) (bool, error) {
	_, err := l.take(ctx, "allow", key, n, time.Time{}, NoWait)
	if errors.Is(err, ErrLimited) {
		return false, nil
	}
	return err == nil, err
}

// Reserve counts an event that will happen later, after the Delay of the
// Reservation: first come, first served. With [MaxWait] nothing is counted if the
// delay would be longer: the error is then [ErrLimited], and RetryAfter in the
// [*Error] says after how long it could happen. ctx is for the call only. Of the
// options only MaxWait has a meaning here.
//
//	_, err := limiter.Reserve(ctx, "login:"+user, pgxlock.NoWait)
//	if e, ok := errors.AsType[*pgxlock.Error](err); ok && errors.Is(err, pgxlock.ErrLimited) {
//		return tooManyRequests(e.RetryAfter)
//	}
func (l *Limiter) Reserve(ctx context.Context, key string, opts ...Option) (*Reservation, error) {
	return l.ReserveN(ctx, key, 1, opts...)
}

// ReserveN is Reserve for n events that happen together. n is between 1 and the burst.
func (l *Limiter) ReserveN(ctx context.Context, key string, n int, opts ...Option) (*Reservation, error) {
	return l.take(ctx, "reserve", key, n, time.Time{}, opts...)
}

// Wait waits until an event may happen: first come, first served, over all
// processes. If that would be after ctx's deadline, or longer than a [MaxWait], it
// returns [ErrLimited] at once, and nothing is counted. If ctx ends while it waits,
// the event is given back as by [Reservation.Cancel], and the error matches ErrLimited
// and ctx's error; if the Limiter is closed, [ErrClosed]. Of the options only MaxWait
// has a meaning here.
func (l *Limiter) Wait(ctx context.Context, key string, opts ...Option) error {
	return l.WaitN(ctx, key, 1, opts...)
}

// WaitN is Wait for n events that happen together. n is between 1 and the burst.
func (l *Limiter) WaitN(ctx context.Context, key string, n int, opts ...Option) error {
	if err := l.begin(ctx); err != nil {
		return fail("wait", key, 0, err)
	}
	defer l.calls.End()
	until, _ := ctx.Deadline()
	r, err := l.take(ctx, "wait", key, n, until, opts...)
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
		return fail("wait", key, 0, fmt.Errorf("%w: %w", &limitedError{rule: l.rule, after: max(r.Delay(), 0)}, lockerr.ContextError(ctx)))
	case closed:
		l.backend.ask(r.back())
		return fail("wait", key, 0, ErrClosed)
	}
	return nil
}

// Close refuses new calls, ends the waits that are under way with [ErrClosed], and
// ends the connection. It waits for that until ctx ends, and returns ctx's error
// then; the rest goes on in the background, in bounded time. What was counted stays.
func (l *Limiter) Close(ctx context.Context) error {
	if err := missing(ctx, l); err != nil {
		return fail("close", "", 0, err)
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
		return fail("close", "", 0, lockerr.ContextError(ctx))
	}
}

// takenByLimiters tells which options the calls of a Limiter can honour.
func takenByLimiters(opt Option) bool {
	_, taken := opt.(MaxWait)
	return taken
}

// take asks for n events that happen until then, if that is not zero.
func (l *Limiter) take(ctx context.Context, op, key string, n int, until time.Time, opts ...Option) (*Reservation, error) {
	if err := l.begin(ctx); err != nil {
		return nil, fail(op, key, 0, err)
	}
	defer l.calls.End()
	var o options
	err := cmp.Or(lockkey.Check(key), l.rule.check(n), o.collect(opts, takenByLimiters), endedError(ctx))
	if err != nil {
		return nil, fail(op, key, 0, err)
	}
	r := &limitRequest{key: key, n: n, noWait: o.noWait(), until: until, Future: batcher.NewFuture()}
	wait := ctx
	if o.wait != nil && !r.noWait {
		if bound := time.Now().Add(*o.wait); until.IsZero() || bound.Before(until) {
			r.until = bound
		}
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeoutCause(ctx, *o.wait, lockerr.ErrNoAnswer)
		defer cancel()
	}
	l.backend.ask(r)
	err = r.Await(wait)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, fail(op, key, 0, lockerr.ContextError(ctx))
	case err != nil:
		return nil, fail(op, key, 0, err)
	case !r.got.Granted:
		return nil, fail(op, key, 0, &limitedError{rule: l.rule, after: r.got.Delay})
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

// Delay is how long to wait from now before the events may happen; zero or less: not
// any more. It counts from when the answer of the server arrived.
func (r *Reservation) Delay() time.Duration {
	if r == nil {
		return 0
	}
	return time.Until(r.act)
}

// Cancel says that the events will not happen, and gives them back if nobody has taken
// events of the key behind them: who did keeps the promised time, and with it there
// could be too many at once. What the bucket has filled meanwhile is not given back
// again. Once the [Reservation.Delay] is over the events may have happened, and Cancel
// does nothing: so it may be deferred. For a Reservation without a delay it never does
// anything. It is not stopped by ctx, which ends the wait for the answer only. If it
// fails, the events stay counted. A second Cancel does nothing.
func (r *Reservation) Cancel(ctx context.Context) error {
	if err := missing(ctx, r); err != nil {
		return fail("cancel", "", 0, err)
	}
	if r.Delay() <= 0 || !r.canceled.CompareAndSwap(false, true) {
		return nil
	}
	if err := r.limiter.begin(ctx); err != nil {
		return fail("cancel", r.key, 0, err)
	}
	defer r.limiter.calls.End()
	back := r.back()
	r.limiter.backend.ask(back)
	err := back.Await(ctx)
	if err != nil && ctx.Err() != nil {
		err = lockerr.ContextError(ctx)
	}
	return fail("cancel", r.key, 0, err)
}

// back is what asks to give the events back, which have surely not happened.
func (r *Reservation) back() *limitRequest {
	return &limitRequest{key: r.key, n: r.n, unused: &r.tat, Future: batcher.NewFuture()}
}

// limitedError says that a limit is exceeded, and for how long.
type limitedError struct {
	rule  limitRule
	after time.Duration
}

func (e *limitedError) Error() string {
	return fmt.Sprintf("%v to %v per second, %d at once; try again in %s", ErrLimited, float64(e.rule.limit), e.rule.burst, e.after)
}

func (e *limitedError) Unwrap() error { return ErrLimited }
