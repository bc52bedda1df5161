package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
)

// How a lock is taken away: whose, and what its holder is told.

// wantEvicted checks that a lock is lost, and says who took it away and why.
func wantEvicted(t *testing.T, lock *pgxlock.Lock) {
	t.Helper()
	wantLost(t, lock)
	if err := lock.Err(); !errors.Is(err, pgxlock.ErrEvicted) || !strings.Contains(err.Error(), "evicted by postgres") || !strings.Contains(err.Error(), ": this node is drained") {
		t.Errorf("it was told: %v", err)
	}
}

// holder finds who holds a key.
func holder(t *testing.T, mon *monitor.Monitor, key string) pgxlock.Holder {
	t.Helper()
	found, err := mon.Holders(t.Context(), monitor.Filter{Key: key})
	if err != nil || len(found) != 1 {
		t.Fatalf("%+v, %v", found, err)
	}
	return found[0]
}

// evict takes a lock away, and says whether the holder had it.
func evict(t *testing.T, mon *monitor.Monitor, h pgxlock.Holder) bool {
	t.Helper()
	var evicted bool
	var err error
	pgtest.Until(t, "the holder answers", func() bool { // a machine may be busy
		evicted, err = mon.Evict(t.Context(), h, "this node is drained")
		return !errors.Is(err, monitor.ErrStillHeld)
	})
	if err != nil {
		t.Errorf("evict %+v: %v", h, err)
	}
	return evicted
}

// A holder that releases before its next renewal has not heard of its eviction.
func TestReleaseAfterAnEvictionSaysWhoAndWhy(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	locks := testkit.NewLocker(t, db, nil)
	jobs := testkit.Semaphore(t, locks, 1)
	work := func(_ context.Context, lock *pgxlock.Lock) error {
		evict(t, mon, holder(t, mon, lock.Key()))
		return nil
	}
	released := func(lock *pgxlock.Lock) error {
		_ = work(t.Context(), lock)
		return lock.Release(t.Context())
	}
	for name, err := range map[string]error{
		"Release":             released(testkit.Acquire(t, locks, "k")),
		"Release of a share":  released(testkit.Acquire(t, locks, "k", pgxlock.Shared)),
		"Release of a permit": released(testkit.Permit(t, jobs, "k")),
		"Do":                  locks.Do(t.Context(), "k", work),
		"Do with a share":     locks.Do(t.Context(), "k", work, pgxlock.Shared),
		"Do of a semaphore":   jobs.Do(t.Context(), "k", work),
	} {
		if !errors.Is(err, pgxlock.ErrLost) || !errors.Is(err, pgxlock.ErrEvicted) || !strings.Contains(fmt.Sprint(err), "evicted by postgres") || !strings.Contains(fmt.Sprint(err), ": this node is drained") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEvictedHolderOfALeaseIsToldAndFenced(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	locks, others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Renew: 100 * time.Millisecond}), testkit.NewLocker(t, db, nil)
	jobs := testkit.Semaphore(t, locks, 1)
	for what, take := range map[string]func() *pgxlock.Lock{
		"a lease":  func() *pgxlock.Lock { return testkit.Acquire(t, locks, "k") },
		"a share":  func() *pgxlock.Lock { return testkit.Acquire(t, locks, "k", pgxlock.Shared) },
		"a permit": func() *pgxlock.Lock { return testkit.Permit(t, jobs, "jobs") },
	} {
		lock, unharmed := take(), testkit.Acquire(t, locks, "another")
		h := holder(t, mon, lock.Key())
		wrong := h
		wrong.Token--
		if evict(t, mon, wrong) {
			t.Errorf("%s: the one before it is evicted", what)
		}
		if !evict(t, mon, h) || evict(t, mon, h) {
			t.Errorf("%s: it was not the holder, or is it still", what)
		}
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		if err := lock.Fence(t.Context(), tx); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Fence: %v", what, err)
		}
		testkit.Rollback(t, tx)
		next, err := others.TryAcquire(t.Context(), lock.Key()) // at once
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if next.Token() <= lock.Token() {
			t.Errorf("%s: token %d after %d", what, next.Token(), lock.Token())
		}
		wantEvicted(t, lock)
		if evict(t, mon, h) || next.Renew(t.Context()) != nil || unharmed.Renew(t.Context()) != nil {
			t.Errorf("%s: another one is evicted", what)
		}
		testkit.Release(t, next)
		testkit.Release(t, unharmed)
	}
}

// Until somebody acquires the lock again.
func TestMonitorSaysWhyAHolderWasEvicted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	locks, next := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), testkit.NewLocker(t, db, nil)
	keys := make(map[string]string)
	for _, lock := range []*pgxlock.Lock{
		testkit.Acquire(t, locks, "lease"), testkit.Acquire(t, locks, "share", pgxlock.Shared), testkit.Permit(t, testkit.Semaphore(t, locks, 1), "jobs"),
	} {
		reason := "why " + lock.Key()
		if evicted, err := mon.Evict(t.Context(), holder(t, mon, lock.Key()), reason); !evicted || err != nil {
			t.Fatalf("%t, %v", evicted, err)
		}
		keys[lock.Key()] = reason
	}
	unharmed := testkit.Acquire(t, locks, "another")
	db.Exec(t, "select acquire_lock('died', 'A'); update distributed_locks set expires_at = now() where lock_name = 'died'")
	wantReasons := func(found []pgxlock.Holder, want map[string]string) {
		t.Helper()
		for _, h := range found {
			if by := h.EvictedBy; h.EvictionReason != want[h.LockKey()] || by != "" != (want[h.LockKey()] != "") || by != "" && !strings.HasPrefix(by, "postgres") {
				t.Errorf("%+v", h)
			}
		}
	}
	shot := testkit.Snapshot(t, mon)
	expired, err := mon.Expired(t.Context())
	if err != nil || len(shot.Expired) != 4 || len(expired) != 4 {
		t.Fatalf("%+v, %+v, %v", shot.Expired, expired, err)
	}
	wantReasons(shot.Expired, keys)
	wantReasons(expired, keys)
	wantReasons(shot.Holders, nil)
	for key := range keys {
		if key == "share" {
			testkit.Acquire(t, next, key, pgxlock.Shared)
		} else {
			testkit.Acquire(t, next, key)
		}
	}
	if shot := testkit.Snapshot(t, mon); len(shot.Holders) != 4 || len(shot.Expired) != 1 {
		t.Errorf("%+v", shot)
	}
	wantReasons(testkit.Snapshot(t, mon).Holders, nil)
	testkit.Release(t, unharmed)

	// A session is asked, and has the lock until it releases it. What it was asked for before may
	// be another hold.
	conn, pid := testkit.Backend(t, db)
	testkit.ExecOn(t, conn, "select pg_advisory_lock(7), pg_advisory_lock_shared(7), pg_advisory_lock(8), pg_advisory_lock(0, 7)")
	db.Exec(t, fmt.Sprintf("select evict_advisory_lock(%d, 7, 'before'), evict_advisory_lock(%[1]d, 8, 'long ago')", pid))
	db.Exec(t, fmt.Sprintf("select evict_advisory_lock(%d, 7, 'it is drained')", pid))
	db.Exec(t, "update pgxlock_evictions set evicted_at = evicted_at - interval '11 seconds' where reason = 'long ago'")
	found, err := mon.Holders(t.Context(), monitor.Filter{Kind: pgxlock.KindAdvisory})
	if err != nil || len(found) != 4 {
		t.Fatalf("%+v, %v", found, err)
	}
	wantReasons(found, map[string]string{pgxlock.RawKey(7): "it is drained"})
}

func TestWaiterGetsTheLockOfAnEvictedHolder(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	locks, others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), testkit.NewLocker(t, db, nil)
	testkit.Acquire(t, locks, "k")
	next := testkit.Waits(t, others, "k", testkit.LongWait)
	testkit.UntilQueued(t, db, "k", 1)
	evict(t, mon, holder(t, mon, "k"))
	testkit.Release(t, <-next)
}

// An advisory lock is lost before it is given back, with all that share it.
func TestSessionGivesBackWhatItIsAskedFor(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	locks, others := testkit.NewAdvisory(t, db, nil), testkit.NewAdvisory(t, db, nil)
	for _, key := range []string{"k", "#-5", pgxlock.RawKey(-5), pgxlock.RawKey2(-1, 7)} {
		one, two, unharmed := testkit.Acquire(t, locks, key, pgxlock.Shared), testkit.Acquire(t, locks, key, pgxlock.Shared), testkit.Acquire(t, locks, "another")
		next := testkit.Waits(t, others, key, testkit.LongWait)
		h := holder(t, mon, key)
		if !evict(t, mon, h) {
			t.Error("it was not the holder")
		}
		wantEvicted(t, one)
		wantEvicted(t, two)
		got := <-next
		if unharmed.Err() != nil || got.Err() != nil || evict(t, mon, h) {
			t.Errorf("another one is evicted: %v, %v", unharmed.Err(), got.Err())
		}
		testkit.Release(t, got)
		again := testkit.Acquire(t, locks, key) // the request was for the holder at that time
		if !strings.HasSuffix(again.Holder(), fmt.Sprint(":", h.PID)) {
			t.Errorf("the session of process %d is gone: %s", h.PID, again.Holder())
		}
		if !evict(t, mon, holder(t, mon, "another")) { // the session looks at all that it was ever asked for
			t.Error("it was not the holder")
		}
		wantEvicted(t, unharmed)
		if again.Err() != nil {
			t.Errorf("an old request ended a later acquisition: %v", again.Err())
		}
		testkit.Release(t, again)
	}
}

// What is no Locker's is not given back. Its session can be ended, when all that dies
// with it was seen.
func TestSessionThatDoesNotAnswerIsEndedByASecondStep(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, &monitor.Config{Names: []string{"k"}})
	conn, pid := testkit.Backend(t, db)
	testkit.ExecOn(t, conn, fmt.Sprintf("set application_name = 'psql'; select pg_advisory_lock(%d), pg_advisory_lock_shared(7)", pgxlock.AdvisoryID("k")))
	h := holder(t, mon, "k")
	if evicted, err := mon.Evict(t.Context(), h, "why"); evicted || !errors.Is(err, monitor.ErrStillHeld) || errors.Is(err, context.Canceled) {
		t.Errorf("%t, %v", evicted, err)
	}
	short, cancel := context.WithCancel(t.Context())
	cancel()
	if evicted, err := mon.Evict(short, h, "why"); evicted || err == nil {
		t.Errorf("%t, %v", evicted, err)
	}
	session, err := mon.Session(t.Context(), pid)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, h := range session.Holders {
		keys = append(keys, h.LockKey())
	}
	if !slices.Equal(keys, []string{pgxlock.RawKey(7), "k"}) || session.Application != "psql" || session.Role == "" {
		t.Errorf("%+v", session)
	}
	if _, err := mon.Terminate(t.Context(), session, ""); err == nil || !strings.Contains(err.Error(), "reason") {
		t.Errorf("%v", err)
	}
	if terminated, err := mon.Terminate(t.Context(), session, "it hangs"); !terminated || err != nil {
		t.Errorf("%t, %v", terminated, err)
	}
	if got := testkit.Query[string](t, db, "select string_agg(reason, ', ') from pgxlock_evictions where holder like 'advisory:' || $1 || ':%'", fmt.Sprint(pid)); got != "the session was ended: it hangs, the session was ended: it hangs" {
		t.Errorf("recorded: %q", got)
	}
	if terminated, err := mon.Terminate(t.Context(), session, "it hangs"); terminated || err != nil {
		t.Errorf("again: %t, %v", terminated, err)
	}
	if _, err := mon.Session(t.Context(), pid); !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("%v", err)
	}
	if found := testkit.HoldersOf(testkit.Snapshot(t, mon), "k"); found != nil {
		t.Errorf("%+v", found)
	}

	// A Locker that answers learns why, or Terminate has waited for it.
	lock := testkit.Acquire(t, testkit.NewAdvisory(t, db, nil), "mine")
	if session, err = mon.Session(t.Context(), holder(t, mon, pgxlock.RawKey(pgxlock.AdvisoryID("mine"))).PID); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if terminated, err := mon.Terminate(t.Context(), session, "in the way"); !terminated || err != nil {
		t.Errorf("%t, %v", terminated, err)
	}
	took := time.Since(began)
	<-lock.Lost()
	if err := lock.Err(); took < time.Second && (!errors.Is(err, pgxlock.ErrEvicted) || !strings.Contains(err.Error(), "the session was ended: in the way")) {
		t.Errorf("after %s it was told: %v", took, err)
	}
}

// A process id is used again: the session that has it now is left alone.
func TestAnotherSessionWithTheSameProcessIDIsNotEnded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	_, pid := testkit.Backend(t, db)
	session, err := mon.Session(t.Context(), pid)
	if err != nil {
		t.Fatal(err)
	}
	later, pid := testkit.Backend(t, db)
	session.PID = pid
	if terminated, err := mon.Terminate(t.Context(), session, "why"); terminated || err != nil {
		t.Errorf("%t, %v", terminated, err)
	}
	testkit.ExecOn(t, later, "select 1")

	// A role that may not see when it began cannot tell, and is told what to do, also where another one logged in.
	role, theirs := login(t, db)
	inRole := &pgtest.DB{Pool: db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["role"] = role }), URL: db.URL, Name: db.Name}
	for _, db := range []*pgtest.DB{theirs, inRole} {
		mon := testkit.NewMonitor(t, db, nil)
		unknown, err := mon.Session(t.Context(), pid)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := mon.Terminate(t.Context(), unknown, "why"); err == nil || !strings.Contains(err.Error(), "GRANT pg_monitor") || strings.Count(err.Error(), role) != 2 {
			t.Errorf("%v", err)
		}
		if missing := strings.Join(testkit.Snapshot(t, mon).Missing, "\n"); !strings.Contains(missing, `GRANT pg_monitor TO "`+role+`"`) {
			t.Error(missing)
		}
	}
}

func TestReapRemovesWhatExpiredLongAgo(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	mon := testkit.NewMonitor(t, db, nil)
	db.Exec(t, `select acquire_lock('live', 'A'), acquire_shared_lock('shared', 'B');
		select count(acquire_lock('k' || i, 'A')) from generate_series(1, 2500) i;
		update distributed_locks set expires_at = clock_timestamp() - interval '2 minutes' where lock_name like 'k%';
		select acquire_shared_lock('over', 'C'); update distributed_locks set expires_at = clock_timestamp() - interval '2 minutes' where lock_name = 'over';
		update distributed_lock_shares set expires_at = clock_timestamp() - interval '2 minutes' where lock_name = 'over'`)
	for _, step := range []struct {
		age  time.Duration
		want int64
	}{{3 * time.Minute, 0}, {time.Minute, 2502}, {0, 0}} {
		if n, err := mon.Reap(t.Context(), step.age); n != step.want || err != nil {
			t.Errorf("%s: %d, %v, want %d", step.age, n, err, step.want)
		}
	}
	if n := testkit.Query[int](t, db, "select (select count(*) from distributed_locks) * 10 + (select count(*) from distributed_lock_shares)"); n != 21 {
		t.Errorf("%d are left", n)
	}
}

// The function is the database's: what it says of locks that were not asked about is nothing.
func TestAnswerAboutLocksThatWereNotAskedForIsIgnored(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `create or replace function pgxlock_evicted(p_kinds integer[], p_names text[], p_holders text[], p_tokens bigint[])
		returns table (n bigint, evicted_by text, reason text, ms bigint) language sql
		as $$ values (0::bigint, 'evil', 'x', 0::bigint), (1, 'postgres', 'this node is drained', 0), (99, 'evil', 'x', 0) $$`)
	lock := testkit.Acquire(t, testkit.NewAdvisory(t, db, nil), "k")
	if !evict(t, testkit.NewMonitor(t, db, nil), holder(t, testkit.NewMonitor(t, db, nil), "k")) {
		t.Error("it was not the holder")
	}
	wantEvicted(t, lock)
}
