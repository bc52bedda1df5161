package testkit

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// LongWait is a bound that no test reaches.
const LongWait = pgxlock.MaxWait(10 * time.Minute)

// Seldom is a Backoff so long that a waiter asks only when something wakes it.
func Seldom(int) time.Duration { return time.Hour }

// Waits acquires in the background.
func Waits(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.Option) <-chan *pgxlock.Lock {
	t.Helper()
	granted := make(chan *pgxlock.Lock, 1)
	go func() {
		lock, err := locks.Acquire(t.Context(), key, opts...)
		if err != nil {
			t.Error(err)
		}
		granted <- lock
	}()
	return granted
}

// WaitsForPermit waits in the background; the lock is sent when it is granted.
func WaitsForPermit(t *testing.T, s *pgxlock.Semaphore, key string) <-chan *pgxlock.Lock {
	granted := make(chan *pgxlock.Lock, 1)
	go func() {
		lock, err := s.Acquire(t.Context(), key)
		if err != nil {
			t.Error(err)
		}
		granted <- lock
	}()
	return granted
}

// Listen makes locks wait for other, which makes it listen.
func Listen(t *testing.T, db *pgtest.DB, locks, other *pgxlock.Locker) {
	t.Helper()
	key := fmt.Sprintf("listen %p", locks)
	lock := Acquire(t, other, key)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := locks.Acquire(ctx, key); !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("Acquire: %v", err)
		}
	}()
	UntilQueued(t, db, key, 1)
	cancel()
	<-done
	Release(t, lock)
	pgtest.Until(t, "its ticket is gone", func() bool { return Tickets(t, db, key) == 0 })
}

// Tickets counts those for a key, of either kind, whose processes listen.
func Tickets(t *testing.T, db *pgtest.DB, key string) int {
	t.Helper()
	return Query[int](t, db, "select count(*) from pgxlock_waiters where name in ($1, advisory_lock_key($1)::text) and client is not null", key)
}

// UntilQueued waits until so many tickets stand in the queue of a key.
func UntilQueued(t *testing.T, db *pgtest.DB, key string, n int) {
	t.Helper()
	pgtest.Until(t, fmt.Sprintf("%d tickets for %s", n, key), func() bool { return Tickets(t, db, key) == n })
}

// UntilWaiting waits until the tickets for a key speak for so many callers in all. A Locker
// publishes that number once a second.
func UntilWaiting(t *testing.T, db *pgtest.DB, key string, n int) {
	t.Helper()
	pgtest.Until(t, fmt.Sprintf("%d callers wait for %s", n, key), func() bool {
		return Query[int](t, db, "select coalesce(sum(waiters), 0) from pgxlock_waiters where name in ($1, advisory_lock_key($1)::text)", key) == n
	})
}

// UntilWanted waits until the holder of a key knows that other processes wait for it, where it
// has to: a Locker publishes a ticket for callers that wait for an advisory lock of its own
// only if it does.
func UntilWanted(t *testing.T, db *pgtest.DB, holder *pgxlock.Locker, key string) {
	t.Helper()
	if holder.Kind() != pgxlock.KindAdvisory {
		return
	}
	others := Tickets(t, db, key)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := holder.Acquire(ctx, key); !errors.Is(err, context.Canceled) {
			t.Errorf("Acquire: %v", err)
		}
	}()
	UntilQueued(t, db, key, others+1)
	cancel()
	<-done
	UntilQueued(t, db, key, others)
	pgtest.Until(t, "the waiters that this woke have tried", func() bool {
		return Query[bool](t, db, "select not exists (select from pgxlock_waiters where name = advisory_lock_key($1)::text and woken is not null)", key)
	})
}

// NoTickets waits until no ticket is left.
func NoTickets(t *testing.T, db *pgtest.DB) {
	t.Helper()
	limit := time.Now().Add(5 * time.Second)
	pgtest.Until(t, "no ticket is left", func() bool {
		if time.Now().After(limit) {
			limit = limit.Add(time.Hour)
			t.Log(Query[string](t, db, "select string_agg(concat_ws(' ', kind, name, ticket, client, owner, waiters, clock_timestamp() - since, live_until - clock_timestamp(), woken), e'\n') from pgxlock_waiters"))
		}
		return Query[int](t, db, "select count(*) from pgxlock_waiters") == 0
	})
}

// CountNotifications counts the wake-ups that are sent, by stamps on tickets.
func CountNotifications(t *testing.T, db *pgtest.DB) func() int {
	t.Helper()
	db.Exec(t, `create unlogged table stamps (n bigint);
		create function count_stamp() returns trigger language plpgsql as $$ begin insert into stamps values (new.ticket); return null; end $$;
		create trigger stamps after update on pgxlock_waiters for each row when (old.woken is null and new.woken is not null) execute function count_stamp()`)
	return func() int { return Query[int](t, db, "select count(*) from stamps") }
}

// UntilConnected waits until the Locker has its connections, for which a busy machine may
// need several times as long as it tries each time.
func UntilConnected(t *testing.T, locks *pgxlock.Locker) {
	t.Helper()
	pgtest.Until(t, "the Locker is connected", func() bool {
		lock, err := locks.Acquire(t.Context(), "connect")
		return err == nil && errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())) == nil
	})
}

// EachWaitingKind runs test with each of WaitingKinds. newLocker makes a Locker that listens;
// two Lockers are here what two processes are, because each has connections of its own.
func EachWaitingKind(t *testing.T, test func(t *testing.T, db *pgtest.DB, newLocker func(owner string) *pgxlock.Locker)) {
	t.Helper()
	t.Parallel()
	for kind, newLocker := range WaitingKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := Roomy(t, Migrated(t), 40)
			test(t, db, func(owner string) *pgxlock.Locker {
				t.Helper()
				locks := newLocker(t, db, owner)
				Listen(t, db, locks, newLocker(t, db, "other"))
				return locks
			})
			NoTickets(t, db)
		})
	}
}

// WakeTimeout is how long a woken waiter has before others may pass it. On a busy machine that
// may not be enough.
const WakeTimeout = clock.WakeTimeout
