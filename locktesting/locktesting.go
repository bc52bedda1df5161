package locktesting

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/memory"
)

// A Control decides what happens to the locks of a Locker of [New]. Keys are those of
// [pgxlock.Lock.Key]: permit 3 of the semaphore "jobs" is "jobs#3". A mistake, such as Lose of a
// key that no Lock has, fails the test at once with a message that names the key: call the
// methods in the goroutine of the test. The zero value is not usable.
type Control struct {
	tb     testing.TB
	server *server
}

// closePatience is how long the end of a test waits for calls of Do that still run.
const closePatience = 10 * time.Second

// New returns a Locker without a server, and the Control of its locks. nil means the defaults of
// [pgxlock.LeaseConfig]. Its Schema, OneConnection and Durability concern a server and change
// nothing, so a test can pass the config of its program.
//
// The Locker is closed when the test ends. A config that [pgxlock.NewLeaseLocker] refuses fails
// the test.
func New(tb testing.TB, config *pgxlock.LeaseConfig) (*pgxlock.Locker, *Control) {
	tb.Helper()
	c := &Control{tb: tb}
	made, err := memory.NewLocker(config, func(host hold.Host, lease memory.Lease) hold.Backend {
		c.server = newServer(host, lease)
		return c.server
	})
	if err != nil {
		tb.Fatalf("locktesting: New: %v", err)
	}
	locks := made.(*pgxlock.Locker)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), closePatience)
		defer cancel()
		if err := locks.Close(ctx); err != nil {
			tb.Logf("locktesting: %v", err)
		}
	})
	return locks, c
}

// Lose ends the lock on the key, or all locks that share the key, as when an operator evicts the
// holder or the server has no row of the lease. When Lose returns, the contexts of the lock have
// ended, Lost is closed, Err returns an error that matches [pgxlock.ErrLost] and why, and the key
// is free: the first waiter acquires it, with a higher token. A nil why means that the row of the
// lease is gone; for an eviction wrap [pgxlock.ErrEvicted].
func (c *Control) Lose(key string, why error) {
	c.tb.Helper()
	if err := c.server.lose(key, why, nil); err != nil {
		c.fail("Lose", key, err)
	}
}

// TakeOver is Lose and Hold in one step: no waiter acquires the key before the other process. Use
// it to test a leader that another process replaces.
func (c *Control) TakeOver(key string) (release func()) {
	c.tb.Helper()
	other := newForeign(key)
	if err := c.server.lose(key, nil, other); err != nil {
		c.fail("TakeOver", key, err)
	}
	return func() { c.server.releaseForeign(other) }
}

// Hold makes another process the holder of a free key. Calls that want the key wait, or fail
// with [pgxlock.ErrNotAcquired], until release is called; then the first waiter acquires it. A
// second call of release does nothing.
func (c *Control) Hold(key string) (release func()) {
	c.tb.Helper()
	other := newForeign(key)
	if err := cmp.Or(lockkey.Check(key), c.server.hold(other)); err != nil {
		c.fail("Hold", key, err)
	}
	return func() { c.server.releaseForeign(other) }
}

// Expire makes every further renewal of the locks on the key fail with [pgxlock.ErrUnavailable].
// Each lock stays held until its local deadline and is then lost. The next caller acquires the key
// when the lease has expired on the server, which is the TTL after the last renewal and so a
// margin later, with a higher token. If the lock is released before, nothing is lost.
func (c *Control) Expire(key string) {
	c.tb.Helper()
	if err := c.server.expire(key); err != nil {
		c.fail("Expire", key, err)
	}
}

// Refuse makes the next request for the key fail with err, once. Several calls refuse as many
// requests, in that order. The key of a semaphore's requests is that of the semaphore followed
// by #, as "jobs#".
//
// The Locker treats err as the error of a server. [pgxlock.ErrUnavailable] ends an Acquire that
// has not waited yet, while a waiter and Lead try again; [pgxlock.ErrSchema] ends all of them.
// With an err that matches [pgxlock.ErrNotAcquired] the key is busy for one request: TryAcquire
// fails, and Acquire waits for a moment. No request fails with [pgxlock.ErrLost].
func (c *Control) Refuse(key string, err error) {
	c.tb.Helper()
	var wrong error
	switch {
	case err == nil:
		wrong = errors.New("the error is nil; say with what the request fails")
	case errors.Is(err, pgxlock.ErrLost) || errors.Is(err, pgxlock.ErrReleased):
		wrong = fmt.Errorf("no request fails with %w; Lose ends a lock that is held", err)
	case errors.Is(err, pgxlock.ErrNotAcquired):
		err = &hold.Busy{Holder: foreignID()}
	}
	if wrong = cmp.Or(lockkey.Check(key), wrong); wrong != nil {
		c.fail("Refuse", key, wrong)
	}
	c.server.refuse(key, err)
}

// Delay makes every request from now on take d: acquires, renewals, releases and Holders. 0 is
// the default. A request that has begun keeps its delay. The caller's context ends its wait for
// the answer, and so does [pgxlock.MaxWait], with [pgxlock.ErrUnavailable]. As with a server, no
// request waits longer than 5 seconds for its answer, and no renewal longer than half of the TTL:
// TryAcquire and Release fail then, Acquire asks again for 50 seconds in all, and a lock that
// cannot be renewed is lost.
func (c *Control) Delay(d time.Duration) {
	c.tb.Helper()
	if d < 0 {
		c.tb.Fatalf("locktesting: Delay: %s is negative", d)
	}
	c.server.setDelay(d)
}

func (c *Control) fail(command, key string, err error) {
	c.tb.Helper()
	c.tb.Fatalf("locktesting: %s %s: %v", command, lockkey.Shown(key), err)
}
