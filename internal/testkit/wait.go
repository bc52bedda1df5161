package testkit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// LongWait is a bound that no test reaches.
const LongWait = pgxlock.MaxWait(10 * time.Minute)

// TTL is that of leases and sessions whose end is not what a test is about: no machine stands
// still for so long.
const TTL = 10 * time.Minute

// Renew is how often leases with that TTL are renewed.
const Renew = 10 * time.Second

// Seldom is a Backoff so long that a waiter asks only when something wakes it.
func Seldom(int) time.Duration { return time.Hour }

// Waits acquires in the background.
func Waits(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) <-chan *pgxlock.Lock {
	return granted(t, func() (*pgxlock.Lock, error) { return locks.Acquire(t.Context(), key, opts...) })
}

// WaitsForPermit waits in the background; the lock is sent when it is granted.
func WaitsForPermit(t *testing.T, s *pgxlock.Semaphore, key string) <-chan *pgxlock.Lock {
	return granted(t, func() (*pgxlock.Lock, error) { return s.Acquire(t.Context(), key) })
}

func granted(t *testing.T, acquire func() (*pgxlock.Lock, error)) <-chan *pgxlock.Lock {
	granted := make(chan *pgxlock.Lock, 1)
	go func() {
		lock, err := acquire()
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
	if err := listenFor(t.Context(), db.Pool, locks, key); err != nil {
		t.Fatal(err)
	}
	Release(t, lock)
}

// Hear makes locks listen, as Listen does: it waits for what a caller in SQL has.
func Hear(t *testing.T, db *pgtest.DB, locks *pgxlock.Locker) {
	t.Helper()
	if err := HearOf(t.Context(), db.Pool, locks); err != nil {
		t.Fatal(err)
	}
}

// HearOf is Hear in a process that is no test.
func HearOf(ctx context.Context, pool *pgxpool.Pool, locks *pgxlock.Locker) (err error) {
	key := fmt.Sprintf("hear %d %p", os.Getpid(), locks)
	if locks.Kind() == pgxlock.KindLease {
		if _, err := pool.Exec(ctx, "select acquire_lock($1, 'listened to', 3600)", key); err != nil {
			return err
		}
		defer func() {
			_, released := pool.Exec(ctx, "select release_lock($1, 'listened to')", key)
			err = errors.Join(err, released)
		}()
		return listenFor(ctx, pool, locks, key)
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		return errors.Join(pgxlock.LockTx(ctx, tx, key), listenFor(ctx, pool, locks, key))
	})
}

// listenFor makes locks wait for a key that somebody else has.
func listenFor(ctx context.Context, pool *pgxpool.Pool, locks *pgxlock.Locker, key string) error {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	wait := func() {
		_, err := locks.Acquire(waiting, key)
		ended <- err
	}
	go wait()
	for tickets := 0; tickets == 0; {
		select {
		case err := <-ended:
			if !errors.Is(err, pgxlock.ErrUnavailable) { // a machine that is very busy may not connect in time
				return fmt.Errorf("it does not wait: %w", err)
			}
			go wait()
		default:
		}
		if err := pool.QueryRow(ctx, ticketsSQL+" from pg_sleep(0.005)", key).Scan(&tickets); err != nil {
			return err
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, pgxlock.ErrNotAcquired) {
		return fmt.Errorf("its wait ended with %w", err)
	}
	for tickets := 1; tickets > 0; {
		if err := pool.QueryRow(ctx, ticketsSQL+" from pg_sleep(0.005)", key).Scan(&tickets); err != nil {
			return err
		}
	}
	return nil
}

// WantBusy waits for a key that somebody else has, until the wait is over. A wait that ends before
// anybody has said that the key is busy is repeated, for longer.
func WantBusy(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) {
	t.Helper()
	var err error
	for wait := time.Second; wait < pgtest.Patience; wait *= 2 {
		var lock *pgxlock.Lock
		lock, err = locks.Acquire(t.Context(), key, append(opts, pgxlock.MaxWait(wait))...)
		if err == nil {
			t.Errorf("%s was granted to %s, and somebody else has it", key, lock.Holder())
			Release(t, lock)
			return
		}
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			return
		}
	}
	t.Errorf("%s: %v, want ErrNotAcquired", key, err)
}

// KeepTurns gives waiters for leases their turn for as long as they need once they are woken, so
// that their order is the same on a slow machine.
func KeepTurns(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.Exec(t, `create or replace function pgxlock_wake_timed_out(p_woken timestamptz) returns boolean language sql volatile
		return p_woken is not null and p_woken < clock_timestamp() - interval '1 hour'`)
}

// Tickets counts those for a key, of either kind, whose processes listen.
func Tickets(t *testing.T, db *pgtest.DB, key string) int {
	t.Helper()
	return Query[int](t, db, ticketsSQL, key)
}

const ticketsSQL = "select (select count(*) from pgxlock_waiters where name in ($1, advisory_lock_key($1)::text) and client is not null)"

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
				Hear(t, db, locks)
				return locks
			})
			NoTickets(t, db)
		})
	}
}

// WakeTimeout is how long a woken waiter has before others may pass it. On a busy machine that
// may not be enough.
const WakeTimeout = clock.WakeTimeout
