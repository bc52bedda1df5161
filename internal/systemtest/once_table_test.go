package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
)

// Tests of what is recorded of runs, and for how long.

func TestRunIsRecorded(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	plain, retried := runnerOn(t, db, age, &once.Config{Owner: "me"}), runnerOn(t, db, age, &once.Config{Owner: "me", Retry: true})
	row := func(key string) string {
		t.Helper()
		return testkit.Query[string](t, db, `select concat_ws('|', r.state, r.attempt, r.holder like 'me:%', finished_at >= started_at, keep_until - now() > '19 years', length(error), left(error, 9),
			(select l.holder_id = r.holder from distributed_locks l where l.lock_name = r.lease)) from pgxlock_runs r where run_key = $1`, key)
	}
	long := strings.Repeat("é", 3000) // of which some are recorded
	for _, o := range []*once.Runner{plain, retried} {
		key, lease := "once", ""
		if o == retried {
			key, lease = "retried", "|t"
		}
		_, err := o.Do(t.Context(), key, func(context.Context, once.Run) error {
			if got, want := row(key), "running|1|t|t"+lease; got != want {
				t.Errorf("while it runs: %s, want %s", got, want)
			}
			return errors.New("zero \x00\xff " + long)
		})
		if err == nil {
			t.Error("the error is lost")
		}
		if got, want := row(key), "failed|1|t|t|t|2000|zero ? éé"; got != want {
			t.Errorf("when it has failed: %s, want %s", got, want)
		}
	}
	wantDo(t, retried, "retried", &job{}, true)
	if got, want := row("retried"), "succeeded|2|t|t|t"; got != want {
		t.Errorf("in the end: %s, want %s", got, want)
	}
	if got := testkit.Rows(t, db); len(got) != 0 {
		t.Errorf("leases are left: %v", got)
	}
	// An operator lets it run again.
	if !testkit.Query[bool](t, db, "select forget_run('once', slot) from pgxlock_runs where run_key = 'once'") {
		t.Error("nothing was forgotten")
	}
	wantDo(t, plain, "once", &job{}, true)
}

func TestRunnerHasOneConnectionAndWithRetryTwo(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	for retry, want := range map[bool]int{false: 1, true: 2} {
		owner := fmt.Sprint("runner ", retry)
		o, err := once.New(db.Pool, age, &once.Config{Owner: owner, Retry: retry})
		if err != nil {
			t.Fatal(err)
		}
		if got := testkit.Backends(t, db, owner); len(got) != 0 {
			t.Errorf("Retry %t: %d connections before the first use", retry, len(got))
		}
		ran, err := o.Do(t.Context(), owner, func(context.Context, once.Run) error {
			pgtest.Until(t, "it has its connections", func() bool { return len(testkit.Backends(t, db, owner)) == want })
			return nil
		})
		if !ran || err != nil {
			t.Errorf("Retry %t: %t, %v", retry, ran, err)
		}
		pgtest.Until(t, "it has no more", func() bool { return len(testkit.Backends(t, db, owner)) == want }) // one that failed may be ending
		if err := o.Close(t.Context()); err != nil {
			t.Error(err)
		}
		pgtest.Until(t, "its connections are closed", func() bool { return len(testkit.Backends(t, db, owner)) == 0 })
	}
}

func TestPanicIsRecorded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	for _, retry := range []bool{false, true} {
		o, key := runnerOn(t, db, age, &once.Config{Retry: retry}), fmt.Sprint("k ", retry)
		func() {
			defer func() { _ = recover() }()
			_, _ = o.Do(t.Context(), key, func(context.Context, once.Run) error { panic("why") })
		}()
		if got := testkit.Query[string](t, db, "select concat_ws('|', state, error) from pgxlock_runs where run_key = $1", key); got != "failed|panic: why" {
			t.Errorf("Retry %t: %s", retry, got)
		}
	}
}

func TestStartsRemoveOldRuns(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	o := runnerOn(t, db, time.Hour, nil)
	db.Exec(t, `insert into pgxlock_runs (run_key, slot, state, attempt, holder, started_at, keep_until)
		select 'old', now() - i * interval '1 hour', 'running', 1, 'x', now(), now() - i * interval '1 minute' from generate_series(-1, 40) i`)
	held := testkit.Begin(t, db, pgx.TxOptions{})
	if _, err := held.Exec(t.Context(), "select from pgxlock_runs where keep_until < now() - interval '39.5 minutes' for update"); err != nil {
		t.Fatal(err)
	}
	var j job
	for i := range 4 { // each a few
		if ran, err := o.DoAt(t.Context(), "k", time.Now().Round(time.Second).Add(time.Duration(i)*time.Second), j.run); !ran || err != nil {
			t.Errorf("%t, %v", ran, err)
		}
	}
	// What is to be kept, and what somebody has locked.
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_runs where run_key = 'old'"); n != 2 {
		t.Errorf("%d are left, want 2", n)
	}
}

// A Runner with another Keep may remove a row; but where all have one, the row of a tick
// that is young enough is there, however long a call takes.
func TestRunIsKeptFromItsTickOn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	o := runnerOn(t, db, time.Hour, nil)
	var j job
	now := time.Now().Round(time.Microsecond)
	for tick, kept := range map[time.Time]time.Time{now.Add(-time.Hour): now, now.Add(time.Hour): now.Add(time.Hour)} {
		if ran, err := o.DoAt(t.Context(), "k", tick, j.run); !ran || err != nil {
			t.Errorf("%t, %v", ran, err)
		}
		if !testkit.Query[bool](t, db, "select keep_until between $2::timestamptz + interval '7 days' - interval '1 minute' and $2::timestamptz + interval '7 days 1 hour' from pgxlock_runs where slot = $1",
			tick.Truncate(time.Microsecond), kept) {
			t.Errorf("the row of %s is not kept from %s on", tick, kept)
		}
	}
}
