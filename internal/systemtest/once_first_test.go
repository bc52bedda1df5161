package systemtest_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
)

// A process that has never run the job records that it skips the period, so that another one, or
// the same after a restart, begins with the next.
func TestFirstRunOfAKeyIsThatOfTheNextPeriodOverAllProcesses(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	const period = 400 * 24 * time.Hour
	for name, cfg := range map[string]once.Config{"plain": {}, "retry": {Retry: true, TTL: time.Second}, "catch up": {CatchUp: 3}} {
		ctx, cancel := context.WithCancel(t.Context())
		first, ended := runnerOn(t, db, period, &cfg), make(chan error, 1)
		go func() {
			ended <- first.Run(ctx, name, func(context.Context, once.Run) error {
				t.Errorf("%s: it runs in the period in which it is new", name)
				return nil
			})
		}()
		pgtest.Until(t, "it has recorded something", func() bool {
			return len(ended) > 0 || testkit.Query[bool](t, db, "select exists (select from pgxlock_runs where run_key = $1)", name)
		})
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if got := testkit.Query[string](t, db, "select concat_ws(' ', count(*), min(state), min(attempt)) from pgxlock_runs where run_key = $1", name); got != "1 skipped 0" {
			t.Fatalf("%s: recorded %s", name, got)
		}
		db.Exec(t, "update pgxlock_runs set slot = slot - interval '400 days' where run_key = $1", name) // the next period begins
		if run := <-collect(t, runnerOn(t, db, period, &cfg), name); run.Attempt != 1 {
			t.Errorf("%s: %+v", name, run)
		}
	}
}

// A daily report, moved to another hour, and started by old and new programs.
func TestChangedOffsetRunsNoPeriodTwiceAndIsWarnedOf(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	const period = 3000 * time.Hour // that it is over half over, or not, decides nothing
	for _, retry := range []bool{false, true} {
		key := map[bool]string{true: "retry", false: "plain"}[retry]
		first := testkit.Query[time.Time](t, db, "select pgxlock_slot(now(), '3000 h', '0', 'UTC', 0)")
		later := time.Hour
		if time.Since(first) < 2*time.Hour { // it would begin in the period before
			later = period - time.Hour
		}
		var said safeText
		log := slog.New(slog.NewTextHandler(&said, nil))
		var j job
		old := runnerOn(t, db, period, &once.Config{Retry: retry, Logger: log})
		wantDo(t, old, key, &j, true)
		moved := runnerOn(t, db, period, &once.Config{Offset: later, Retry: retry, Logger: log})
		for range 3 {
			wantDo(t, moved, key, &j, false)
		}
		for range 3 {
			wantDo(t, old, key, &j, false)
		}
		if text := said.String(); strings.Count(text, "different periods for one key") != 1 ||
			!strings.Contains(text, `key=`+key+` period="3000h0m0s, offset `+later.String()+`, UTC" other="3000h0m0s, offset 0s, UTC"`) {
			t.Errorf("Retry %t: it says %s", retry, text)
		}
		// The next period under the new offset runs.
		db.Exec(t, "update pgxlock_runs set slot = slot - interval '3000 h' where run_key = $1", key)
		wantDo(t, moved, key, &j, true)
		wantDo(t, old, key, &j, false)
	}
}

func TestListReturnsWhatIsRecorded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	retried := runnerOn(t, db, 240*time.Hour, &once.Config{Owner: "me", Retry: true, Offset: 1500 * time.Millisecond, Location: time.UTC})
	failed := &job{err: errors.New("why")}
	wantDo(t, retried, "a", failed, true)
	wantDo(t, retried, "a", failed, true)
	tick := time.Now().Round(time.Hour).AddDate(0, 0, 1)
	ran, err := runnerOn(t, db, time.Hour, nil).DoAt(t.Context(), "b", tick, func(context.Context, once.Run) error {
		all, err := once.List(t.Context(), db.Pool, &once.ListConfig{Key: "b"})
		if err != nil || len(all) != 1 || all[0].State != once.StateRunning || !all[0].Finished.IsZero() || all[0].Retry {
			t.Errorf("%+v, %v", all, err)
		}
		return nil
	})
	if !ran || err != nil {
		t.Fatal(ran, err)
	}
	all, err := once.List(t.Context(), db.Pool, nil)
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	if b := all[0]; b.Key != "b" || !b.Slot.Equal(tick) || b.State != once.StateSucceeded || b.Attempts != 1 || b.Schedule != (once.Schedule{}) || b.Finished.Before(b.Started) || b.Error != "" {
		t.Errorf("%+v", b)
	}
	if a := all[1]; a.Key != "a" || a.State != once.StateFailed || a.Attempts != 2 || !a.Retry || a.Error != "why" || !strings.HasPrefix(a.Holder, "me:") ||
		a.Schedule != (once.Schedule{Period: 240 * time.Hour, Offset: 1500 * time.Millisecond, Location: "UTC"}) || a.Schedule.String() != "240h0m0s, offset 1.5s, UTC" || all[0].Schedule.String() != "ticks" {
		t.Errorf("%+v", a)
	}
	if one, err := once.List(t.Context(), db.Pool, &once.ListConfig{Limit: 1}); err != nil || len(one) != 1 {
		t.Errorf("%+v, %v", one, err)
	}
	for says, cfg := range map[string]once.ListConfig{"once.ListConfig.Limit is -1": {Limit: -1}, "once.ListConfig.Schema": {Schema: "\x00"}, "zero byte": {Key: "a\x00"}} {
		if _, err := once.List(t.Context(), db.Pool, &cfg); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want that %s", err, says)
		}
	}
	if _, err := once.List(t.Context(), pgtest.New(t).Pool, nil); !errors.Is(err, pgxlock.ErrSchema) {
		t.Errorf("without the migrations: %v", err)
	}
}

// The slot of a period that the server was asked for is the server's; a tick is refused by its clock.
func TestTickThatTheServerRefusesIsATickError(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	o := runnerOn(t, db, time.Hour, nil)
	tick := time.Now().Round(time.Hour).AddDate(0, 0, 30)
	_, err := o.DoAt(t.Context(), "k", tick, new(job).run)
	refused, ok := errors.AsType[*once.TickError](err)
	if e, typed := errors.AsType[*pgxlock.Error](err); !ok || !typed || e.Key != "k" || !refused.Tick.Equal(tick) || !strings.Contains(err.Error(), "further ahead than runs are kept, 168:00:00") {
		t.Errorf("%v", err)
	}
}
