//go:build unix

package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
)

// These tests are about runs of real processes.

// ranOnce is one run, told by the child that did it.
type ranOnce struct {
	How  string // by which call
	Slot time.Time
}

// asked is what How says, instead, of a call that has not failed: of one by Do, which
// second began and ended with it under way, and of one by DoAt, its tick. So it is known
// of which seconds somebody asked: a slow machine may miss some.
var asked = map[string]string{"do": "asked by do", "at": "asked by at"}

// runEachSecond asks for a job of a millisecond in each second, in three ways, until
// it is told to stop: by Run; by Do, when its own clock ticks; and by DoAt, for the
// second that it believes it is. argument: when in a second its clock ticks, and how
// much its clock is ahead.
func runEachSecond(ctx context.Context, url, argument string, report func(any) error) error {
	var phase, ahead time.Duration
	if _, err := fmt.Sscanf(argument, "%d %d", &phase, &ahead); err != nil {
		return err
	}
	now := func() time.Time { return time.Now().Add(ahead) } // all that it knows of the time
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	o, err := once.New(pool, time.Second, &once.Config{First: once.FirstNow})
	if err != nil {
		return err
	}
	ctx, stop, err := workUntilTold(ctx, report)
	if err != nil {
		return err
	}
	defer stop()

	var reporting sync.Mutex
	work := func(how string) func(context.Context, once.Run) error {
		return func(_ context.Context, run once.Run) error {
			time.Sleep(time.Millisecond)
			reporting.Lock()
			defer reporting.Unlock()
			return report(ranOnce{how, run.Slot})
		}
	}
	failed := make(chan error, 2)
	go func() { failed <- o.Run(ctx, "run", work("run")) }()
	go func() {
		for {
			tick := now().Add(-phase).Truncate(time.Second).Add(time.Second) // the next one
			select {
			case <-ctx.Done():
				failed <- ctx.Err()
				return
			case <-time.After(tick.Add(phase).Sub(now())):
			}
			began := time.Now() // for the test: its clock is the server's
			_, err := o.Do(ctx, "do", work("do"))
			ended := time.Now()
			_, err2 := o.DoAt(ctx, "at", tick, work("at"))
			if err := errors.Join(err, err2); err != nil {
				failed <- err
				return
			}
			reporting.Lock()
			if second := began.Truncate(time.Second); ended.Truncate(time.Second).Equal(second) {
				err = report(ranOnce{asked["do"], second})
			}
			err = errors.Join(err, report(ranOnce{asked["at"], tick}))
			reporting.Unlock()
			if err != nil {
				failed <- err
				return
			}
		}
	}()
	for range 2 {
		if err := <-failed; !errors.Is(err, context.Canceled) {
			return err
		}
	}
	if err := report(ranOnce{How: "over"}); err != nil {
		return err
	}
	return o.Close(context.Background())
}

// Their clocks are up to 4 s ahead and behind, and tick at different times; they start
// one after the other.
func TestSoakSecondsAreRunByOneOfEightProcesses(t *testing.T) {
	t.Parallel()
	const processes = 8
	seconds := pgtest.Soak(t, 5, 75)
	db := testkit.Migrated(t)
	var children []*child
	for i := range processes {
		argument := fmt.Sprintf("%d %d", i*int(time.Second)/processes, (i-processes/2)*int(time.Second))
		children = append(children, startChild(t, "run each second", db.URL, argument))
	}
	reports := make(chan ranOnce, 100)
	var reading sync.WaitGroup
	for _, c := range children {
		var ready string
		c.report(t, &ready)
		c.tell(t)
		reading.Go(func() {
			for {
				var r ranOnce
				if err := c.reports.Decode(&r); err != nil {
					t.Errorf("the child does not report: %v", err)
					return
				}
				if r.How == "over" {
					return
				}
				reports <- r
			}
		})
	}
	go func() {
		reading.Wait()
		close(reports)
	}()
	ran := map[ranOnce]int{}
	stopped := time.Time{} // from then on not all of them ask
	per := map[string]int{}
	first := map[string]time.Time{}
	// looked returns the seconds before end that are looked at: all of them had time for a run.
	// Where half of them have asked by Do the others had time for Run.
	looked := func(how string, end time.Time) (slots []time.Time) {
		calls, enough := asked[how], 1
		if how == "run" {
			calls, enough = asked["do"], processes/2
		}
		for slot := first[how].Add(time.Second); slot.Before(end); slot = slot.Add(time.Second) {
			if ran[ranOnce{calls, slot}] >= enough {
				slots = append(slots, slot)
			}
		}
		return slots
	}
	for r := range reports {
		r.Slot = r.Slot.UTC()
		ran[r]++
		if r.How == asked["do"] || r.How == asked["at"] {
			continue
		}
		if ran[r] > 1 {
			t.Errorf("%s: %s ran %d times", r.How, r.Slot, ran[r])
		}
		if per[r.How]++; first[r.How].IsZero() || r.Slot.Before(first[r.How]) {
			first[r.How] = r.Slot
		}
		if stopped.IsZero() && per["run"] > seconds && per["do"] > seconds && per["at"] > seconds {
			now := testkit.Query[time.Time](t, db, "select date_trunc('second', clock_timestamp())")
			none := len(looked("run", now)) == 0 || len(looked("do", now)) == 0 || len(looked("at", now)) == 0
			if none && per["run"] < 20*seconds { // on a busy machine there may be more to look at later
				continue
			}
			stopped = now
			for _, c := range children {
				c.tell(t)
			}
		}
	}
	for _, c := range children {
		c.end(t)
	}
	if stopped.IsZero() {
		t.Fatal("they ended by themselves")
	}
	for how := range first {
		slots := looked(how, stopped)
		for _, slot := range slots {
			if n := ran[ranOnce{how, slot}]; n != 1 {
				t.Errorf("%s: %s ran %d times", how, slot, n)
			}
		}
		t.Logf("%s: %d runs, %d seconds looked at", how, per[how], len(slots))
		if len(slots) == 0 {
			t.Errorf("%s: no second was looked at", how)
		}
	}
	if early := testkit.Query[int](t, db, "select count(*) from pgxlock_runs where run_key in ('run', 'do') and started_at < slot"); early != 0 {
		t.Errorf("%d runs began before their second", early)
	}
}

// runForever begins to run what never ends.
func runForever(retry bool) func(context.Context, string, string, func(any) error) error {
	return func(ctx context.Context, url, key string, report func(any) error) error {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			return err
		}
		cfg := &once.Config{Retry: retry}
		if retry {
			cfg.TTL = testkit.TTL
		}
		o, err := once.New(pool, age, cfg)
		if err != nil {
			return err
		}
		_, err = o.Do(ctx, key, func(context.Context, once.Run) error {
			if err := report("running"); err != nil {
				return err
			}
			select {}
		})
		return err
	}
}

func TestRunWhoseProcessIsKilledRunsAgainOnlyWithRetry(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, retry := range []bool{false, true} {
		t.Run(fmt.Sprint("Retry ", retry), func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			what, cfg := "run what never ends", &once.Config{}
			if retry {
				what, cfg = what+", with retry", &once.Config{Retry: true, TTL: testkit.TTL}
			}
			c := startChild(t, what, db.URL, "k")
			var running string
			c.report(t, &running)
			o := runnerOn(t, db, age, cfg)
			var j job
			wantDo(t, o, "k", &j, false)
			lease := ""
			if retry {
				lease = testkit.Query[string](t, db, "select lock_name from lock_leases where state = 'live'")
				if !strings.HasPrefix(lease, "run:k@") {
					t.Errorf("operators see %s", lease)
				}
			}
			c.signal(t, syscall.SIGKILL)
			_ = c.cmd.Wait()
			if !retry {
				wantDo(t, o, "k", &j, false)
				if got := testkit.Query[string](t, db, "select state from pgxlock_runs"); got != "running" {
					t.Errorf("it is recorded as %s", got)
				}
				return
			}
			db.Exec(t, "update distributed_locks set expires_at = clock_timestamp()")
			run := <-collect(t, o, "k")
			if run.Attempt != 2 || run.Lock.Key() != lease {
				t.Errorf("run %+v under %s", run, run.Lock.Key())
			}
		})
	}
}
