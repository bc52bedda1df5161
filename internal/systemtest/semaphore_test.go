package systemtest_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Several processes wait for permits, and several are given back at once: as many are
// woken, in turn.
func TestEachPermitThatIsGivenBackLetsInWhoWaitsLongest(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 40)
	testkit.KeepTurns(t, db)
	const n = 2
	holder := testkit.Semaphore(t, testkit.NewLocker(t, db, nil), n)
	var waiters []*pgxlock.Semaphore
	for range 2 * n {
		waiters = append(waiters, testkit.Semaphore(t, testkit.Listening(t, db, "waiter"), n))
	}
	type grant struct {
		turn int
		lock *pgxlock.Lock
	}
	var held []*pgxlock.Lock
	for range n {
		held = append(held, testkit.Permit(t, holder, "jobs"))
	}
	granted := make(chan grant, 2*n)
	for i, s := range waiters {
		go func() {
			lock, err := s.Acquire(t.Context(), "jobs")
			if err != nil {
				t.Error(err)
			}
			granted <- grant{i, lock}
		}()
		testkit.UntilQueued(t, db, "jobs#", i+1)
	}
	var releasing sync.WaitGroup
	for _, lock := range held {
		releasing.Go(func() { testkit.Release(t, lock) })
	}
	releasing.Wait()
	for i := range n {
		next := <-granted
		if held[i] = next.lock; next.turn >= n {
			t.Errorf("number %d is among the first %d", next.turn, n)
		}
	}
	if len(granted) > 0 {
		t.Fatalf("%s was granted, and none was left", (<-granted).lock.Key())
	}
	for i := range n {
		testkit.Release(t, held[i])
		next := <-granted
		if held[i] = next.lock; next.turn != n+i {
			t.Errorf("number %d came when it was the turn of %d", next.turn, n+i)
		}
	}
	for _, lock := range held {
		testkit.Release(t, lock)
	}
	testkit.NoTickets(t, db)
}

func TestLargerRequestForPermitsIsServedBeforeSmallerOnesOfOtherProcesses(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 40)
	testkit.KeepTurns(t, db)
	const n = 4
	holder := testkit.Semaphore(t, testkit.NewLocker(t, db, nil), n)
	large, small := testkit.Semaphore(t, testkit.Listening(t, db, "large"), n), testkit.Semaphore(t, testkit.Listening(t, db, "small"), n)
	first, second := testkit.Permit(t, holder, "jobs"), testkit.Permit(t, holder, "jobs")
	together := make(chan pgxlock.Locks, 1)
	go func() {
		all, err := large.AcquireN(t.Context(), "jobs", 3)
		if err != nil {
			t.Error(err)
		}
		together <- all
	}()
	testkit.UntilQueued(t, db, "jobs#", 1)
	if _, err := small.TryAcquire(t.Context(), "jobs"); !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("a try passes the larger request: %v", err)
	}
	alone := testkit.WaitsForPermit(t, small, "jobs")
	testkit.UntilQueued(t, db, "jobs#", 2)
	testkit.Release(t, first)
	all := <-together
	if len(all) != 3 || len(alone) > 0 {
		t.Fatalf("%d permits, and %d for the smaller request", len(all), len(alone))
	}
	if err := all.Release(t.Context()); err != nil {
		t.Error(err)
	}
	testkit.Release(t, <-alone)
	testkit.Release(t, second)
	testkit.NoTickets(t, db)
}

// The release wakes, not the periodic check: the woken ticket is stamped.
func TestReleaseWakesWhoWaitsForAPermit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	woken := testkit.CountNotifications(t, db)
	holder, waiter := testkit.Semaphore(t, testkit.NewLocker(t, db, nil), 1), testkit.Semaphore(t, testkit.Listening(t, db, "waiter"), 1)
	next := testkit.Semaphore(t, testkit.Listening(t, db, "next"), 1)
	var byFirst, byQueued int                                                // who gives back what it had to wait for does it in another way
	for round := 0; round < 20 && (byFirst == 0 || byQueued == 0); round++ { // now and then the look comes first
		hand := func(lock *pgxlock.Lock, to *pgxlock.Semaphore) (*pgxlock.Lock, int) {
			granted := testkit.WaitsForPermit(t, to, "jobs")
			testkit.UntilQueued(t, db, "jobs#", 1)
			before := woken()
			testkit.Release(t, lock)
			lock = <-granted
			return lock, woken() - before
		}
		lock, n := hand(testkit.Permit(t, holder, "jobs"), waiter)
		byFirst += n
		lock, n = hand(lock, next)
		byQueued += n
		testkit.Release(t, lock)
	}
	if byFirst == 0 || byQueued == 0 {
		t.Errorf("twenty releases woke %d, and twenty by those who had waited %d", byFirst, byQueued)
	}
}

// More than one permit may have been given back when one is woken: each wakes the next.
func TestGrantOfAPermitWakesTheNext(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	const n = 5
	var waiters []*pgxlock.Semaphore
	for range n {
		waiters = append(waiters, testkit.Semaphore(t, testkit.Listening(t, db, "waiter"), n))
	}
	woken, most := testkit.CountNotifications(t, db), 0
	for round := 0; round < 20 && most < 3; round++ { // now and then the look comes first
		db.Exec(t, "select acquire_permit('jobs', 'all', 5, 600) from generate_series(1, 5)")
		var granted []<-chan *pgxlock.Lock
		for i, s := range waiters {
			granted = append(granted, testkit.WaitsForPermit(t, s, "jobs"))
			testkit.UntilQueued(t, db, "jobs#", i+1)
		}
		before := woken()
		db.Exec(t, "select release_all_locks('all')")
		db.Exec(t, "select wake_lock_waiter('jobs#')")
		var held []*pgxlock.Lock
		for _, granted := range granted {
			held = append(held, <-granted)
		}
		most = max(most, woken()-before)
		for _, lock := range held {
			testkit.Release(t, lock)
		}
		testkit.NoTickets(t, db)
	}
	if most < 3 {
		t.Errorf("at most %d of %d were woken", most, n)
	}
}

// Callers that want the lease of a permit wait for it, too, and are woken as well.
func TestReleaseOfAPermitWakesWhoWaitsForItsLease(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	woken := testkit.CountNotifications(t, db)
	s, waiter := testkit.Semaphore(t, testkit.NewLocker(t, db, nil), 1), testkit.Listening(t, db, "waiter")
	n := 0
	for round := 0; round < 20 && n == 0; round++ { // now and then the look comes first
		lock := testkit.Permit(t, s, "jobs")
		granted := testkit.Waits(t, waiter, "jobs#1")
		testkit.UntilQueued(t, db, "jobs#1", 1)
		before := woken()
		testkit.Release(t, lock)
		lock = <-granted
		n += woken() - before
		testkit.Release(t, lock)
	}
	if n == 0 {
		t.Error("twenty releases woke nobody")
	}
}

const permitSQL = "pgxlock_permit_batch"

// Who asks again may get another permit than the one that it got before.
func TestLostReplyOfAPermitLeavesNoneThatNobodyOwns(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	p, through := testkit.Proxied(t, db)
	s := testkit.Semaphore(t, testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour}), 3) // long before they would expire
	waiter := testkit.Semaphore(t, testkit.Listening(t, db, "waiter"), 3)
	first := testkit.Permit(t, s, "jobs")
	lost := p.Arm(t, testkit.LoseReply, permitSQL)
	second := testkit.Permit(t, s, "jobs")
	lost.Happened(t)
	untilOnlyHeld(t, db, first, second)

	// All are taken by then, one of them by the attempt before. Who has come to wait since hears that
	// it is given back.
	woken, n := testkit.CountNotifications(t, db), 0
	for round := 0; round < 20 && n == 0; round++ { // now and then the look comes first
		held := p.Arm(t, testkit.HoldReply, permitSQL)
		tried := make(chan error, 1)
		go func() {
			_, err := s.TryAcquire(t.Context(), "jobs")
			tried <- err
		}()
		held.Happened(t)
		granted := testkit.WaitsForPermit(t, waiter, "jobs")
		testkit.UntilQueued(t, db, "jobs#", 1)
		before := woken()
		p.Cut()
		held.Resume()
		if err := <-tried; !errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("one was left, and its reply was lost: %v", err)
		}
		last := <-granted
		n += woken() - before
		untilOnlyHeld(t, db, first, second, last)
		testkit.Release(t, last)
	}
	if n == 0 {
		t.Error("what was given back twenty times woke nobody")
	}
}

func TestPermitsThatAreWantedTogetherAreReleasedWhenTheReplyIsLost(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, &pgxlock.LeaseConfig{TTL: time.Hour}) // long before they would expire
	for _, n := range []int{8, 4} {                                              // the second attempt finds enough, or too few
		lost := p.Arm(t, testkit.LoseReply, permitSQL)
		all, err := testkit.Semaphore(t, locks, n).AcquireN(t.Context(), "jobs", 3)
		if err != nil || len(all) != 3 {
			t.Fatalf("%d permits, %v", len(all), err)
		}
		lost.Happened(t)
		untilOnlyHeld(t, db, all...)
		if err := all.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// In a bubble a wait that no release ends would take time.
func TestTwoPermitsThatAreGivenBackLetInTwoAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := testkit.Semaphore(t, pgxlock.NewMemoryLocker(), 2)
		a, b := testkit.Permit(t, s, "jobs"), testkit.Permit(t, s, "jobs")
		first, second := testkit.WaitsForPermit(t, s, "jobs"), testkit.WaitsForPermit(t, s, "jobs")
		synctest.Wait()
		began := time.Now()
		testkit.Release(t, a)
		testkit.Release(t, b)
		<-first
		<-second
		if took := time.Since(began); took != 0 {
			t.Errorf("it took %s", took)
		}
	})
}

// The options of a call are the caller's, who may use them for another semaphore at the
// same time.
func TestSemaphoreLeavesItsCallersOptionsAlone(t *testing.T) {
	t.Parallel()
	s := testkit.Semaphore(t, pgxlock.NewMemoryLocker(), 2)
	opts := make([]pgxlock.PermitOption, 1, 2)
	opts[0] = pgxlock.NoWait
	testkit.Permit(t, s, "jobs", opts...)
	if more := opts[:2][1]; more != nil {
		t.Errorf("it has written %v behind them", more)
	}
}

func TestPermitsOfWhoDiedAreFreeAfterTheirTTL(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	s := testkit.Semaphore(t, testkit.Listening(t, db, "survivor"), 2)
	db.Exec(t, `select acquire_permit('jobs', 'dies', 2, 600), acquire_permit('jobs', 'dies', 2, 600)`)
	if got := testkit.Query[*string](t, db, "select acquire_permit('jobs', 'late', 2)"); got != nil {
		t.Errorf("%s was granted as the third of two", *got)
	}
	db.Exec(t, "update distributed_locks set expires_at = clock_timestamp() + interval '1 second' where holder_id = 'dies'")
	a, b := testkit.Permit(t, s, "jobs"), testkit.Permit(t, s, "jobs")
	if a.Key() == b.Key() {
		t.Errorf("%s was granted twice", a.Key())
	}
	if gone := testkit.Query[bool](t, db, "select extend_lock('jobs#1', 'dies')"); gone {
		t.Error("who died has extended its permit")
	}
}

// A permit is a lease: SQL can release it, and a caller that uses one up leaves fewer.
func TestPermitIsALeaseForCallersInSQL(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	s := testkit.Semaphore(t, testkit.Listening(t, db, "go"), 2)
	db.Exec(t, "select acquire_lock('jobs#2', 'maintenance', 600)")
	lock := testkit.Permit(t, s, "jobs")
	if lock.Key() != "jobs#1" {
		t.Errorf("the permit that is left is %s", lock.Key())
	}
	granted := testkit.WaitsForPermit(t, s, "jobs")
	testkit.UntilQueued(t, db, "jobs#", 1)
	db.Exec(t, "select release_lock('jobs#2', 'maintenance')")
	db.Exec(t, "select wake_lock_waiter('jobs#')")
	if lock := <-granted; lock.Key() != "jobs#2" {
		t.Errorf("the permit that was given back is %s", lock.Key())
	}
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return lock.Fence(t.Context(), tx) })
	if err != nil {
		t.Error(err)
	}
	db.Exec(t, "delete from distributed_locks where lock_name = 'jobs#1'")
	err = pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return lock.Fence(t.Context(), tx) })
	if !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("a permit that somebody took away: %v", err)
	}
}

func TestDifferentNumbersOfPermitsAreReportedOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 20)
	var said safeText
	few := testkit.Semaphore(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Logger: slog.New(slog.NewTextHandler(&said, nil))}), 2)
	many := testkit.Semaphore(t, testkit.NewLocker(t, db, nil), 5)
	testkit.Release(t, testkit.Permit(t, few, "jobs"))
	testkit.Release(t, testkit.Permit(t, few, "jobs"))
	if text := said.String(); strings.Contains(text, "permits") {
		t.Errorf("nobody else uses the semaphore, and it says %s", text)
	}
	testkit.Release(t, testkit.Permit(t, many, "jobs"))
	for range 3 {
		testkit.Release(t, testkit.Permit(t, few, "jobs"))
	}
	if text := said.String(); strings.Count(text, "different numbers of permits") != 1 || !strings.Contains(text, "semaphore=jobs permits=2 others=5") {
		t.Errorf("it says %s", text)
	}
}

// safeText is what is written to it.
type safeText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *safeText) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *safeText) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// Lockers of many processes take and give back permits: there are never more holders
// than there are permits.
func TestSoakThereAreNeverMoreHoldersThanPermits(t *testing.T) {
	t.Parallel()
	rounds := pgtest.Soak(t, 15, 100)
	db := testkit.Roomy(t, testkit.Migrated(t), 40)
	const n, lockers, workers = 3, 4, 4
	var inside, most, grants atomic.Int32
	var working sync.WaitGroup
	for range lockers {
		s := testkit.Semaphore(t, testkit.NewLocker(t, db, nil), n)
		for range workers {
			working.Go(func() {
				for range rounds {
					if err := s.Do(t.Context(), "jobs", func(context.Context, *pgxlock.Lock) error {
						now := inside.Add(1)
						for was := most.Load(); now > was && !most.CompareAndSwap(was, now); was = most.Load() {
						}
						// The work: long enough for as many to come as may, and one more.
						for began := time.Now(); inside.Load() < n && time.Since(began) < 5*time.Millisecond; {
							time.Sleep(100 * time.Microsecond)
						}
						time.Sleep(time.Millisecond)
						inside.Add(-1)
						grants.Add(1)
						return nil
					}); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	working.Wait()
	if grants.Load() != int32(lockers*workers*rounds) || most.Load() > n {
		t.Errorf("%d grants, up to %d at a time", grants.Load(), most.Load())
	}
	t.Logf("up to %d at a time", most.Load())
	testkit.NoTickets(t, db)
}
