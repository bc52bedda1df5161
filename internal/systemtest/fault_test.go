package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// untilOnlyHeld waits until the table says that just these locks are held. Rows
// stay there when they expire, so that only a release brings that about.
func untilOnlyHeld(t *testing.T, db *pgtest.DB, locks ...*pgxlock.Lock) {
	t.Helper()
	want := make(map[string]string)
	for _, lock := range locks {
		want[lock.Key()] = lock.Holder()
	}
	var got map[string]string
	defer func() {
		if !maps.Equal(got, want) {
			t.Logf("held by the table: %v; held by live locks: %v", got, want)
		}
	}()
	pgtest.Until(t, "just the live locks are held", func() bool {
		got = testkit.Rows(t, db)
		return maps.Equal(got, want)
	})
}

func TestLostReplyOfAnAcquireLeavesNoLeaseThatNobodyOwns(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, nil)
	first := testkit.Acquire(t, locks, "first")
	lost := p.Arm(t, testkit.LoseReply, testkit.AcquireSQL)
	lock := testkit.Acquire(t, locks, "k") // asks again on a new connection
	lost.Happened(t)
	untilOnlyHeld(t, db, first, lock)
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	untilOnlyHeld(t, db, first)

	// When the second attempt is lost as well, the caller is told, and the lease
	// that it may have got is given back.
	// A slow machine may have no time for a second attempt: then all is done again.
	for both := false; !both; {
		p.Disarm()
		p.Arm(t, testkit.LoseReply, testkit.AcquireSQL)
		lost = p.Arm(t, testkit.LoseReply, testkit.AcquireSQL)
		_, err := locks.Acquire(t.Context(), "k")
		if err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Fatalf("replies were lost: %v", err)
		}
		select {
		case <-lost.Hit:
			both = true
		default:
		}
	}
	untilOnlyHeld(t, db, first)
}

func TestLeaseOfUnknownOutcomeIsGivenBackOnceTheServerIsBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour}) // long before it would expire
	first := testkit.Acquire(t, locks, "first")
	lost := p.Arm(t, testkit.LoseReply, testkit.AcquireSQL)
	p.Refuse()
	_, err := locks.Acquire(t.Context(), "k")
	lost.Happened(t)
	if err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("the reply was lost and no new connection was to be had: %v", err)
	}
	pgtest.Until(t, "giving it back was tried, too, and failed", func() bool { return p.Refusals() >= 2 })
	p.Heal()
	untilOnlyHeld(t, db, first)
}

func TestRenewalThatFailedIsMadeUpForOnceTheServerIsBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	lock := testkit.Acquire(t, testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour}), "k")
	expires := testkit.Query[time.Time](t, db, "select expires_at from distributed_locks")
	p.Refuse()
	p.Cut()
	if err := lock.Renew(t.Context()); err == nil || errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("without a server: %v", err)
	}
	p.Heal()
	pgtest.Until(t, "it is renewed, long before the next renewal is due", func() bool {
		return testkit.Query[bool](t, db, "select expires_at > $1 from distributed_locks", expires)
	})
	if err := lock.Err(); err != nil {
		t.Error(err)
	}
}

func TestRequestThatArrivesAfterItsCallerGaveUpGrantsNothing(t *testing.T) {
	t.Parallel()
	for name, outage := range map[string]bool{"reconnected at once": false, "reconnected after a failure": true} {
		if outage && testing.Short() {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			p, through := testkit.Proxied(t, db)
			locks := testkit.NewLocker(t, through, nil)
			first := testkit.Acquire(t, locks, "first")
			late := p.Arm(t, testkit.DelayRequest, testkit.AcquireSQL)
			var live []*pgxlock.Lock
			if outage {
				p.Refuse()
			} else {
				p.Arm(t, testkit.LoseReply, testkit.AcquireSQL) // so that the call fails
			}
			_, err := locks.Acquire(t.Context(), "k")
			<-late.Hit
			if err == nil {
				t.Fatal("the call succeeded: nothing was tested")
			}
			p.Heal()
			live = append(live, first, testkit.Acquire(t, locks, "next")) // there is a connection again
			untilOnlyHeld(t, db, live...)
			late.Resume()
			// What it would grant would stand there once the backend that was
			// to do it has gone.
			pgtest.Until(t, "the backend of the late request is gone", func() bool {
				return testkit.Query[int](t, db, "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'pgxlock%'") <= 2
			})
			if got := testkit.Rows(t, db); len(got) != len(live) {
				t.Errorf("the late request left a lease that nobody owns: %v", got)
			}
		})
	}
}

func TestLostReplyOfAReleaseIsNoLoss(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, nil)
	lock := testkit.Acquire(t, locks, "k")
	lost := p.Arm(t, testkit.LoseReply, releaseSQL)
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	lost.Happened(t)
	untilOnlyHeld(t, db)
}

func TestLostReplyOfARenewalIsNoLoss(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	lock := testkit.Acquire(t, testkit.NewLocker(t, through, nil), "k")
	for range 3 {
		lost := p.Arm(t, testkit.LoseReply, renewSQL)
		if err := lock.Renew(t.Context()); err != nil {
			t.Error(err)
		}
		lost.Happened(t)
	}
	if err := lock.Err(); err != nil {
		t.Error(err)
	}
	untilOnlyHeld(t, db, lock)
}

func TestRenewalsSurviveAnOutageThatIsShorterThanTheTTL(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	lock := testkit.Acquire(t, testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 300 * time.Millisecond}), "k")
	if err := lock.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.BlackHole()
	expired := testkit.Query[time.Time](t, db, "select expires_at from distributed_locks")
	pgtest.Until(t, "a renewal went into the black hole", func() bool {
		return testkit.Query[bool](t, db, "select clock_timestamp() > $1::timestamptz - interval '1 h' + interval '1 s'", expired)
	})
	p.Heal()
	pgtest.Until(t, "the lease was renewed", func() bool {
		return testkit.Query[bool](t, db, "select expires_at > $1 from distributed_locks", expired)
	})
	if err := lock.Err(); err != nil {
		t.Error(err)
	}
}

// connectRenewals makes the connection on which a Locker renews, which may take longer
// than a short lease lasts.
func connectRenewals(t *testing.T, locks *pgxlock.Locker) {
	t.Helper()
	lock := testkit.Acquire(t, locks, "connected")
	if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
		t.Fatal(err)
	}
}

// grantedInTime acquires a short lease, again where this machine stands still until it is over.
func grantedInTime(t *testing.T, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) *pgxlock.Lock {
	t.Helper()
	lock, err := acquireInTime(t.Context(), locks, key, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

// watch looks at the lock until it is lost, and then says when the last look
// began that found it held.
func watch(lock *pgxlock.Lock) <-chan time.Time {
	result := make(chan time.Time, 1)
	go func() {
		var last time.Time
		for {
			began := time.Now()
			if lock.Err() != nil {
				result <- last
				return
			}
			last = began
			time.Sleep(200 * time.Microsecond)
		}
	}()
	return result
}

func TestBlackHoleIsReportedBeforeAnybodyElseIsGrantedTheLock(t *testing.T) {
	t.Parallel()
	for name, slow := range map[string]bool{"after a grant": false, "after a grant whose reply was slow": true} {
		if slow && testing.Short() {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			p, through := testkit.Proxied(t, db)
			locks, others := testkit.NewLocker(t, through, nil), testkit.NewLocker(t, db, nil)
			// Whatever the test does, the Locker can say goodbye in the end.
			t.Cleanup(func() { p.Heal(); p.Cut() })

			ttl := 2 * time.Second
			held := p.Arm(t, testkit.HoldReply, testkit.AcquireSQL)
			if slow {
				go func() { // the server's TTL runs while the reply is under way
					<-held.Hit
					expires := time.Now().Add(ttl)
					for time.Until(expires) > 3*ttl/4 { // no more: it must arrive in time on a busy machine as well
						time.Sleep(time.Millisecond)
					}
					held.Resume()
				}()
			} else {
				held.Resume()
			}
			lock := grantedInTime(t, locks, "k", pgxlock.TTL(ttl))
			p.BlackHole()
			lastHeld := watch(lock)
			next := testkit.Acquire(t, others, "k", pgxlock.MaxWait(pgtest.Patience))
			granted := time.Now()
			if last := <-lastHeld; !last.Before(granted) {
				t.Errorf("held %s after somebody else was granted the lock", last.Sub(granted))
			}
			if err := lock.Err(); !errors.Is(err, pgxlock.ErrLost) || next.Token() <= lock.Token() {
				t.Errorf("%v; token %d after %d", err, next.Token(), lock.Token())
			}
			p.Heal()
			p.Cut()
			if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
				t.Errorf("Release: %v", err)
			}
			untilOnlyHeld(t, db, next)
		})
	}
}

func TestCutNetworkIsReportedBeforeAnybodyElseIsGrantedTheLock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Remote(t, pgserver.Config{})
	by := func(url string) *pgtest.DB { return &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"} }
	db := by(server.URL("postgres"))
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	locks, others := testkit.NewLocker(t, by(server.TCPURL("postgres")), nil), testkit.NewLocker(t, db, nil)
	connectRenewals(t, locks)
	lock := grantedInTime(t, locks, "k", pgxlock.TTL(2*time.Second))
	server.Cut(t)
	lastHeld := watch(lock)
	next := testkit.Acquire(t, others, "k", pgxlock.MaxWait(pgtest.Patience))
	granted := time.Now()
	if last := <-lastHeld; !last.Before(granted) {
		t.Errorf("held %s after somebody else was granted the lock", last.Sub(granted))
	}
	server.Heal(t)
	if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) || next.Token() <= lock.Token() {
		t.Errorf("Release: %v; token %d after %d", err, next.Token(), lock.Token())
	}
	again := testkit.Acquire(t, locks, "another", pgxlock.MaxWait(pgtest.Patience))
	untilOnlyHeld(t, db, next, again)
}

func TestLockLostToABlackHoleStaysLostWhenTheNetworkIsBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, nil)
	connectRenewals(t, locks)
	renewal := p.Arm(t, testkit.HoldReply, renewSQL)
	asked := make(chan error, 1)
	var lock *pgxlock.Lock
	for held := false; !held; { // again where this machine stands still until the lease is over
		lock = grantedInTime(t, locks, "k", pgxlock.TTL(4*time.Second))
		p.Refuse()
		go func() { asked <- lock.Renew(t.Context()) }() // a busy machine may be late to renew by itself
		select {
		case <-renewal.Hit: // the server has renewed, and we are not told
			held = true
		case err := <-asked:
			select {
			case <-renewal.Hit:
				held = true
				asked <- err
			default:
				p.Heal()
			}
		}
	}
	p.BlackHole() // or it would be renewed over the connection of requests
	pgtest.Until(t, "the lock is lost", func() bool { return lock.Err() != nil })
	renewal.Resume()
	if err := <-asked; err == nil {
		t.Error("Renew was told")
	}
	p.Heal()
	if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("Renew: %v", err)
	}
	if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) || !errors.Is(lock.Err(), pgxlock.ErrLost) {
		t.Errorf("Release: %v; Err: %v", err, lock.Err())
	}
	untilOnlyHeld(t, db)
}

// goroutines returns the stacks of those that run code of the package.
func goroutines() []string {
	buf := make([]byte, 8<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	return slices.DeleteFunc(all, func(stack string) bool {
		return !strings.Contains(stack, "pgxlock.(*") || strings.Contains(stack, "testing.tRunner")
	})
}

// Not parallel: it counts goroutines, and others must have none meanwhile.
func TestSoakAcquireLeaksNothingWhateverEndsIt(t *testing.T) {
	pgtest.Long(t)
	const workers = 16
	calls := pgtest.Soak(t, 20, 20_000/workers)
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks, err := pgxlock.NewLeaseLocker(through.Pool, &pgxlock.LeaseConfig{TTL: 5 * time.Minute}) // nothing expires in time
	if err != nil {
		t.Fatal(err)
	}
	if err := testkit.Acquire(t, locks, "warm").Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := len(goroutines())

	var mu sync.Mutex
	var live []*pgxlock.Lock
	var outcomes [4]int
	var working sync.WaitGroup
	for w := range workers {
		working.Go(func() {
			dice := rand.New(rand.NewPCG(uint64(w), 1))
			keep := true
			for range calls {
				lock, outcome := unruly(t.Context(), dice, p, locks, keep)
				mu.Lock()
				outcomes[outcome]++
				if lock != nil {
					live, keep = append(live, lock), false
				}
				mu.Unlock()
			}
		})
	}
	working.Wait()
	t.Logf("released %d, kept %d, busy %d, failed %d", outcomes[0], outcomes[1], outcomes[2], outcomes[3])
	if slices.Contains(outcomes[:], 0) {
		t.Error("some way to end was never taken")
	}
	live = slices.DeleteFunc(live, func(lock *pgxlock.Lock) bool { return lock.Err() != nil })
	untilOnlyHeld(t, db, live...)
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if got := testkit.Rows(t, db); len(got) != 0 {
		t.Errorf("after Close these are held by nobody: %v", got)
	}
	if err := through.Pool.Ping(t.Context()); err != nil || through.Pool.Stat().AcquiredConns() != 0 {
		t.Errorf("the caller's pool: %v, %d connections are not back", err, through.Pool.Stat().AcquiredConns())
	}
	pgtest.Until(t, "the Locker's connections and advisory locks are gone", func() bool {
		return testkit.Query[bool](t, db, `select not exists (select from pg_stat_activity where datname = current_database() and application_name like 'pgxlock%')
			and not exists (select from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database()))`)
	})
	if got := testkit.Rows(t, db); len(got) != 0 {
		t.Errorf("when the last connection had gone these were held by nobody: %v", got)
	}
	var stacks []string
	defer func() {
		if len(stacks) > before {
			t.Logf("%d goroutines are left, such as:\n%s", len(stacks)-before, stacks[0])
		}
	}()
	pgtest.Until(t, "our goroutines have ended", func() bool {
		stacks = goroutines()
		return len(stacks) <= before
	})
}

// unruly acquires a lock, and something may come in between. It returns the lock
// if it kept it, and how it went: released, kept, busy or failed.
func unruly(ctx context.Context, dice *rand.Rand, p *testkit.Proxy, locks *pgxlock.Locker, keep bool) (kept *pgxlock.Lock, outcome int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	soon := func() time.Duration { return time.Duration(dice.Int64N(int64(20 * time.Millisecond))) }
	var opts []pgxlock.AcquireOption
	switch dice.IntN(8) {
	case 0, 1:
		defer time.AfterFunc(soon(), cancel).Stop()
	case 2, 3:
		opts = append(opts, pgxlock.MaxWait(soon()+1))
	case 4:
		opts = append(opts, pgxlock.NoWait)
	case 5:
		if dice.IntN(8) == 0 {
			defer time.AfterFunc(soon(), p.Cut).Stop()
		}
		opts = append(opts, pgxlock.MaxWait(200*time.Millisecond))
	case 6:
		func() {
			defer func() { _ = recover() }()
			_ = locks.Do(ctx, fmt.Sprint("key:", dice.IntN(40)), func(context.Context, *pgxlock.Lock) error { panic("oops") }, pgxlock.MaxWait(soon()+1))
		}()
		opts = append(opts, pgxlock.NoWait)
	default:
		opts = append(opts, pgxlock.MaxWait(500*time.Millisecond))
	}
	lock, err := locks.Acquire(ctx, fmt.Sprint("key:", dice.IntN(40)), opts...)
	switch {
	case errors.Is(err, pgxlock.ErrNotAcquired):
		return nil, 2
	case err != nil:
		return nil, 3
	case keep:
		return lock, 1
	}
	_ = lock.Release(ctx)
	return nil, 0
}

func TestCallsSurviveTheEndOfTheirConnectionBetweenThem(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "between"})
	held := testkit.Acquire(t, locks, "held")
	rounds := 5
	if testing.Short() {
		rounds = 1
	}
	for i := range rounds {
		if err := held.Renew(t.Context()); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		testkit.Terminate(t, db, "between")
		lock, err := locks.TryAcquire(t.Context(), "k")
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		testkit.Terminate(t, db, "between")
		if err := lock.Release(t.Context()); err != nil {
			t.Errorf("round %d: %v", i, err)
		}
	}
	if err := errors.Join(held.Err(), held.Renew(t.Context())); err != nil {
		t.Errorf("the lease must outlive its connections: %v", err)
	}
	untilOnlyHeld(t, db, held)
}

func TestCallsSurviveTheEndOfTheirConnectionUnderThem(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	for name, call := range map[string]func(context.Context, *pgxlock.Locker, *pgxlock.Lock) (*pgxlock.Lock, error){
		"renew": func(ctx context.Context, _ *pgxlock.Locker, held *pgxlock.Lock) (*pgxlock.Lock, error) {
			return held, held.Renew(ctx)
		},
		"acquire": func(ctx context.Context, locks *pgxlock.Locker, held *pgxlock.Lock) (*pgxlock.Lock, error) {
			if err := held.Release(ctx); err != nil {
				return nil, err
			}
			return locks.TryAcquire(ctx, "k")
		},
		"release": func(ctx context.Context, _ *pgxlock.Locker, held *pgxlock.Lock) (*pgxlock.Lock, error) {
			return nil, held.Release(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "under"})
			held := testkit.Acquire(t, locks, "held")
			// What is called waits in the server until its backend is ended.
			blocker := db.Connect(t)
			if _, err := blocker.Exec(t.Context(), "begin; lock table "+blockedBy[name]+" in access exclusive mode"); err != nil {
				t.Fatal(err)
			}
			type result struct {
				lock *pgxlock.Lock
				err  error
			}
			results := make(chan result, 1)
			go func() {
				lock, err := call(t.Context(), locks, held)
				results <- result{lock, err}
			}()
			pgtest.Until(t, "the call waits in the server", func() bool {
				return testkit.Query[bool](t, db, "select exists (select from pg_locks where relation = $1::text::regclass and not granted)", blockedBy[name])
			})
			testkit.Terminate(t, db, "under")
			if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
				t.Fatal(err)
			}
			got := <-results
			if got.err != nil {
				t.Fatal(got.err)
			}
			if got.lock == nil {
				untilOnlyHeld(t, db)
				return
			}
			if err := got.lock.Err(); err != nil {
				t.Error(err)
			}
			untilOnlyHeld(t, db, got.lock)
			testkit.Release(t, got.lock)
		})
	}
}

// blockedBy is a table that each call needs.
var blockedBy = map[string]string{"renew": "distributed_locks", "acquire": "pgxlock_epoch", "release": "distributed_locks"}

// privateServer returns a server that the test may break, with pgxlock in it.
func privateServer(t *testing.T, settings map[string]string) (*pgserver.Server, *pgtest.DB) {
	t.Helper()
	server := pgtest.Private(t, pgserver.Config{Settings: settings})
	url := server.URL("postgres")
	db := &pgtest.DB{Pool: pgtest.Pool(t, url), URL: url, Name: "postgres"}
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	return server, db
}

func TestLeasesOutliveTheServersRestartAndCrash(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	for name, stop := range map[string]func() error{
		"restart": func() error { return nil }, // Restart stops it in good order
		"crash":   server.Crash,
		"kill":    server.Kill,
	} {
		locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 500 * time.Millisecond})
		lock := testkit.Acquire(t, locks, name)
		// A waiter that was told that the key is busy waits the outage out.
		told := make(chan struct{})
		var once sync.Once
		others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Backoff: func(int) time.Duration {
			once.Do(func() { close(told) })
			return 50 * time.Millisecond
		}})
		waited := make(chan error, 1)
		go func() {
			next, err := others.Acquire(t.Context(), name, testkit.LongWait)
			if err == nil && next.Token() <= lock.Token() {
				err = fmt.Errorf("token %d after %d", next.Token(), lock.Token())
			}
			waited <- err
		}()

		<-told
		if err := errors.Join(stop(), server.Restart(t.Context())); err != nil {
			t.Fatal(err)
		}
		db.Pool.Reset()
		if got := testkit.Rows(t, db); got[name] != lock.Holder() {
			t.Fatalf("%s: afterwards held: %v, want %s", name, got, lock.Holder())
		}
		expires := testkit.Query[time.Time](t, db, "select expires_at from distributed_locks where lock_name = $1", name)
		pgtest.Until(t, "the lease is renewed after "+name, func() bool {
			return testkit.Query[bool](t, db, "select expires_at > $1 from distributed_locks where lock_name = $2", expires, name)
		})
		if err := lock.Release(t.Context()); err != nil {
			t.Errorf("%s: Release: %v", name, err)
		}
		if err := <-waited; err != nil {
			t.Errorf("%s: the waiter: %v", name, err)
		}
	}
}

func TestServerWithoutFreeConnectionsIsNotBusy(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	_, db := privateServer(t, map[string]string{"max_connections": "12"})
	locks := testkit.NewLocker(t, db, nil)
	// All are ours: that of somebody who has just left would be free again.
	ours := db.Pool.Stat().TotalConns()
	pgtest.Until(t, "the server has no connection left", func() bool {
		err := fill(t, db)
		if err == nil {
			ours++
			return false
		}
		full, ok := errors.AsType[*pgconn.PgError](err)
		return ok && full.Code == "53300" && ours == 12
	})
	for name, call := range map[string]func() error{
		"TryAcquire": func() error { _, err := locks.TryAcquire(t.Context(), "k"); return err },
		"Acquire":    func() error { _, err := locks.Acquire(t.Context(), "k", testkit.LongWait); return err },
		"TryDo": func() error {
			_, err := locks.TryDo(t.Context(), "k", func(context.Context, *pgxlock.Lock) error { return nil })
			return err
		},
	} {
		err := call()
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); !ok || pgErr.Code != "53300" || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("%s: %v, want SQLSTATE 53300 and not ErrNotAcquired", name, err)
		}
	}
}

// fill takes one more of the server's connections.
func fill(t *testing.T, db *pgtest.DB) error {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err == nil {
		t.Cleanup(func() { _ = conn.Close(context.Background()) })
	}
	return err
}

func TestTableThatIsLockedFailsAllThatWaitForItTogether(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	asked := &testkit.Counter{Sql: testkit.AcquireSQL}
	p, through := testkit.Proxied(t, db, func(c *pgxpool.Config) { c.ConnConfig.Tracer = asked })
	locks := testkit.NewLocker(t, through, nil)
	blocker := db.Connect(t)

	// While the first request is under way the others gather.
	held := p.Arm(t, testkit.HoldReply, testkit.AcquireSQL)
	var first *pgxlock.Lock
	var calls sync.WaitGroup
	calls.Go(func() { first, _ = locks.Acquire(t.Context(), "first") })
	held.Happened(t)
	const n = 12
	for i := range n {
		calls.Go(func() {
			_, err := locks.Acquire(t.Context(), fmt.Sprint("key:", i), pgxlock.NoWait)
			if err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("key:%d: %v, want an error that is not ErrNotAcquired", i, err)
			}
		})
	}
	pgtest.Until(t, "all requests stand in the queue", func() bool { return gathered(t.Name()) == n+1 })
	if _, err := blocker.Exec(t.Context(), "begin; lock table distributed_locks in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	before, _, _ := asked.Counts()
	held.Resume()
	calls.Wait()
	if first == nil {
		t.Fatal("the first request, which was done before the table was locked, failed")
	}
	if after, _, _ := asked.Counts(); after-before > n/2 { // a busy machine may be so late that some ask once more
		t.Errorf("%d statements ran into the table's lock one after the other, for one batch", after-before)
	}
	if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	untilOnlyHeld(t, db, first)
	useLock(t, locks, db.Pool, "afterwards")
}

func TestWarningOfAUsersTriggerFailsNoCall(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `create function warn() returns trigger language plpgsql as $$ begin
		raise warning 'somebody touches %', tg_table_name;
		return coalesce(new, old);
	end $$`)
	db.Exec(t, "create trigger warn before insert or update or delete on distributed_locks for each row execute function warn()")
	var mu sync.Mutex
	warnings := 0
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, notice *pgconn.Notice) {
			mu.Lock()
			defer mu.Unlock()
			if notice.Code == "01000" {
				warnings++
			}
		}
	})
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}, nil)
	lock := testkit.Acquire(t, locks, "k")
	if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
	untilOnlyHeld(t, db)
	mu.Lock()
	defer mu.Unlock()
	if warnings < 3 {
		t.Errorf("%d warnings came, want one for each call", warnings)
	}
}
