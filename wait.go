package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// This file is how a Locker waits: it asks, and asks again when somebody may
// have released or the holder's lease may have run out.

// acquire is Acquire, TryAcquire and the first half of Do. defaults stand below
// the caller's opts.
func (l *Locker) acquire(ctx context.Context, key string, inDo bool, defaults, opts []Option) (*Lock, error) {
	o := l.backend.options()
	if err := cmp.Or(o.collect(defaults), o.collect(opts), checkKey(key)); err != nil {
		return nil, l.fail("acquire", key, err)
	}
	if ctx.Err() != nil {
		return nil, l.fail("acquire", key, contextError(ctx))
	}
	if l.holds(ctx, key) {
		return nil, l.fail("acquire", key, ErrDeadlock)
	}

	wait, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(l.closing, func() { cancel(ErrClosed) })()
	if o.wait != nil {
		bound := *o.wait
		if o.noWait() {
			bound = ioTimeout
		}
		defer time.AfterFunc(bound, func() { cancel(errNoAnswer) }).Stop()
	}

	var busy *busyError // what the server said last, if it said so at all
	for attempt := 0; ; attempt++ {
		lock, err := l.backend.try(wait, key, o)
		if err == nil {
			err = lock.admit(inDo)
		}
		if err == nil {
			return lock, nil
		}
		if b, ok := errors.AsType[*busyError](err); ok {
			busy = b
		}
		if busy == nil || o.noWait() || !passing(err) {
			return nil, l.fail("acquire", key, gaveUp(ctx, wait, nil, err))
		}
		delay := l.backoff(attempt)
		if busy.remaining > 0 {
			delay = min(delay, busy.remaining)
		}
		if !sleep(wait, delay) {
			return nil, l.fail("acquire", key, gaveUp(ctx, wait, busy, err))
		}
	}
}

// gaveUp makes the error of a call that ends without the lock. wait is ctx with
// what else ends the wait; busy what the server said, if that may be told; last
// what the last try returned.
func gaveUp(ctx, wait context.Context, busy *busyError, last error) error {
	switch {
	case ctx.Err() != nil && busy != nil:
		return &busyError{holder: busy.holder, remaining: busy.remaining, ended: contextError(ctx)}
	case ctx.Err() != nil:
		return contextError(ctx)
	case errors.Is(context.Cause(wait), ErrClosed):
		return ErrClosed
	case busy != nil:
		return busy
	default:
		return last
	}
}

// contextError is ctx's error with its cause.
func contextError(ctx context.Context) error {
	if err, cause := ctx.Err(), context.Cause(ctx); !errors.Is(cause, err) {
		return fmt.Errorf("%w: %w", err, cause)
	}
	return ctx.Err()
}

// passing reports whether what failed with err may do better later: the key is
// busy, or the connection broke, or the server is short of something or restarts.
func passing(err error) bool {
	if _, ok := errors.AsType[*busyError](err); ok {
		return true
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		for _, class := range []string{"08", "53", "57", "55P03"} { // connection, resources, operator, a migration's locks
			if strings.HasPrefix(pgErr.Code, class) {
				return true
			}
		}
		return false
	}
	return !errors.Is(err, ErrSchema) && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrReadOnly)
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// withJitter changes d by up to a quarter, so that processes do not act in step.
func withJitter(d time.Duration) time.Duration {
	return d - d/4 + rand.N(d/2)
}

// defaultBackoff doubles from 10 ms to half a second. The jitter, up to half of
// it, keeps waiters from asking all at once.
func defaultBackoff(attempt int) time.Duration {
	d := 500 * time.Millisecond
	if attempt < 6 {
		d = 10 * time.Millisecond << max(attempt, 0)
	}
	return d - rand.N(d/2)
}
