package once

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// modelledRun is what the model knows of one tick.
type modelledRun struct {
	state   string // "": not started
	attempt int
	alive   bool // its lease has not run out, though its process has died
}

// modelledRuns are the ticks of one key, for processes with or without Retry.
type modelledRuns struct {
	retry     bool
	processes []*Runner
	key       string
	ticks     []time.Time
	runs      []modelledRun
	deaths    int
}

var errOfModel = errors.New("failed")

// mayStart reports whether a call runs the job.
func (m *modelledRuns) mayStart(run modelledRun) bool {
	switch {
	case run.state == "":
		return true
	case !m.retry:
		return false
	}
	return run.state == runFailed || run.state == runRunning && !run.alive
}

func (m *modelledRuns) actions(db *pgtest.DB) map[string]func(*rapid.T) {
	draw := func(r *rapid.T) (*Runner, int) {
		return rapid.SampledFrom(m.processes).Draw(r, "process"), rapid.IntRange(0, len(m.ticks)-1).Draw(r, "tick")
	}
	ctx := context.Background()
	// do calls DoAt for a job that returns end.
	do := func(r *rapid.T, o *Runner, i int, end error) {
		before, inside := m.runs[i], 0
		ran, err := o.DoAt(ctx, m.key, m.ticks[i], func(_ context.Context, run Run) error { // whose context would be told that it has the lease
			inside++
			if !run.Slot.Equal(m.ticks[i]) || run.Attempt != before.attempt+1 || (run.Lock != nil) != m.retry {
				r.Errorf("%+v, want attempt %d at %s", run, before.attempt+1, m.ticks[i])
			}
			// While the job runs no other process starts it.
			other := rapid.SampledFrom(m.processes).Draw(r, "meanwhile")
			if ran, err := other.DoAt(ctx, m.key, m.ticks[i], func(context.Context, Run) error { return nil }); ran || err != nil {
				r.Errorf("it was run meanwhile as well: %t, %v", ran, err)
			}
			return end
		})
		want := m.mayStart(before)
		if ran != want || inside > 1 || (inside == 1) != want || want && !errors.Is(err, end) || !want && err != nil {
			r.Fatalf("%+v: ran %t, %d times, %v", before, ran, inside, err)
		}
		if want {
			m.runs[i] = modelledRun{state: runSucceeded, attempt: before.attempt + 1}
			if end != nil {
				m.runs[i].state = runFailed
			}
		}
	}
	actions := map[string]func(*rapid.T){
		"": func(r *rapid.T) {
			for i, tick := range m.ticks {
				var got modelledRun
				err := db.Pool.QueryRow(ctx, "select coalesce(max(state), ''), coalesce(max(attempt), 0) from pgxlock_runs where run_key = $1 and slot = $2", m.key, tick).Scan(&got.state, &got.attempt)
				if got.alive = m.runs[i].alive; err != nil || got != m.runs[i] {
					r.Fatalf("tick %d is %+v, want %+v: %v", i, got, m.runs[i], err)
				}
			}
		},
		"it ends well": func(r *rapid.T) {
			o, i := draw(r)
			do(r, o, i, nil)
		},
		"it fails": func(r *rapid.T) {
			o, i := draw(r)
			do(r, o, i, errOfModel)
		},
		"it panics": func(r *rapid.T) {
			o, i := draw(r)
			if !m.mayStart(m.runs[i]) {
				r.Skip()
			}
			func() {
				defer func() {
					if got := recover(); got != errOfModel { //nolint:errorlint // the very same
						r.Errorf("the panic became %v", got)
					}
				}()
				_, _ = o.DoAt(ctx, m.key, m.ticks[i], func(context.Context, Run) error { panic(errOfModel) })
			}()
			m.runs[i] = modelledRun{state: runFailed, attempt: m.runs[i].attempt + 1}
		},
		"its process dies": func(r *rapid.T) {
			o, i := draw(r)
			if !m.mayStart(m.runs[i]) {
				r.Skip()
			}
			holder, lease := fmt.Sprint("dead ", m.deaths), "" // the same one would only ask again
			m.deaths++
			if m.retry {
				lease = leaseName(m.key, m.ticks[i])
				if _, err := db.Pool.Exec(ctx, "select acquire_lock($1, $2, 3600)", lease, holder); err != nil {
					r.Fatal(err)
				}
			}
			if started, _, err := o.runs.start(ctx, m.key, which{slot: m.ticks[i], tick: true, first: FirstNow}, holder, lease); err != nil || started.attempt != m.runs[i].attempt+1 {
				r.Fatalf("%+v, %v", started, err)
			}
			m.runs[i] = modelledRun{state: runRunning, attempt: m.runs[i].attempt + 1, alive: m.retry}
		},
		"the leases of the dead run out": func(r *rapid.T) {
			if _, err := db.Pool.Exec(ctx, "update distributed_locks set expires_at = now() where holder_id like 'dead %'"); err != nil {
				r.Fatal(err)
			}
			for i := range m.runs {
				m.runs[i].alive = false
			}
		},
		"what is known is forgotten": func(r *rapid.T) {
			_, i := draw(r)
			if m.runs[i].alive {
				r.Skip() // its lease would go on
			}
			var known bool
			err := db.Pool.QueryRow(ctx, "select forget_run($1, $2)", m.key, m.ticks[i]).Scan(&known)
			if err != nil || known != (m.runs[i].state != "") {
				r.Fatalf("%+v: %t, %v", m.runs[i], known, err)
			}
			m.runs[i] = modelledRun{}
		},
	}
	if !m.retry {
		actions["SQL starts it"] = func(r *rapid.T) {
			_, i := draw(r)
			var started bool
			err := db.Pool.QueryRow(ctx, "select start_run_at($1, $2)", m.key, m.ticks[i]).Scan(&started)
			if err != nil || started != (m.runs[i].state == "") {
				r.Fatalf("%+v: %t, %v", m.runs[i], started, err)
			}
			if started {
				m.runs[i] = modelledRun{state: runRunning, attempt: 1}
			}
		}
	}
	return actions
}

func TestSoakRunsDoWhatTheirModelDoes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, retry := range []bool{false, true} {
		t.Run(fmt.Sprintf("retry %t", retry), func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			var processes []*Runner
			for range 3 {
				o, err := New(db.Pool, time.Hour, &Config{Retry: retry})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = o.Close(context.Background()) })
				processes = append(processes, o)
			}
			round := 0
			pgtest.Model(t, func(*rapid.T) map[string]func(*rapid.T) {
				round++
				m := &modelledRuns{retry: retry, processes: processes, key: fmt.Sprint("job ", round), runs: make([]modelledRun, 3)}
				for i := range m.runs {
					m.ticks = append(m.ticks, time.Now().Truncate(time.Hour).Add(time.Duration(i)*time.Hour))
				}
				return m.actions(db)
			})
		})
	}
}
