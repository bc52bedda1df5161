package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// What a statement of the Locker's contains and no other one does.
const (
	renewSQL   = "pgxlock_renew_batch"
	releaseSQL = "-- Gives back "
)

func TestThousandsOfLeasesAreRenewedInAFewStatements(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const leases, every = 3000, time.Second
	const perInterval = (leases+999)/1000 + 1
	renewals, db := testkit.Counted(t, testkit.Migrated(t), renewSQL)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: testkit.TTL, Renew: every})
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

	pgtest.Until(t, "each lease was renewed three times", func() bool {
		_, entries, _ := renewals.Counts()
		return entries >= 4*leases // the first ones came while others were being acquired
	})
	statements, entries, since := renewals.Counts()
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
	pgtest.Until(t, "the Locker has two connections", func() bool { // not three while one that failed ends
		return testkit.Query[int](t, db, "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'pgxlock%'") == 2
	})
}

func TestRenewalsGoOnWhileRequestsAreBlocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: testkit.TTL, Renew: 500 * time.Millisecond})
	lock := testkit.Acquire(t, locks, "k")

	// An acquire draws a token, which reads this table; renewals do not.
	ctx, stop := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	defer asking.Wait()
	defer stop()
	blocker := db.Connect(t)
	if _, err := blocker.Exec(t.Context(), "begin; lock table pgxlock_epoch in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	asking.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if _, err := locks.TryAcquire(ctx, fmt.Sprintf("other:%d", i)); err == nil {
				t.Error("a request got through: nothing was tested")
			}
		}
	})
	for range 3 {
		pgtest.Until(t, "a request is blocked", func() bool {
			return testkit.Query[bool](t, db, "select exists (select from pg_locks where relation = 'pgxlock_epoch'::regclass and not granted)")
		})
		untilRenewed(t, db, lock, 1)
	}
	stop()
	asking.Wait()
	if err := lock.Err(); err != nil {
		t.Errorf("the lease was lost meanwhile: %v", err)
	}
	if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
}

func TestLockedRowCostsNoOtherLeaseItsRenewal(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	const unlucky, ttl = 10, 3 * time.Second // in the middle of the statement's order; it alone is to be lost
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: testkit.TTL, Renew: ttl / 3})
	var held []*pgxlock.Lock
	for i := range 20 {
		var opts []pgxlock.AcquireOption
		if i == unlucky {
			opts = append(opts, pgxlock.TTL(ttl))
		}
		lock, err := acquireInTime(t.Context(), locks, fmt.Sprintf("lease:%02d", i), opts...)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, lock)
	}
	blocker := db.Connect(t)
	if _, err := blocker.Exec(t.Context(), "begin; select from distributed_locks where lock_name = 'lease:10' for update"); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "create table before as select lock_name, expires_at from distributed_locks")
	pgtest.Until(t, "the TTL passed with the row locked, and the others were renewed meanwhile", func() bool {
		return held[unlucky].Err() != nil && testkit.Query[int](t, db, "select count(*) from distributed_locks l join before b using (lock_name) where l.expires_at > b.expires_at") == len(held)-1
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

func TestEvictedLeaseIsReportedLostByTheNextRenewal(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 100 * time.Millisecond})
	other := testkit.Acquire(t, locks, "other")
	for name, evict := range map[string]string{
		"row deleted":   "delete from distributed_locks where lock_name = $1",
		"token changed": "update distributed_locks set fencing_token = fencing_token + 1 where lock_name = $1",
		"taken over":    "update distributed_locks set holder_id = 'operator', fencing_token = fencing_token + 1 where lock_name = $1",
		"expired":       "update distributed_locks set expires_at = clock_timestamp() where lock_name = $1",
	} {
		t.Run(name, func(t *testing.T) {
			evicted := testkit.Acquire(t, locks, name)
			work, cancel := evicted.Context(t.Context())
			defer cancel()
			db.Exec(t, evict, name)
			pgtest.Until(t, "the loss is reported", func() bool { return evicted.Err() != nil })
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
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	before := testkit.Query[time.Time](t, db, "select expires_at from distributed_locks")
	if err := lock.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := testkit.Query[time.Time](t, db, "select expires_at from distributed_locks"); !after.After(before) {
		t.Errorf("it expired at %s, and after Renew at %s", before, after)
	}
	db.Exec(t, "delete from distributed_locks")
	if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) || !errors.Is(lock.Err(), pgxlock.ErrLost) {
		t.Errorf("Renew: %v; Err: %v", err, lock.Err())
	}
}

func TestSetTTLIsThatOfLaterRenewals(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: testkit.TTL, Renew: time.Second})
	for _, mode := range []pgxlock.Mode{pgxlock.Exclusive, pgxlock.Shared} {
		lock := testkit.Acquire(t, locks, "k", mode, pgxlock.TTL(time.Hour))
		lasts := func(ttl time.Duration) {
			t.Helper()
			if !testkit.Query[bool](t, db, "select expires_at between clock_timestamp() + $1::interval / 2 and clock_timestamp() + $1 from distributed_locks", ttl) {
				t.Errorf("it does not last for %s", ttl)
			}
			until, _ := lock.Deadline()
			if left := time.Until(until); left > ttl || left < ttl/2 {
				t.Errorf("the deadline is %s away, with a TTL of %s", left, ttl)
			}
		}
		lasts(time.Hour)
		for _, ttl := range []time.Duration{2 * time.Hour, testkit.TTL, time.Hour, testkit.TTL} {
			if err := lock.SetTTL(t.Context(), ttl); err != nil {
				t.Fatal(err)
			}
			lasts(ttl)
		}
		if err := lock.SetMetadata(t.Context(), "later"); err != nil {
			t.Fatal(err)
		}
		untilRenewed(t, db, lock, 2) // by the interval of its new TTL
		lasts(testkit.TTL)
		if found, err := locks.Holders(t.Context(), "k"); err != nil || len(found) != 1 || found[0].Metadata != "later" {
			t.Errorf("%v, %v", found, err)
		}
		db.Exec(t, "delete from distributed_locks")
		if err := lock.SetTTL(t.Context(), time.Hour); !errors.Is(err, pgxlock.ErrLost) || !errors.Is(lock.Err(), pgxlock.ErrLost) {
			t.Errorf("SetTTL of a lease that is gone: %v; Err: %v", err, lock.Err())
		}
	}
}

func TestChangeIsNotSentAfterItsCallerHasLeft(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	lock := testkit.Acquire(t, testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	first := p.Arm(t, testkit.HoldReply, "pgxlock_change_lease") // which only reads the version
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- lock.SetTTL(ctx, testkit.TTL) }()
	first.Happened(t)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("SetTTL: %v", err)
	}
	first.Resume()
	if err := lock.SetMetadata(t.Context(), "later"); err != nil { // behind it, with the TTL that it left
		t.Fatal(err)
	}
	if !testkit.Query[bool](t, db, "select expires_at > clock_timestamp() + interval '50 minutes' from distributed_locks") {
		t.Error("the TTL has changed")
	}
}

// The row is locked, so that no request is answered before the caller has left.
func TestChangeWhoseCallerHasLeftIsNotMadeLater(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	before, _ := lock.Deadline()
	blocker := db.Connect(t)
	if _, err := blocker.Exec(t.Context(), "begin; select from distributed_locks for update"); err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	changed := make(chan error, 1)
	go func() { changed <- lock.SetTTL(ctx, testkit.TTL) }()
	shorter := func() bool {
		until, _ := lock.Deadline()
		return before.Sub(until) > time.Hour/2
	}
	pgtest.Until(t, "the shorter TTL counts, because it is sent", shorter)
	leave()
	if err := errors.Join(<-changed, lock.Err()); !errors.Is(err, context.Canceled) || errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("SetTTL: %v", err)
	}
	if !shorter() {
		t.Error("the deadline is the longer one, though the server may know the shorter TTL")
	}
	if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	pgtest.Until(t, "a renewal says for how long the lock is held", func() bool {
		until, _ := lock.Deadline()
		return before.Sub(until) < time.Minute
	})
	if err := lock.Renew(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRenewOfALockedRowEndsWithItsContext(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	expires := testkit.Query[time.Time](t, db, "select expires_at from distributed_locks")
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
	pgtest.Until(t, "the renewal is made up for once the row is free, long before the next one is due", func() bool {
		return testkit.Query[bool](t, db, "select expires_at > $1 from distributed_locks", expires)
	})
	if err := lock.Renew(t.Context()); err != nil {
		t.Errorf("once the row is free: %v", err)
	}
}

func TestReleasedLeasesAreNotRenewed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	renewals, db := testkit.Counted(t, testkit.Migrated(t), renewSQL)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 100 * time.Millisecond})
	kept, released := testkit.Acquire(t, locks, "kept"), testkit.Acquire(t, locks, "released")
	if err := released.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := kept.Renew(t.Context()); err != nil { // what was under way is over
		t.Fatal(err)
	}
	statements, entries, _ := renewals.Counts()
	pgtest.Until(t, "five more renewals", func() bool { n, _, _ := renewals.Counts(); return n >= statements+5 })
	if n, e, _ := renewals.Counts(); e-entries != n-statements {
		t.Errorf("%d renewals in %d statements for one lease", e-entries, n-statements)
	}
}

// acquireInTime acquires until it has a lock: on a machine that stands still for longer
// than a short TTL, what was granted is lost when the answer is read.
func acquireInTime(ctx context.Context, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) (*pgxlock.Lock, error) {
	for {
		lock, err := locks.Acquire(ctx, key, opts...)
		if !errors.Is(err, pgxlock.ErrUnavailable) {
			return lock, err
		}
	}
}
