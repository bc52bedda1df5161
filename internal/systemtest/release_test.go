package systemtest_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// usable checks that a transaction was not aborted.
func usable(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
		t.Errorf("the transaction is not usable any more: %v", err)
	}
}

func TestReleaseWaitsForTheFencedTransaction(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	asked, through := testkit.Counted(t, db, releaseSQL)
	locks := testkit.NewLocker(t, through, nil)
	for name, end := range map[string]func(context.Context, pgx.Tx) error{
		"commit":   func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) },
		"rollback": func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			lock := testkit.Acquire(t, locks, "k")
			tx := testkit.Begin(t, db, pgx.TxOptions{})
			if err := lock.Fence(t.Context(), tx); err != nil {
				t.Fatal(err)
			}
			released := testkit.Releasing(t, lock, asked)
			if len(released) > 0 {
				t.Errorf("released under a fenced transaction: %v", <-released)
			}
			if err := lock.Err(); !errors.Is(err, pgxlock.ErrReleased) {
				t.Errorf("while Release waits: %v, want ErrReleased", err)
			}
			if got := testkit.Rows(t, db); got["k"] != lock.Holder() {
				t.Errorf("while the transaction is open, held: %v", got)
			}
			if err := end(t.Context(), tx); err != nil {
				t.Errorf("the fenced transaction: %v", err)
			}
			if err := <-released; err != nil {
				t.Errorf("Release: %v", err)
			}
			untilOnlyHeld(t, db)
		})
	}
}

func TestReleaseGivesUpOnAFenceThatDoesNotEnd(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	asked, through := testkit.Counted(t, db, releaseSQL)
	locks := testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 100 * time.Millisecond})
	lock, other := testkit.Acquire(t, locks, "fenced"), testkit.Acquire(t, locks, "other")
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	if err := lock.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	released := testkit.Releasing(t, lock, asked)
	meanwhile := 0
	for range 5 { // nobody else is held up
		if err := testkit.Acquire(t, locks, "meanwhile").Release(t.Context()); err != nil {
			t.Error(err)
		}
		if len(released) == 0 {
			meanwhile++
		}
	}
	if meanwhile == 0 {
		t.Error("the fenced release ended, or the others waited for it")
	}
	expires := func(key string) time.Time {
		return testkit.Query[time.Time](t, db, "select expires_at from distributed_locks where lock_name = $1", key)
	}
	pgtest.Until(t, "what is held is renewed meanwhile", func() bool { return expires("other").After(expires("fenced")) })

	err := <-released
	if err == nil || errors.Is(err, pgxlock.ErrLost) || !strings.Contains(err.Error(), "fence") || !strings.Contains(err.Error(), "expire") {
		t.Errorf("Release: %v; want an error that names the fence and what becomes of the lease, and is not ErrLost", err)
	}
	left := expires("fenced")
	for range 2 {
		now := expires("other")
		pgtest.Until(t, "the other lease is renewed", func() bool { return expires("other").After(now) })
	}
	if !expires("fenced").Equal(left) {
		t.Error("the lease that was left to its expiry is still renewed")
	}
	if err := errors.Join(other.Err(), tx.Commit(t.Context())); err != nil {
		t.Error(err)
	}
	if got := testkit.Rows(t, db); got["fenced"] != lock.Holder() {
		t.Errorf("nobody was told that the lease was given back: %v", got)
	}
	if again := lock.Release(t.Context()); again != err { //nolint:errorlint // the very same
		t.Errorf("the second Release: %v, the first: %v", again, err)
	}
}

func TestLeaseThatExpiresWhileReleaseWaitsWasNotLost(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	asked, through := testkit.Counted(t, db, releaseSQL)
	lock := testkit.Acquire(t, testkit.NewLocker(t, through, nil), "k")
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	if err := lock.Fence(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	released := testkit.Releasing(t, lock, asked)
	db.Exec(t, "update distributed_locks set expires_at = clock_timestamp()")
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-released; err != nil {
		t.Errorf("Release: %v; it was ours until then, and nobody had it since", err)
	}
	if err := lock.Err(); !errors.Is(err, pgxlock.ErrReleased) {
		t.Errorf("Err: %v, want ErrReleased", err)
	}
	db.Exec(t, "select reap_expired_locks('0')") // a release that comes after the expiry and before the commit leaves the row
	untilOnlyHeld(t, db)
}

// releaseAtOnce calls Release from many goroutines and returns the results.
func releaseAtOnce(t *testing.T, lock *pgxlock.Lock) []error {
	t.Helper()
	results := make([]error, 20)
	start := make(chan struct{})
	var calls sync.WaitGroup
	for i := range results {
		calls.Go(func() {
			<-start
			results[i] = lock.Release(t.Context())
		})
	}
	close(start)
	calls.Wait()
	return append(results, lock.Release(t.Context()))
}

func TestEveryReleaseReturnsTheSame(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	asked, through := testkit.Counted(t, db, releaseSQL)
	locks := testkit.NewLocker(t, through, nil)
	for _, err := range releaseAtOnce(t, testkit.Acquire(t, locks, "k")) {
		if err != nil {
			t.Errorf("Release: %v", err)
		}
	}
	if n, _, _ := asked.Counts(); n != 1 {
		t.Errorf("%d statements for one release", n)
	}

	taken := testkit.Acquire(t, locks, "taken")
	db.Exec(t, "update distributed_locks set holder_id = 'somebody else', fencing_token = fencing_token + 1")
	all := releaseAtOnce(t, taken)
	if !errors.Is(all[0], pgxlock.ErrLost) {
		t.Errorf("Release after a take-over: %v, want ErrLost", all[0])
	}
	if len(slices.Compact(all)) != 1 {
		t.Errorf("different results: %v", all)
	}
	if got := testkit.Rows(t, db); len(got) != 1 || got["taken"] != "somebody else" {
		t.Errorf("held: %v; the release must leave the next holder alone", got)
	}
}

// One holder id with another token is another acquisition.
func TestReleaseLeavesALaterAcquisitionOfItsHolderAlone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	db.Exec(t, "update distributed_locks set fencing_token = fencing_token + 1")
	if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Release: %v, want ErrLost", err)
	}
	untilOnlyHeld(t, db, lock)
}

func TestNestedTransactionIsNotFenced(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	conn := db.Connect(t)
	ofPool, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer ofPool.Release()
	for name, beginner := range map[string]interface {
		Begin(context.Context) (pgx.Tx, error)
	}{"a pool": db.Pool, "a pool's connection": ofPool, "a connection": conn} {
		outer, err := beginner.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		nested, err := outer.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		inner, err := nested.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, tx := range []pgx.Tx{inner, nested} {
			err := lock.Fence(t.Context(), tx)
			if !errors.Is(err, errors.ErrUnsupported) || errors.Is(err, pgxlock.ErrLost) {
				t.Errorf("a nested transaction of %s (%T): %v, want ErrUnsupported", name, tx, err)
			}
			usable(t, tx)
			if err := tx.Commit(t.Context()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := lock.Fence(t.Context(), outer); err != nil {
			t.Errorf("the outermost transaction of %s (%T): %v", name, outer, err)
		}
		if err := outer.Commit(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := lock.Err(); err != nil {
		t.Errorf("the lock itself: %v", err)
	}
}

func TestFenceRefusesWhatItCannotProtect(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	locks := testkit.NewLocker(t, db, nil)
	snapshot := func(t *testing.T, options pgx.TxOptions) pgx.Tx {
		tx := testkit.Begin(t, db, options)
		usable(t, tx) // the first statement takes the snapshot
		return tx
	}
	for name, test := range map[string]struct {
		options pgx.TxOptions
		want    error // nil: fenced
	}{
		"read committed":           {pgx.TxOptions{}, nil},
		"repeatable read":          {pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, pgxlock.ErrStaleSnapshot},
		"serializable":             {pgx.TxOptions{IsoLevel: pgx.Serializable}, pgxlock.ErrStaleSnapshot},
		"read only":                {pgx.TxOptions{AccessMode: pgx.ReadOnly}, pgxlock.ErrReadOnly},
		"serializable, read only":  {pgx.TxOptions{IsoLevel: pgx.Serializable, AccessMode: pgx.ReadOnly}, pgxlock.ErrReadOnly},
		"read committed, explicit": {pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			older := snapshot(t, test.options)
			lock := testkit.Acquire(t, locks, name)
			if err := lock.Fence(t.Context(), older); !errors.Is(err, test.want) {
				t.Errorf("older than the lock: %v, want %v", err, test.want)
			}
			err := lock.Fence(t.Context(), snapshot(t, test.options))
			if test.options.AccessMode == pgx.ReadOnly != errors.Is(err, pgxlock.ErrReadOnly) ||
				test.options.AccessMode != pgx.ReadOnly && err != nil {
				t.Errorf("begun under the lock: %v", err)
			}
			if err := errors.Join(lock.Err(), lock.Renew(t.Context())); err != nil {
				t.Errorf("the lock itself: %v", err)
			}
		})
	}
}

func TestFenceOfALockThatIsNotHeldSendsNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	fences, fenced := testkit.Counted(t, db, "assert_lock_held")
	locks := testkit.NewLocker(t, db, nil)
	live, released := testkit.Acquire(t, locks, "live"), testkit.Acquire(t, locks, "released")
	if err := released.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	p, through := testkit.Proxied(t, db)
	lost := grantedInTime(t, testkit.NewLocker(t, through, nil), "lost", pgxlock.TTL(time.Second))
	p.Refuse() // no renewal any more
	p.Cut()
	pgtest.Until(t, "the local deadline has passed", func() bool { return lost.Err() != nil })
	defer p.Heal() // so that the Locker can close

	tx := testkit.Begin(t, fenced, pgx.TxOptions{})
	if err := live.Fence(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "tx is nil") {
		t.Errorf("a nil transaction: %v", err)
	}
	if err := released.Fence(t.Context(), tx); !errors.Is(err, pgxlock.ErrReleased) {
		t.Errorf("a released lock: %v, want ErrReleased", err)
	}
	if err := lost.Fence(t.Context(), tx); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("past the deadline: %v, want ErrLost", err)
	}
	usable(t, tx)
	if n, _, _ := fences.Counts(); n != 0 {
		t.Errorf("%d statements were sent", n)
	}
	if err := live.Fence(t.Context(), tx); err != nil {
		t.Errorf("a lock that is held: %v", err)
	}
	if n, _, _ := fences.Counts(); n != 1 {
		t.Errorf("%d statements for one fence", n)
	}
}

func TestFenceThatFindsTheLockTakenSaysSo(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	db.Exec(t, "update distributed_locks set holder_id = 'somebody else', fencing_token = fencing_token + 1")
	if err := lock.Fence(t.Context(), testkit.Begin(t, db, pgx.TxOptions{})); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Fence: %v, want ErrLost", err)
	}
	<-lock.Lost() // the fence made the Locker look
	if err := lock.Err(); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Err: %v, want ErrLost", err)
	}
}

func TestReleaseBySQLIsReportedByTheNextRenewal(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, db, nil), "k")
	if !testkit.Query[bool](t, db, "select release_lock($1, $2)", lock.Key(), lock.Holder()) {
		t.Fatal("release_lock says that the holder did not hold it")
	}
	if err := lock.Err(); err != nil {
		t.Errorf("before anybody could tell: %v", err)
	}
	if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Renew: %v, want ErrLost", err)
	}
	<-lock.Lost()
	if err := errors.Join(lock.Err(), lock.Release(t.Context())); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("afterwards: %v, want ErrLost", err)
	}
}

func TestCloseWhoseContextEndsMeanwhileReleasesAllTheSame(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var ended atomic.Pointer[time.Time]
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = testkit.OnStatement(releaseSQL, func() {
			now := time.Now()
			ended.CompareAndSwap(nil, &now)
			cancel()
		})
	})
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	testkit.AcquireMany(t, locks, 300)
	if got := testkit.Rows(t, db); len(got) != 300 {
		t.Fatalf("%d leases are held, want 300", len(got))
	}
	err = locks.Close(ctx)
	if ctx.Err() == nil {
		t.Fatal("the context did not end while leases were being released: nothing was tested")
	}
	if errors.Is(err, context.Canceled) && time.Since(*ended.Load()) >= time.Second {
		return // it has tried for as long as it does: on a busy machine that may not be enough
	}
	if err != nil {
		t.Errorf("Close: %v", err)
	}
	untilOnlyHeld(t, db)
}

func TestLostLocksMayBeReleasedWhileTheLockerCloses(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	for range 3 {
		locks, err := pgxlock.NewLeaseLocker(db.Pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		held := testkit.AcquireMany(t, locks, 100)
		db.Exec(t, "delete from distributed_locks")
		var calls sync.WaitGroup
		for _, lock := range held {
			calls.Go(func() {
				if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
					t.Errorf("Renew: %v, want ErrLost", err)
				}
			})
		}
		calls.Wait()

		start := make(chan struct{})
		calls.Go(func() {
			<-start
			if err := locks.Close(t.Context()); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		for _, lock := range held {
			for range 2 {
				calls.Go(func() {
					<-start
					if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
						t.Errorf("Release: %v, want ErrLost", err)
					}
				})
			}
		}
		close(start)
		calls.Wait()
	}
}

// A release may reach the server late, behind a request that is slow. Its lease may have expired
// by then, and another caller may have it. That is no loss: the lock was held until Release.
func TestReleaseThatArrivesLateIsNoLoss(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks, others := testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Second}), testkit.NewLocker(t, db, nil)
	for held := false; !held; { // again where this machine stands still until the lease is over
		lock := grantedInTime(t, locks, "k")
		slow := p.Arm(t, testkit.HoldReply, testkit.AcquireSQL)
		tried := make(chan error, 1)
		go func() {
			_, err := locks.TryDo(t.Context(), "other", func(context.Context, *pgxlock.Lock) error { return nil })
			tried <- err
		}()
		slow.Happened(t)
		released := make(chan error, 1)
		go func() { released <- lock.Release(t.Context()) }()
		pgtest.Until(t, "the lock has ended", func() bool { return lock.Err() != nil })
		held = errors.Is(lock.Err(), pgxlock.ErrReleased) // until Release was called
		next := testkit.Acquire(t, others, "k")
		slow.Resume()
		if err := pgtest.Receive(t, "the release", released); held && err != nil {
			t.Errorf("the lock was held until Release: %v", err)
		}
		if err := <-tried; err != nil {
			t.Log(err) // whatever became of it
		}
		testkit.Release(t, next)
	}
}

func TestReleaseOfALeaseThatWasTakenAwayReportsTheLoss(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, locks, "k")
	db.Exec(t, "delete from distributed_locks where lock_name = 'k'")
	if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) || errors.Is(err, pgxlock.ErrEvicted) {
		t.Errorf("%v, want ErrLost", err)
	}
}

// The network dies while AcquireAll waits with one of its keys. It must not return only when it
// has given up to release that.
func TestAcquireAllReturnsWhenItsWaitIsOver(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	others := testkit.NewLocker(t, db, nil)
	busy := testkit.Acquire(t, others, "b")
	for name, call := range map[string]func(context.Context, *pgxlock.Locker) error{
		"MaxWait": func(ctx context.Context, locks *pgxlock.Locker) error {
			_, err := locks.AcquireAll(ctx, []string{"a MaxWait", "b"}, pgxlock.MaxWait(time.Second))
			return err
		},
		"context": func(ctx context.Context, locks *pgxlock.Locker) error {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			_, err := locks.AcquireAll(ctx, []string{"a context", "b"})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, through := testkit.Proxied(t, db)
			locks := testkit.NewLocker(t, through, &pgxlock.LeaseConfig{Owner: name})
			other := testkit.Acquire(t, locks, "other "+name)
			ended := make(chan error, 1)
			go func() { ended <- call(t.Context(), locks) }()
			pgtest.Until(t, "the call waits with one key", func() bool {
				return len(ended) > 0 || testkit.Query[bool](t, db, "select exists (select from distributed_locks where lock_name = 'a "+name+"')")
			})
			p.BlackHole()
			released := make(chan error, 1)
			go func() { released <- other.Release(t.Context()) }() // is retried as long as that of the key
			select {
			case err := <-ended:
				if err == nil {
					t.Error("granted")
				}
			case err := <-released:
				t.Errorf("a release that began with the outage has been given up, %v, and the call has not returned", err)
			}
			p.Heal()
			p.Cut()
			untilOnlyHeld(t, db, busy)
		})
	}
}
