package gocronlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-co-op/gocron/v2"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	gocronlock "github.com/pgxlock/pgxlock/adapters/gocron"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// schedule starts a scheduler with one job, of a millisecond, that is due each second at
// this time in it; it is shut down when the test is over.
func schedule(t *testing.T, name string, phase time.Duration, ran func(), options []gocron.SchedulerOption, of ...gocron.JobOption) gocron.Scheduler {
	t.Helper()
	s, err := gocron.NewScheduler(options...)
	if err != nil {
		t.Fatal(err)
	}
	first := time.Now().Truncate(time.Second).Add(2*time.Second + phase)
	of = append(of, gocron.WithName(name), gocron.WithStartAt(gocron.WithStartDateTimePast(first)))
	if _, err := s.NewJob(gocron.DurationJob(time.Second), gocron.NewTask(func() {
		time.Sleep(time.Millisecond)
		ran()
	}), of...); err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		if err := s.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// What gocron #841 is about: the clocks are up to 200 ms early and late, and the job is
// over long before the others begin.
func TestSchedulersRunAJobOnceASecondWhateverTheirClocksSay(t *testing.T) {
	t.Parallel()
	pool := testkit.Migrated(t).Pool
	phases := []struct {
		name   string
		offset time.Duration
	}{{"half a second later", 500 * time.Millisecond}, {"at the full second", 0}}
	if testing.Short() {
		phases = phases[:1]
	}
	for _, test := range phases {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			const seconds = 5
			var ran atomic.Int32
			enough := make(chan struct{})
			var schedulers []gocron.Scheduler
			var lockers []*gocronlock.Locker
			for i, early := range []time.Duration{-200, -80, 0, 60, 190} {
				l, err := gocronlock.NewLocker(pool, time.Second, &once.Config{Offset: test.offset, Owner: fmt.Sprint("scheduler ", i)})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := l.Close(context.Background()); err != nil {
						t.Error(err)
					}
				})
				lockers = append(lockers, l)
				schedulers = append(schedulers, schedule(t, test.name, test.offset+early*time.Millisecond, func() {
					if ran.Add(1) == seconds {
						close(enough)
					}
				}, nil, gocron.WithDistributedJobLocker(l)))
			}
			<-enough
			for _, s := range schedulers {
				if err := s.StopJobs(); err != nil {
					t.Error(err)
				}
			}
			for _, l := range lockers { // which waits for what is taken back of calls that were cancelled
				if err := l.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
			// The rows say for which time each of them was.
			var runs, beside, over int
			if err := pool.QueryRow(t.Context(), `select count(*), count(*) filter (where date_trunc('second', due) <> due), count(*) filter (where state = 'succeeded')
				from (select *, slot - $2::interval + interval '0.5 s' as due from pgxlock_runs where run_key = $1 and state <> 'withdrawn') r`, test.name, test.offset).Scan(&runs, &beside, &over); err != nil {
				t.Fatal(err)
			}
			if n := int(ran.Load()); n != runs || n != over || beside != 0 {
				t.Errorf("the job ran %d times, for %d seconds, of which %d are not those when it was due; %d are over", n, runs, beside, over)
			}
		})
	}
}

func TestLockedJobIsRecordedAndNotRunAgain(t *testing.T) {
	t.Parallel()
	ctx, pool := t.Context(), testkit.Migrated(t).Pool
	l, err := gocronlock.NewLocker(pool, 3000*time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := l.Lock(ctx, "k")
	if err != nil {
		t.Fatal(err)
	}
	state := func() (s string) {
		t.Helper()
		if err := pool.QueryRow(ctx, "select state from pgxlock_runs where run_key = 'k'").Scan(&s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := state(); s != "running" {
		t.Errorf("while it runs: %s", s)
	}
	if _, err := l.Lock(ctx, "k"); !errors.Is(err, gocronlock.ErrTaken) {
		t.Errorf("while it runs: %v", err)
	}
	for range 2 {
		if err := lock.Unlock(ctx); err != nil {
			t.Error(err)
		}
	}
	if s := state(); s != "succeeded" {
		t.Errorf("afterwards: %s", s)
	}
	if _, err := l.Lock(ctx, "k"); !errors.Is(err, gocronlock.ErrTaken) {
		t.Errorf("afterwards: %v", err)
	}
	other, err := l.Lock(ctx, "another")
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	if err := l.Close(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("Close does not wait for the job: %v", err)
	}
	if _, err := l.Lock(ctx, "yet another"); !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("a closed Locker: %v", err)
	}
	_ = other.Unlock(ctx) // which could not be recorded any more
}

func TestLeaderRunsAllJobsUntilItIsClosed(t *testing.T) {
	t.Parallel()
	pool := testkit.Migrated(t).Pool
	type node struct {
		elector *gocronlock.Elector
		locks   *pgxlock.Locker
	}
	var nodes []node
	ran := make(chan int, 1000)
	for i := range 3 {
		locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Hour}) // which no pause of a machine exceeds
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := locks.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		elector, err := gocronlock.NewElector(locks, "leader")
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, node{elector, locks})
		schedule(t, "job", 0, func() { ran <- i }, []gocron.SchedulerOption{gocron.WithDistributedElector(elector)})
	}
	leader := <-ran
	for range 2 {
		if again := <-ran; again != leader {
			t.Errorf("%d runs the job of the leader, %d", again, leader)
		}
	}
	for i, n := range nodes {
		if err := n.elector.IsLeader(t.Context()); (err == nil) != (i == leader) || i != leader && !errors.Is(err, gocronlock.ErrNotLeader) {
			t.Errorf("%d of which %d is the leader: %v", i, leader, err)
		}
	}
	for range 2 {
		if err := nodes[leader].elector.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := nodes[leader].elector.IsLeader(t.Context()); !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("a closed Elector: %v", err)
	}
	next := <-ran
	for next == leader { // what had begun before
		next = <-ran
	}
	// An operator takes the lock away.
	if _, err := pool.Exec(t.Context(), "delete from distributed_locks where lock_name = 'leader'"); err != nil {
		t.Fatal(err)
	}
	if err := nodes[3-leader-next].elector.IsLeader(t.Context()); err != nil {
		t.Errorf("the third one does not become the leader: %v", err)
	}
	if err := nodes[next].locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := nodes[next].elector.IsLeader(t.Context()); err == nil {
		t.Error("who has lost the lock is still the leader")
	}
}

func TestBadInputIsNamed(t *testing.T) {
	t.Parallel()
	locks := pgxlock.NewMemoryLocker()
	pool, err := pgxpool.New(t.Context(), "host=127.0.0.1") // which connects to nothing
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for says, err := range map[string]error{
		"does not support Retry and CatchUp":    second(gocronlock.NewLocker(pool, time.Second, &once.Config{Retry: true})),
		"not support Retry and CatchUp; remove": second(gocronlock.NewLocker(pool, time.Second, &once.Config{CatchUp: 1})),
		"the pool is nil":                       second(gocronlock.NewLocker(nil, time.Second, nil)),
		"period is 0s":                          second(gocronlock.NewLocker(pool, 0, nil)),
		"Offset is 1s":                          second(gocronlock.NewLocker(pool, time.Second, &once.Config{Offset: time.Second})),
		"Offset is -1s":                         second(gocronlock.NewLocker(pool, time.Second, &once.Config{Offset: -time.Second})),
		"the Locker is nil":                     second(gocronlock.NewElector(nil, "k")),
		"the key is empty":                      second(gocronlock.NewElector(locks, "")),
	} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want that %s", err, says)
		}
	}
}

func second[T any](_ T, err error) error { return err }
