package pgxlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// What a statement of the Locker's contains and no other one does.
const (
	acquireSQL = "pgxlock_acquire_batch"
	renewSQL   = "pgxlock_renew_batch"
	releaseSQL = "-- Gives back each lease"
)

// until waits for what another goroutine, process or server will do. Its limit
// turns a hang into a message; it is not what is tested.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	limit := time.Now().Add(30 * time.Second)
	for !done() {
		if time.Now().After(limit) {
			t.Fatalf("not within 30 s: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// query returns the one value that a query yields.
func query[T any](t *testing.T, db *pgtest.DB, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := db.Pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%v\n%s", err, sql)
	}
	return v
}

// acquire acquires, which must work.
func acquire(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.Option) *pgxlock.Lock {
	t.Helper()
	lock, err := locks.Acquire(t.Context(), key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

// counter counts statements, and the entries that they carry as one array.
type counter struct {
	sql string

	mu         sync.Mutex
	statements int
	entries    int
	first      time.Time
}

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, c.sql) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.statements++; c.first.IsZero() {
			c.first = time.Now()
		}
		for _, arg := range data.Args {
			if names, ok := arg.([]string); ok {
				c.entries += len(names)
				break
			}
		}
	}
	return ctx
}

func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *counter) counts() (statements, entries int, since time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.statements, c.entries, time.Since(c.first)
}

// counted returns the database with a counter of statements that contain sql.
func counted(t *testing.T, db *pgtest.DB, sql string) (*counter, *pgtest.DB) {
	t.Helper()
	c := &counter{sql: sql}
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.Tracer = c })
	return c, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}
}

func TestThousandsOfLeasesAreRenewedInAFewStatements(t *testing.T) {
	t.Parallel()
	const leases, every = 3000, time.Second
	const perInterval = (leases+999)/1000 + 1
	renewals, db := counted(t, migrated(t), renewSQL)
	locks := newLocker(t, db, &pgxlock.LeaseConfig{TTL: 20 * time.Second, Renew: every})
	held := make([]*pgxlock.Lock, leases)
	var acquiring sync.WaitGroup
	for i := range held {
		acquiring.Go(func() { held[i], _ = locks.Acquire(t.Context(), fmt.Sprintf("lease:%d", i)) })
	}
	acquiring.Wait()
	for i, lock := range held {
		if lock == nil {
			t.Fatalf("lease %d was not acquired", i)
		}
	}

	until(t, "each lease was renewed three times", func() bool {
		_, entries, _ := renewals.counts()
		return entries >= 4*leases // the first ones came while others were being acquired
	})
	statements, entries, since := renewals.counts()
	if rounds := (entries + leases - 1) / leases; statements > (rounds+1)*perInterval {
		t.Errorf("%d statements for %d renewals of %d leases, want at most %d for each round", statements, entries, leases, perInterval)
	}
	if intervals := int(since/every) + 1; statements > intervals*perInterval {
		t.Errorf("%d statements in %d intervals, want at most %d in each", statements, intervals, perInterval)
	}
	for _, lock := range held {
		if err := lock.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if n := query[int](t, db, "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'pgxlock%'"); n != 2 {
		t.Errorf("the Locker has %d connections, want 2", n)
	}
}

func TestRenewalsGoOnWhileRequestsAreBlocked(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	const ttl = 4 * time.Second // so that a machine that stands still for a moment costs nothing
	locks := newLocker(t, db, &pgxlock.LeaseConfig{TTL: ttl})
	lock := acquire(t, locks, "k")

	// Whoever acquires draws a token, which reads this table; renewals do not.
	ctx, stop := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	defer asking.Wait()
	defer stop()
	blocker := db.Connect(t)
	if _, err := blocker.Exec(t.Context(), "begin; lock table pgxlock_epoch in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	expires := query[time.Time](t, db, "select expires_at from distributed_locks")
	asking.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if _, err := locks.TryAcquire(ctx, fmt.Sprintf("other:%d", i)); err == nil {
				t.Error("a request got through: nothing was tested")
			}
		}
	})
	blocked := 0
	until(t, "the TTL passed, with requests blocked", func() bool {
		if query[bool](t, db, "select exists (select from pg_locks where relation = 'pgxlock_epoch'::regclass and not granted)") {
			blocked++
		}
		return query[bool](t, db, "select clock_timestamp() > $1", expires)
	})
	stop()
	asking.Wait()
	if blocked == 0 {
		t.Error("no request was seen to be blocked: nothing was tested")
	}
	if err := lock.Err(); err != nil {
		t.Errorf("the lease was lost meanwhile: %v", err)
	}
	if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
}

func TestALockedRowCostsNoOtherLeaseItsRenewal(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	locks := newLocker(t, db, &pgxlock.LeaseConfig{TTL: 4 * time.Second}) // so that a machine that stands still for a moment costs nothing
	var held []*pgxlock.Lock
	for i := range 20 {
		held = append(held, acquire(t, locks, fmt.Sprintf("lease:%02d", i)))
	}
	const unlucky = 10 // in the middle of the statement's order
	blocker := db.Connect(t)
	if _, err := blocker.Exec(t.Context(), "begin; select from distributed_locks where lock_name = 'lease:10' for update"); err != nil {
		t.Fatal(err)
	}
	expires := query[time.Time](t, db, "select max(expires_at) from distributed_locks")
	until(t, "the TTL passed with the row locked", func() bool {
		return query[bool](t, db, "select clock_timestamp() > $1", expires)
	})
	for i, lock := range held {
		if err := lock.Err(); i != unlucky && err != nil {
			t.Errorf("lease %d: %v", i, err)
		} else if i == unlucky && !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("lease %d, whose row was locked for its TTL: %v", i, err)
		}
	}
	if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
}

func TestAnEvictedLeaseIsReportedLostByTheNextRenewal(t *testing.T) {
	t.Parallel()
	for name, evict := range map[string]string{
		"row deleted":   "delete from distributed_locks where lock_name = $1",
		"token changed": "update distributed_locks set fencing_token = fencing_token + 1 where lock_name = $1",
		"taken over":    "update distributed_locks set holder_id = 'operator', fencing_token = fencing_token + 1 where lock_name = $1",
		"expired":       "update distributed_locks set expires_at = clock_timestamp() where lock_name = $1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := migrated(t)
			locks := newLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 100 * time.Millisecond})
			evicted, other := acquire(t, locks, "evicted"), acquire(t, locks, "other")
			work, cancel := evicted.Context(t.Context())
			defer cancel()
			db.Exec(t, evict, "evicted")
			until(t, "the loss is reported", func() bool { return evicted.Err() != nil })
			select {
			case <-evicted.Lost():
			default:
				t.Error("Lost is open")
			}
			<-work.Done() // which may be just about to be told
			if !errors.Is(evicted.Err(), pgxlock.ErrLost) || !errors.Is(context.Cause(work), pgxlock.ErrLost) {
				t.Errorf("%v, %v", evicted.Err(), context.Cause(work))
			}
			if err := evicted.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
				t.Errorf("Release: %v", err)
			}
			if err := other.Renew(t.Context()); err != nil {
				t.Errorf("the other lease: %v", err)
			}
		})
	}
}

func TestRenewRenewsNowAndReportsAnEviction(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	lock := acquire(t, newLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	before := query[time.Time](t, db, "select expires_at from distributed_locks")
	if err := lock.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := query[time.Time](t, db, "select expires_at from distributed_locks"); !after.After(before) {
		t.Errorf("it expired at %s, and after Renew at %s", before, after)
	}
	db.Exec(t, "delete from distributed_locks")
	if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) || !errors.Is(lock.Err(), pgxlock.ErrLost) {
		t.Errorf("Renew: %v; Err: %v", err, lock.Err())
	}
}

func TestRenewOfALockedRowEndsWithItsContext(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	lock := acquire(t, newLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	expires := query[time.Time](t, db, "select expires_at from distributed_locks")
	blocker := db.Connect(t)
	if _, err := blocker.Exec(t.Context(), "begin; select from distributed_locks for update"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := lock.Renew(ctx); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Renew: %v", err)
	}
	if err := lock.Err(); err != nil {
		t.Errorf("the lock is as before: %v", err)
	}
	if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	until(t, "the renewal is made up for once the row is free, long before the next one is due", func() bool {
		return query[bool](t, db, "select expires_at > $1 from distributed_locks", expires)
	})
	if err := lock.Renew(t.Context()); err != nil {
		t.Errorf("once the row is free: %v", err)
	}
}

func TestReleasedLeasesAreNotRenewed(t *testing.T) {
	t.Parallel()
	renewals, db := counted(t, migrated(t), renewSQL)
	locks := newLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 100 * time.Millisecond})
	kept, released := acquire(t, locks, "kept"), acquire(t, locks, "released")
	if err := released.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := kept.Renew(t.Context()); err != nil { // what was under way is over
		t.Fatal(err)
	}
	statements, entries, _ := renewals.counts()
	until(t, "five more renewals", func() bool { n, _, _ := renewals.counts(); return n >= statements+5 })
	if n, e, _ := renewals.counts(); e-entries != n-statements {
		t.Errorf("%d renewals in %d statements for one lease", e-entries, n-statements)
	}
}
