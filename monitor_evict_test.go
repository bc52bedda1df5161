package pgxlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
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
func holder(t *testing.T, monitor *pgxlock.Monitor, key string) pgxlock.Holder {
	t.Helper()
	found, err := monitor.Holders(t.Context(), pgxlock.Filter{Key: key})
	if err != nil || len(found) != 1 {
		t.Fatalf("%+v, %v", found, err)
	}
	return found[0]
}

// evict takes a lock away, and says whether the holder had it.
func evict(t *testing.T, monitor *pgxlock.Monitor, h pgxlock.Holder) bool {
	t.Helper()
	evicted, err := monitor.Evict(t.Context(), h, "this node is drained")
	for limit := time.Now().Add(30 * time.Second); errors.Is(err, pgxlock.ErrStillHeld) && time.Now().Before(limit); { // a machine may be busy
		evicted, err = monitor.Evict(t.Context(), h, "this node is drained")
	}
	if err != nil {
		t.Errorf("evict %+v: %v", h, err)
	}
	return evicted
}

func TestAnEvictedHolderOfALeaseIsToldAndFenced(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	monitor := newMonitor(t, db, nil)
	locks, others := newLocker(t, db, &pgxlock.LeaseConfig{Renew: 100 * time.Millisecond}), newLocker(t, db, nil)
	jobs := semaphore(t, locks, 1)
	for what, take := range map[string]func() *pgxlock.Lock{
		"a lease":  func() *pgxlock.Lock { return acquire(t, locks, "k") },
		"a share":  func() *pgxlock.Lock { return acquire(t, locks, "k", pgxlock.Shared) },
		"a permit": func() *pgxlock.Lock { return permit(t, jobs, "jobs") },
	} {
		lock, unharmed := take(), acquire(t, locks, "another")
		h := holder(t, monitor, lock.Key())
		wrong := h
		wrong.Token--
		if evict(t, monitor, wrong) {
			t.Errorf("%s: the one before it is evicted", what)
		}
		if !evict(t, monitor, h) || evict(t, monitor, h) {
			t.Errorf("%s: it was not the holder, or is it still", what)
		}
		tx := begin(t, db, pgx.TxOptions{})
		if err := lock.Fence(t.Context(), tx); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("%s: Fence: %v", what, err)
		}
		rollback(t, tx)
		next, err := others.TryAcquire(t.Context(), lock.Key()) // at once
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if next.Token() <= lock.Token() {
			t.Errorf("%s: token %d after %d", what, next.Token(), lock.Token())
		}
		wantEvicted(t, lock)
		if evict(t, monitor, h) || next.Renew(t.Context()) != nil || unharmed.Renew(t.Context()) != nil {
			t.Errorf("%s: another one is evicted", what)
		}
		release(t, next)
		release(t, unharmed)
	}
}

func TestWhoWaitsGetsTheLockOfAnEvictedHolder(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	monitor := newMonitor(t, db, nil)
	locks, others := newLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour}), newLocker(t, db, nil)
	acquire(t, locks, "k")
	next := waits(t, others, "k", longWait)
	untilQueued(t, db, "k", 1)
	evict(t, monitor, holder(t, monitor, "k"))
	release(t, <-next)
}

// An advisory lock is lost before it is given back, with all that share it.
func TestASessionGivesBackWhatItIsAskedFor(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	monitor := newMonitor(t, db, nil)
	locks, others := newAdvisory(t, db, nil), newAdvisory(t, db, nil)
	for _, key := range []string{"k", pgxlock.RawKey(-5), pgxlock.RawKey2(-1, 7)} {
		one, two, unharmed := acquire(t, locks, key, pgxlock.Shared), acquire(t, locks, key, pgxlock.Shared), acquire(t, locks, "another")
		next := waits(t, others, key, longWait)
		h := holder(t, monitor, key)
		if !evict(t, monitor, h) {
			t.Error("it was not the holder")
		}
		wantEvicted(t, one)
		wantEvicted(t, two)
		got := <-next
		if unharmed.Err() != nil || got.Err() != nil || evict(t, monitor, h) {
			t.Errorf("another one is evicted: %v, %v", unharmed.Err(), got.Err())
		}
		release(t, got)
		again := acquire(t, locks, key) // the request was for who had it then
		if !strings.HasSuffix(again.Holder(), fmt.Sprint(":", h.PID)) {
			t.Errorf("the session of process %d is gone: %s", h.PID, again.Holder())
		}
		if !evict(t, monitor, holder(t, monitor, "another")) { // the session looks at all that it was ever asked for
			t.Error("it was not the holder")
		}
		wantEvicted(t, unharmed)
		if again.Err() != nil {
			t.Errorf("an old request ended a later acquisition: %v", again.Err())
		}
		release(t, again)
	}
}

// What is no Locker's is not given back. Its session can be ended, when all that dies
// with it was seen.
func TestASessionThatDoesNotAnswerIsEndedByASecondStep(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	monitor := newMonitor(t, db, &pgxlock.MonitorConfig{Names: []string{"k"}})
	conn, pid := backend(t, db)
	execOn(t, conn, fmt.Sprintf("set application_name = 'psql'; select pg_advisory_lock(%d), pg_advisory_lock_shared(7)", pgxlock.AdvisoryID("k")))
	h := holder(t, monitor, "k")
	if evicted, err := monitor.Evict(t.Context(), h, "why"); evicted || !errors.Is(err, pgxlock.ErrStillHeld) || errors.Is(err, context.Canceled) {
		t.Errorf("%t, %v", evicted, err)
	}
	short, cancel := context.WithCancel(t.Context())
	cancel()
	if evicted, err := monitor.Evict(short, h, "why"); evicted || err == nil {
		t.Errorf("%t, %v", evicted, err)
	}
	session, err := monitor.Session(t.Context(), pid)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, h := range session.Holders {
		keys = append(keys, h.Key)
	}
	if !slices.Equal(keys, []string{pgxlock.RawKey(7), "k"}) || session.Application != "psql" || session.Role == "" {
		t.Errorf("%+v", session)
	}
	if _, err := monitor.Terminate(t.Context(), session, ""); err == nil || !strings.Contains(err.Error(), "reason") {
		t.Errorf("%v", err)
	}
	if terminated, err := monitor.Terminate(t.Context(), session, "it hangs"); !terminated || err != nil {
		t.Errorf("%t, %v", terminated, err)
	}
	if got := query[string](t, db, "select string_agg(reason, ', ') from pgxlock_evictions where holder like 'advisory:' || $1 || ':%'", fmt.Sprint(pid)); got != "the session was ended: it hangs, the session was ended: it hangs" {
		t.Errorf("recorded: %q", got)
	}
	if terminated, err := monitor.Terminate(t.Context(), session, "it hangs"); terminated || err != nil {
		t.Errorf("again: %t, %v", terminated, err)
	}
	if _, err := monitor.Session(t.Context(), pid); !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("%v", err)
	}
	if found := holdersOf(snapshot(t, monitor), "k"); found != nil {
		t.Errorf("%+v", found)
	}
}

// A process id is used again: the session that has it now is left alone.
func TestAnotherSessionWithTheSameProcessIDIsNotEnded(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	monitor := newMonitor(t, db, nil)
	_, pid := backend(t, db)
	session, err := monitor.Session(t.Context(), pid)
	if err != nil {
		t.Fatal(err)
	}
	later, pid := backend(t, db)
	session.PID = pid
	if terminated, err := monitor.Terminate(t.Context(), session, "why"); terminated || err != nil {
		t.Errorf("%t, %v", terminated, err)
	}
	execOn(t, later, "select 1")

	// Who may not see when it began cannot tell, and is told what to do.
	role, theirs := login(t, db)
	unknown, err := newMonitor(t, theirs, nil).Session(t.Context(), pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newMonitor(t, theirs, nil).Terminate(t.Context(), unknown, "why"); err == nil || !strings.Contains(err.Error(), "GRANT pg_monitor") || !strings.Contains(err.Error(), role) {
		t.Errorf("%v", err)
	}
}

func TestReapRemovesWhatExpiredLongAgo(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	monitor := newMonitor(t, db, nil)
	db.Exec(t, `select acquire_lock('live', 'A'), acquire_shared_lock('shared', 'B');
		select count(acquire_lock('k' || i, 'A')) from generate_series(1, 2500) i;
		update distributed_locks set expires_at = clock_timestamp() - interval '2 minutes' where lock_name like 'k%';
		select acquire_shared_lock('over', 'C'); update distributed_locks set expires_at = clock_timestamp() - interval '2 minutes' where lock_name = 'over';
		update distributed_lock_shares set expires_at = clock_timestamp() - interval '2 minutes' where lock_name = 'over'`)
	for _, step := range []struct {
		age  time.Duration
		want int64
	}{{3 * time.Minute, 0}, {time.Minute, 2502}, {0, 0}} {
		if n, err := monitor.Reap(t.Context(), step.age); n != step.want || err != nil {
			t.Errorf("%s: %d, %v, want %d", step.age, n, err, step.want)
		}
	}
	if n := query[int](t, db, "select (select count(*) from distributed_locks) * 10 + (select count(*) from distributed_lock_shares)"); n != 21 {
		t.Errorf("%d are left", n)
	}
}

// The function is the database's: what it says of locks that were not asked about is nothing.
func TestAnAnswerAboutLocksThatWereNotAskedForIsIgnored(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `create or replace function pgxlock_evicted(p_kinds integer[], p_names text[], p_holders text[], p_tokens bigint[])
		returns table (n bigint, evicted_by text, reason text, ms bigint) language sql
		as $$ values (0::bigint, 'evil', 'x', 0::bigint), (1, 'postgres', 'this node is drained', 0), (99, 'evil', 'x', 0) $$`)
	lock := acquire(t, newAdvisory(t, db, nil), "k")
	if !evict(t, newMonitor(t, db, nil), holder(t, newMonitor(t, db, nil), "k")) {
		t.Error("it was not the holder")
	}
	wantEvicted(t, lock)
}
