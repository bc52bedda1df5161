package systemtest_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/locktest"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// idleAfter is a pool whose connections are idle after that time.
func idleAfter(t *testing.T, db *pgtest.DB, idle time.Duration) *pgtest.DB {
	t.Helper()
	with := *db
	with.Pool = db.NewPool(t, func(c *pgxpool.Config) { c.MaxConnIdleTime = idle })
	return &with
}

func connections(t *testing.T, db *pgtest.DB, owner string, want int) {
	t.Helper()
	pgtest.Until(t, fmt.Sprintf("%s has %d connections", owner, want), func() bool {
		return len(testkit.Backends(t, db, owner)) == want
	})
}

func TestLockerKeepsEveryPromiseOnOneConnection(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	locktest.Run(t, func(t *testing.T) *pgxlock.Locker {
		return testkit.NewLocker(t, testkit.Migrated(t), &pgxlock.LeaseConfig{OneConnection: true, Renew: 100 * time.Millisecond, Observe: kept(t).Observe})
	})
}

func TestOptionOneConnectionIsOneForAHolderAndTwoForAWaiter(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	quick := idleAfter(t, db, 0)
	config := func(owner string) *pgxlock.LeaseConfig {
		return &pgxlock.LeaseConfig{OneConnection: true, Owner: owner, Backoff: testkit.Seldom, Renew: 100 * time.Millisecond}
	}
	holder, waiter := testkit.NewLocker(t, quick, config("holder")), testkit.NewLocker(t, quick, config("waiter"))
	lock := testkit.Acquire(t, holder, "k")
	if err := lock.Renew(t.Context()); err != nil {
		t.Error(err)
	}
	connections(t, db, "holder", 1)
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	for range rounds { // the listener ends, and is there again
		next := testkit.Waits(t, waiter, "k")
		testkit.UntilQueued(t, db, "k", 1)
		connections(t, db, "waiter", 2)
		testkit.Release(t, lock)
		got := <-next
		connections(t, db, "waiter", 1)
		testkit.Release(t, got)
		lock = testkit.Acquire(t, holder, "k")
		connections(t, db, "holder", 1)
	}
	testkit.Release(t, lock)
}

func TestConnectionOfTheQueueOfAdvisoryLocksIsClosedWhenItIsIdle(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	quick := idleAfter(t, db, 0)
	holder := testkit.NewAdvisory(t, quick, &pgxlock.AdvisoryConfig{Owner: "holder", Backoff: testkit.Seldom})
	waiter := testkit.NewAdvisory(t, quick, &pgxlock.AdvisoryConfig{Owner: "waiter", Backoff: testkit.Seldom})
	for range 3 {
		lock := testkit.Acquire(t, holder, "k")
		connections(t, db, "holder", 2) // its lock session, and the listener for those who want its locks
		next := testkit.Waits(t, waiter, "k")
		testkit.UntilQueued(t, db, "k", 1)
		testkit.Release(t, lock)
		testkit.Release(t, <-next)
	}
}

func TestCallThatWaitsKeepsTheConnectionOfTheQueueWhateverIsIdle(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	looks := &testkit.Counter{Sql: "pgxlock_publish_batch"}
	var connected atomic.Int32
	quick := *db
	quick.Pool = db.NewPool(t, func(c *pgxpool.Config) {
		c.MaxConnIdleTime, c.ConnConfig.Tracer = 0, looks
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
			connected.Add(1)
			return nil
		}
	})
	holder := testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "holder"})
	waiter := testkit.NewAdvisory(t, &quick, &pgxlock.AdvisoryConfig{Owner: "waiter", Backoff: testkit.Seldom})
	lock := testkit.Acquire(t, holder, "k")
	next := testkit.Waits(t, waiter, "k")
	testkit.UntilQueued(t, db, "k", 1)
	before := connected.Load()
	first, _, _ := looks.Counts()
	pgtest.Until(t, "it looked three times", func() bool {
		n, _, _ := looks.Counts()
		return n >= first+3
	})
	if n := connected.Load() - before; n != 0 {
		t.Errorf("a call that waits made %d connections", n)
	}
	testkit.Release(t, lock)
	testkit.Release(t, <-next)
}

// keepBusy has 8 callers lock 12 keys, without work, until stop is called.
func keepBusy(t *testing.T, locks *pgxlock.Locker) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	for i := range 8 {
		callers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				err := locks.Do(ctx, fmt.Sprint("key:", (i*5+n)%12), func(context.Context, *pgxlock.Lock) error { return nil })
				if err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	return func() {
		cancel()
		callers.Wait()
	}
}

func TestLeaseIsKeptWhileItsConnectionIsBusyWithRequests(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{OneConnection: true, TTL: time.Hour, Renew: 100 * time.Millisecond})
	lock := testkit.Acquire(t, locks, "held")
	stop := keepBusy(t, locks)
	for range 20 {
		if err := lock.Renew(t.Context()); err != nil {
			t.Error(err)
		}
	}
	stop()
	testkit.Release(t, lock)
}

// A role, a database or a pooler may allow one connection only: then the renewals of a lease go beside its
// requests, and return to a connection of their own as soon as there is one.
func TestLeaseIsRenewedOverTheOnlyConnectionThatIsAllowed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	role, theirs := login(t, db)
	limit := func(n int) { db.Exec(t, fmt.Sprintf("alter role %s connection limit %d", role, n)) }
	db.Exec(t, "select grant_locks('"+role+"', 'application')")
	limit(2)
	findings := examine(t, theirs, nil)
	wantFinding(t, findings, "connections", statusWarning, "role "+role+" allows 2 connections, of which 2 are free", "raise the limit")
	pgtest.Until(t, "the doctor has gone", func() bool { return len(testkit.Backends(t, db, "doctor")) == 0 })

	limit(1)
	keepsALease(t, db, theirs, func() { limit(2) })
}

func TestLeaseIsRenewedOverTheOnlyConnectionOfASessionPooler(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	eachSessionPooler(t, server, map[string]string{"default_pool_size": "1"}, func(_ string, pooler *pgserver.Pooler) {
		keepsALease(t, db, &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres"))}, nil)
	})
}

// keepsALease holds one through few, which allows one connection, while other callers lock and wait. allow
// makes room for a second connection.
func keepsALease(t *testing.T, db, few *pgtest.DB, allow func()) {
	t.Helper()
	var log said
	locks := testkit.NewLocker(t, few, &pgxlock.LeaseConfig{
		Owner: "few", TTL: time.Hour, Renew: 100 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	lock, theirs := testkit.Acquire(t, locks, "held"), testkit.Acquire(t, testkit.NewLocker(t, db, nil), "theirs")
	untilRenewed := func(times int) {
		t.Helper()
		seen := make(map[time.Time]bool)
		pgtest.Until(t, "the lease is renewed", func() bool {
			seen[testkit.Query[time.Time](t, db, "select expires_at from distributed_locks where lock_name = 'held'")] = true
			return len(seen) > times
		})
	}
	untilRenewed(3)
	if err := lock.Renew(t.Context()); err != nil {
		t.Error(err)
	}
	next := testkit.Waits(t, locks, "theirs")
	pgtest.Until(t, "it waits without a listener", func() bool {
		return testkit.Query[bool](t, db, "select exists (select from pgxlock_waiters where name = 'theirs' and client is null)")
	})
	stop := keepBusy(t, locks)
	untilRenewed(3)
	testkit.Release(t, theirs)
	testkit.Release(t, <-next)
	if n := strings.Count(log.String(), "over the connection of their requests"); n != 1 {
		t.Errorf("said %d times that the connection is shared:\n%s", n, log.String())
	}
	if allow != nil {
		connections(t, db, "few", 1)
		allow()
		connections(t, db, "few", 2)
		untilRenewed(3)
	}
	stop()
	testkit.Release(t, lock)
}
