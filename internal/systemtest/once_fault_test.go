package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
)

const (
	startSQL  = "pgxlock_start_run"
	finishSQL = "pgxlock_finish_run"
)

func TestLostReplyCostsNoRun(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	for _, retry := range []bool{false, true} {
		p, through := testkit.Proxied(t, db)
		o := runnerOn(t, through, age, &once.Config{Retry: retry})
		var j job
		wantDo(t, o, fmt.Sprint("connects ", retry), &j, true)
		for _, statement := range []string{startSQL, finishSQL} {
			key := statement + map[bool]string{true: " again"}[retry]
			lost := p.Arm(t, testkit.LoseReply, statement)
			wantDo(t, o, key, &j, true)
			lost.Happened(t)
			if got := testkit.Query[string](t, db, "select state || attempt from pgxlock_runs where run_key = $1", key); got != "succeeded1" {
				t.Errorf("Retry %t, the reply to %s was lost: %s", retry, statement, got)
			}
		}
	}
}

// The server started it, and cannot be asked again. The next call here finds out, and
// nobody else runs it.
func TestStartOfWhichNoAnswerCameIsRunByTheNextCall(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	for _, retry := range []bool{false, true} {
		p, through := testkit.Proxied(t, db)
		key := map[bool]string{false: "once", true: "again"}[retry]
		o, others := runnerOn(t, through, age, &once.Config{Retry: retry}), runnerOn(t, db, age, nil)
		var j job
		wantDo(t, o, "connects "+key, &j, true)
		lost := p.Arm(t, testkit.LoseReply, startSQL)
		p.Arm(t, testkit.LoseReply, startSQL) // and that of the second attempt
		ran, err := o.Do(t.Context(), key, j.run)
		lost.Happened(t)
		p.Disarm()
		if ran || err == nil || errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("Retry %t: without an answer: %t, %v", retry, ran, err)
		}
		wantDo(t, others, key, &j, false)
		db.Exec(t, "update distributed_locks set expires_at = clock_timestamp()") // the lease of the call before, if it is still there
		pgtest.Until(t, "the lease of the call before is over", func() bool {
			return testkit.Query[bool](t, db, "select not exists (select from distributed_locks where expires_at > now())")
		})
		ran, err = o.Do(t.Context(), key, func(context.Context, once.Run) error {
			wantDo(t, o, key, &j, false) // the other one is no answer that was lost
			return nil
		})
		if !ran || err != nil {
			t.Errorf("Retry %t: the next call: %t, %v", retry, ran, err)
		}
		wantDo(t, o, key, &j, false)
	}
}

// The process that crashed may have called the tick by other clocks.
func TestTickThatCrashedIsRunAgainInWhateverTimeZone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	o := runnerOn(t, db, time.Hour, &once.Config{Retry: true})
	tick := time.Now().Truncate(time.Second)
	for key, lease := range map[string]string{"k": "run:k@" + tick.UTC().Format(time.RFC3339), "of others": "theirs", "without": ""} {
		db.Exec(t, `insert into pgxlock_runs (run_key, slot, state, attempt, holder, lease, started_at, keep_until) values ($1, $2, 'running', 1, 'x', nullif($3, ''), now(), 'infinity')`, key, tick, lease)
	}
	var j job
	for _, key := range []string{"of others", "without"} { // of which nobody can tell
		if ran, err := o.DoAt(t.Context(), key, tick, j.run); ran || err != nil {
			t.Errorf("%s: %t, %v", key, ran, err)
		}
	}
	if ran, err := o.DoAt(t.Context(), "k", tick.In(time.FixedZone("", 5*3600)), j.run); !ran || err != nil || j.runs[0].Attempt != 2 {
		t.Errorf("%t, %+v, %v", ran, j.runs, err)
	}
}

// The answer comes when nobody waits for it any more.
func TestStartThatNobodyWaitsForIsTakenBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	for _, retry := range []bool{false, true} {
		p, through := testkit.Proxied(t, db)
		o, others := runnerOn(t, through, age, &once.Config{Retry: retry}), runnerOn(t, db, age, nil)
		var j job
		wantDo(t, o, fmt.Sprint("connects ", retry), &j, true)
		key := fmt.Sprint("k ", retry)
		held := p.Arm(t, testkit.HoldReply, startSQL)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := o.Do(ctx, key, j.run)
			ended <- err
		}()
		held.Happened(t)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) { // with Retry its lease is given back on another connection
			t.Fatalf("Retry %t: it waits for the answer: %v", retry, err)
		}
		held.Resume()
		pgtest.Until(t, "it is taken back", func() bool {
			return testkit.Query[bool](t, db, "select exists (select from pgxlock_runs where run_key = $1 and state = 'withdrawn')", key)
		})
		wantDo(t, others, key, &j, true)
		if last := j.runs[len(j.runs)-1]; last.Attempt != 1 {
			t.Errorf("attempt %d", last.Attempt)
		}
	}
}

// A lease that an operator took away. Of two that go on, one is recorded.
func TestOfTwoAttemptsOneIsRecorded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	first, second := runnerOn(t, db, age, &once.Config{Retry: true, TTL: 6 * time.Second}), runnerOn(t, db, age, &once.Config{Retry: true})
	var j job
	ran, err := first.Do(t.Context(), "k", func(ctx context.Context, run once.Run) error {
		db.Exec(t, "delete from distributed_locks")
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, pgxlock.ErrLost) {
			t.Errorf("the context's cause is %v", cause)
		}
		if err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error { return run.Lock.Fence(t.Context(), tx) }); err == nil {
			t.Error("a transaction was fenced by what is lost")
		}
		wantDo(t, second, "k", &j, true)
		return nil
	})
	if !ran || !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("the first: %t, %v", ran, err)
	}
	if got := testkit.Query[string](t, db, "select state || attempt from pgxlock_runs"); got != "succeeded2" {
		t.Errorf("recorded: %s", got)
	}

	// Nobody else has started it: what was done is done.
	ran, err = first.Do(t.Context(), "alone", func(ctx context.Context, _ once.Run) error {
		db.Exec(t, "delete from distributed_locks")
		<-ctx.Done()
		return nil
	})
	if !ran || err != nil {
		t.Errorf("alone: %t, %v", ran, err)
	}
	wantDo(t, second, "alone", &j, false)
}

// The answer that grants a lease comes when it has run out: a run is not started under it,
// and the lease is asked for again.
func TestRunIsStartedUnderAnotherLeaseWhenItsFirstIsLostBeforeTheStart(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	o := runnerOn(t, through, age, &once.Config{Retry: true, TTL: 5 * time.Second})
	var j job
	wantDo(t, o, "connects", &j, true)
	held := p.Arm(t, testkit.HoldReply, testkit.AcquireSQL)
	over := make(chan struct{})
	go func() {
		defer held.Resume()
		held.Happened(t)
		pgtest.Until(t, "the first lease is over", func() bool {
			return testkit.Query[bool](t, db, "select not exists (select from distributed_locks where expires_at > clock_timestamp())")
		})
		close(over)
	}()
	var holder string
	ran, err := o.Do(t.Context(), "k", func(_ context.Context, run once.Run) error {
		holder = run.Lock.Holder()
		return run.Lock.Err()
	})
	<-over
	if !ran || err != nil {
		t.Errorf("Do: %t, %v", ran, err)
	}
	if got := testkit.Query[string](t, db, "select state || attempt || holder from pgxlock_runs where run_key = 'k'"); got != "succeeded1"+holder {
		t.Errorf("recorded: %s", got)
	}
}

// Who holds the lease no more must not start what another one runs now.
func TestStartNeedsItsLease(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	others := runnerOn(t, db, age, &once.Config{Retry: true})
	running := make(chan struct{})
	end := make(chan struct{})
	go func() {
		defer close(running)
		_, err := others.Do(t.Context(), "k", func(context.Context, once.Run) error {
			running <- struct{}{}
			<-end
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}()
	<-running
	row := testkit.Query[string](t, db, "select holder from pgxlock_runs where run_key = 'k'")
	for _, holder := range []string{"somebody", row + "x"} {
		_, err := db.Pool.Exec(t.Context(), "select pgxlock_start_run('k', slot, null, null, null, '1 day', $1, lease) from pgxlock_runs where run_key = 'k'", holder)
		if err == nil || !strings.Contains(err.Error(), "LK001") {
			t.Errorf("%s starts what another one runs: %v", holder, err)
		}
	}
	close(end)
	<-running
}

func TestStandbyRunsNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, map[string]string{"fsync": "off"})
	o := runnerOn(t, db, age, &once.Config{First: once.FirstNow})
	var j job
	wantDo(t, o, "before", &j, true)
	if err := server.Demote(t.Context()); err != nil {
		t.Fatal(err)
	}
	db.Pool.Reset()
	for _, key := range []string{"k", "before"} { // of what it has heard as well
		_, err := o.Do(t.Context(), key, j.run)
		wantReadOnly(t, "Do", err)
	}
	runs := collect(t, o, "loop") // waits until it is a primary again
	if err := server.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-runs
	wantDo(t, o, "k", &j, true)
}

func TestRunsWorkThroughAPoolerInEveryMode(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	hostile := []string{"default_transaction_read_only = on", "default_transaction_isolation = 'serializable'", "search_path = public, pg_temp", "synchronous_commit = off"}
	behindPoolers(t, hostile, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		db := &pgtest.DB{Pool: pgtest.Pool(t, pooler.URL("postgres")), URL: pooler.URL("postgres"), Name: "postgres"}
		o, err := once.New(db.Pool, age, nil)
		if err != nil {
			t.Fatal(err)
		}
		var j job
		key := t.Name() // of each pooler
		wantDo(t, o, key, &j, true)
		wantDo(t, o, key, &j, false)
		if err := o.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if o, err = once.New(db.Pool, age, &once.Config{Retry: true}); err != nil {
			t.Fatal(err)
		}
		if mode != "session" { // whose two connections are less than it needs with those of others
			j.err = errors.New("broken")
			wantDo(t, o, key+" again", &j, true)
			j.err = nil
			wantDo(t, o, key+" again", &j, true)
			wantDo(t, o, key+" again", &j, false)
		}
		if err := o.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

// With a right on the table of leases, which the migrations make one on the table of runs,
// and with the functions only.
func TestRunsWorkForAnApplication(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	role, app := login(t, db)
	adoptSeed(t, db, role)
	works := func() {
		t.Helper()
		for _, retry := range []bool{false, true} {
			o := runnerOn(t, app, time.Millisecond, &once.Config{Retry: retry})
			tick, key := time.Now().Round(time.Microsecond), fmt.Sprint("k ", retry)
			for _, want := range []bool{true, false} {
				ran, err := o.DoAt(t.Context(), key, tick, func(context.Context, once.Run) error { return nil })
				if ran != want || err != nil {
					t.Errorf("Retry %t: %t, %v", retry, ran, err)
				}
			}
			if ran, err := o.Do(t.Context(), key+" now", func(context.Context, once.Run) error { return errors.New("broken") }); !ran || err == nil || err.Error() != "broken" {
				t.Errorf("Retry %t: %t, %v", retry, ran, err)
			}
		}
	}
	works()
	db.Exec(t, "revoke create on schema public from public")
	db.Exec(t, "select harden_locks(), grant_locks('"+role+"', 'application')")
	works()
	if _, err := app.Pool.Exec(t.Context(), "delete from pgxlock_runs"); err == nil {
		t.Error("an application may write the table")
	}
	denied(t, second(app.Pool.Exec(t.Context(), "select forget_run('k', now())")))
}
