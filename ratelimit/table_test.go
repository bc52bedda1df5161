package ratelimit

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// slowLimiter returns a Limiter of one event an hour, and its database.
func slowLimiter(t *testing.T, burst int) (*Limiter, *table, *pgtest.DB) {
	t.Helper()
	db := testkit.Migrated(t)
	l, err := New(db.Pool, Every(time.Hour), burst, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close(context.Background()) })
	return l, l.backend.(*table), db
}

// Concurrent requests share one statement.
func TestCallersOfOneProcessShareAStatement(t *testing.T) {
	t.Parallel()
	l, table, db := slowLimiter(t, 10)
	if ok, err := l.Allow(t.Context(), "other"); !ok || err != nil {
		t.Fatal(ok, err)
	}
	db.Exec(t, `create table writers (x xid8);
		create function note() returns trigger language plpgsql as $$ begin insert into public.writers values (pg_current_xact_id()); return null; end $$;
		create trigger note after insert or update on pgxlock_limits for each row execute function note()`)
	resume := pgtest.Occupy(t, table.session)
	var granted atomic.Int32
	var all sync.WaitGroup
	ask := func() {
		if ok, err := l.Allow(t.Context(), "k"); err != nil {
			t.Error(err)
		} else if ok {
			granted.Add(1)
		}
	}
	started := make(chan struct{})
	run := table.asking.Run
	table.asking.Run = func(batch []*request) error {
		close(started)
		table.asking.Run = run // by the one who runs it
		return run(batch)
	}
	all.Go(ask)
	<-started // it is on its way
	for range 100 {
		all.Go(ask)
	}
	pgtest.Until(t, "100 requests are queued", func() bool { return table.asking.Queued() == 100 })
	resume()
	all.Wait()
	if n := granted.Load(); n != 10 {
		t.Errorf("%d were allowed", n)
	}
	var writers int
	if err := db.Pool.QueryRow(t.Context(), "select count(distinct x) from writers").Scan(&writers); err != nil || writers != 2 { // of the first, and of the others
		t.Errorf("%d transactions wrote: %v", writers, err)
	}
}

func TestKeysThatHaveUsedNothingLatelyLeaveTheTable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	l, table, db := slowLimiter(t, 1)
	if ok, err := l.Allow(t.Context(), "in use"); !ok || err != nil {
		t.Fatal(ok, err)
	}
	// More pages than are looked at in one step.
	db.Exec(t, "insert into pgxlock_limits select 'idle ' || i, pgxlock_limit_clock() - i from generate_series(1, 30000) i")
	db.Exec(t, "insert into pgxlock_limits select 'busy ' || i, pgxlock_limit_clock() + 3600000000000 from generate_series(1, 10) i")
	db.Exec(t, "insert into pgxlock_limits select 'idle too ' || i, 0 from generate_series(1, 10) i")
	var pages int
	if err := db.Pool.QueryRow(t.Context(), "select pg_relation_size('pgxlock_limits') / current_setting('block_size')::int").Scan(&pages); err != nil || pages < 300 {
		t.Fatal(pages, err)
	}
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "select from pgxlock_limits where limit_key = 'idle 7' for update"); err != nil {
		t.Fatal(err)
	}
	for locked := 1; locked >= 0; locked-- {
		if err := table.reap(); err != nil {
			t.Fatal(err)
		}
		var left int
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from pgxlock_limits").Scan(&left); err != nil || left != 11+locked {
			t.Errorf("%d are left: %v", left, err)
		}
		if err := tx.Rollback(t.Context()); err != nil && locked == 1 {
			t.Fatal(err)
		}
	}
	if ok, err := l.Allow(t.Context(), "in use"); ok || err != nil {
		t.Errorf("what was used is forgotten: %t, %v", ok, err)
	}
}

func TestKeysThatHaveUsedNothingLatelyLeaveTheMemory(t *testing.T) {
	t.Parallel()
	l, err := NewMemory(1_000_000, 1)
	if err != nil {
		t.Fatal(err)
	}
	table := l.backend.(*memory)
	most := 0
	for i := range 100_000 {
		if _, err := l.Allow(t.Context(), strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
		most = max(most, len(table.tats))
	}
	if most > 5000 {
		t.Errorf("%d keys of which few can be in use", most)
	}
}

// Keys that are in use are not looked at again each time.
func TestMemoryIsSweptWhenItHasDoubled(t *testing.T) {
	t.Parallel()
	l, err := NewMemory(Every(time.Hour), 1)
	if err != nil {
		t.Fatal(err)
	}
	table := l.backend.(*memory)
	sweeps := map[int]bool{}
	for i := range 10_000 {
		if _, err := l.Allow(t.Context(), strconv.Itoa(i)); err != nil {
			t.Fatal(err)
		}
		sweeps[table.sweep] = true
	}
	if len(table.tats) != 10_000 || len(sweeps) != 5 { // 1024, 2048 and so on
		t.Errorf("of 10000 keys in use %d are left, swept at %v", len(table.tats), sweeps)
	}
	if ok, err := l.Allow(t.Context(), "0"); ok || err != nil {
		t.Errorf("what was used is forgotten: %t, %v", ok, err)
	}
}

// asked are requests of one event each, that go in one batch.
func asked(l *Limiter, keys ...string) (requests []*request) {
	for _, key := range keys {
		requests = append(requests, &request{key: key, n: 1, noWait: true, Future: batcher.NewFuture()})
	}
	l.backend.ask(requests...)
	return requests
}

// What the server cannot take, here by a trigger, is the error of its key alone.
func TestKeyThatTheServerRefusesSpoilsNoOther(t *testing.T) {
	t.Parallel()
	l, _, db := slowLimiter(t, 2)
	db.Exec(t, `create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no' using errcode = '22021'; end $$;
		create trigger refuse before insert on pgxlock_limits for each row when (new.limit_key = 'bad') execute function refuse()`)
	keys := []string{"a", "bad", "b", "a", "bad", "a", "b"}
	want := []string{"true", "no", "true", "true", "no", "false", "true"}
	for i, r := range asked(l, keys...) {
		err := r.Await(t.Context(), nil)
		if got := strconv.FormatBool(r.got.Granted); err != nil && (want[i] != "no" || lockerr.SQLState(err) != "22021") || err == nil && got != want[i] {
			t.Errorf("number %d, of %s: %s, %v, want %s", i+1, keys[i], got, err, want[i])
		}
	}
}

// A trigger ends the session, also that which asks again, once each key is asked for alone.
func TestKeysThatAreNotReachedAnyMoreAreFailed(t *testing.T) {
	t.Parallel()
	l, table, db := slowLimiter(t, 2)
	db.Exec(t, `create function refuse() returns trigger language plpgsql security definer as $$ begin
			if new.limit_key = 'spoils' then raise exception 'no' using errcode = '22021'; end if;
			perform pg_terminate_backend(pg_backend_pid()); return new; end $$;
		create trigger refuse before insert on pgxlock_limits for each row when (new.limit_key in ('spoils', 'x ends')) execute function refuse()`)
	runs, run := 0, table.asking.Run
	table.asking.Run = func(batch []*request) error { runs++; return run(batch) }
	for i, r := range asked(l, "spoils", "x ends", "never reached", "nor this") {
		if err := r.Await(t.Context(), nil); err == nil {
			t.Errorf("number %d: %t", i+1, r.got.Granted)
		}
	}
	<-table.asking.Done()
	if runs != 1 {
		t.Errorf("it was tried %d times", runs)
	}
	if ok, err := l.Allow(t.Context(), "later"); !ok || err != nil {
		t.Errorf("afterwards: %t, %v", ok, err)
	}
}

// Who left before a statement was sent does not stand in it.
func TestRequestOfACallerThatLeftIsNotSent(t *testing.T) {
	t.Parallel()
	l, table, db := slowLimiter(t, 1)
	if ok, err := l.Allow(t.Context(), "other"); !ok || err != nil {
		t.Fatal(ok, err)
	}
	resume := pgtest.Occupy(t, table.session)
	r := &request{key: "k", n: 1, noWait: true, Future: batcher.NewFuture()}
	r.Leave()
	asking := asked(l, "sent")
	l.backend.ask(r)
	resume()
	if err := asking[0].Await(t.Context(), nil); err != nil {
		t.Error(err)
	}
	<-table.asking.Done()
	var n int
	if err := db.Pool.QueryRow(t.Context(), "select count(*) from pgxlock_limits where limit_key = 'k'").Scan(&n); err != nil || n != 0 {
		t.Errorf("it was counted: %v", err)
	}
}

// The housekeeping of a Limiter begins with its first use, and ends with it.
func TestHousekeepingOfALimiterEndsWithIt(t *testing.T) {
	t.Parallel()
	l, table, _ := slowLimiter(t, 1)
	runs := table.reaping.Running
	if set, _ := runs(); set {
		t.Error("it has begun before anything was used")
	}
	if ok, err := l.Allow(t.Context(), "k"); !ok || err != nil {
		t.Fatal(ok, err)
	}
	<-table.asking.Done() // it begins when the answer is out
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if set, stopped := runs(); !set || !stopped {
		t.Errorf("it has begun: %t, and ended: %t", set, stopped)
	}
}
