package main

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// shown is what /debug/vars shows of a family.
type shown struct {
	Held, Waiting, Acquired, Released, Lost, Granted, Busy, Failed, Renewed, Unrenewed int64

	Wait map[string]float64 `json:"wait_seconds"`
	Hold map[string]float64 `json:"held_seconds"`
}

func show(t *testing.T, m *metrics) map[string]shown {
	t.Helper()
	var families map[string]shown
	if err := json.Unmarshal([]byte(m.String()), &families); err != nil {
		t.Fatalf("%v:\n%s", err, m)
	}
	return families
}

func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !done(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func TestTheMetricsOfARunAddUp(t *testing.T) {
	t.Parallel()
	m := &metrics{}
	l := load{workers: 6, rounds: 20, keys: 2}
	if err := run(t.Context(), pgtest.New(t).URL, l, m); err != nil {
		t.Fatal(err)
	}
	families := show(t, m)
	f := families["invoice"]
	calls := int64(l.workers * l.rounds)
	if len(families) != 1 || f.Granted+f.Busy != calls || f.Failed != 0 || f.Granted != f.Acquired || f.Acquired != f.Released+f.Lost || f.Held != 0 || f.Waiting != 0 {
		t.Errorf("%d calls: %s", calls, m)
	}
	if f.Wait["count"] != float64(calls) || f.Hold["count"] != float64(f.Acquired) || f.Wait["60"] > f.Wait["count"] || f.Wait["sum"] <= 0 {
		t.Errorf("the histograms of %d calls: %s", calls, m)
	}
}

func TestHoldersAndWaitersAreShownMeanwhile(t *testing.T) {
	t.Parallel()
	m := &metrics{}
	locks := sessions(t, pgtest.New(t).Pool, m)
	lock, err := locks.Acquire(t.Context(), "invoice:1")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- locks.Do(t.Context(), "invoice:1", func(context.Context, *pgxlock.Lock) error { return nil })
	}()
	until(t, "one has the lock, and one waits", func() bool { return m.count("invoice", held) == 1 && m.count("invoice", waiting) == 1 })
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if held, waiting := m.count("invoice", held), m.count("invoice", waiting); held != 0 || waiting != 0 {
		t.Errorf("%d have a lock and %d wait when all is over", held, waiting)
	}
}

func TestALossIsCounted(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	m := &metrics{}
	locks := sessions(t, db.Pool, m)
	if _, err := locks.AcquireAll(t.Context(), []string{"invoice:1", "invoice:2"}); err != nil {
		t.Fatal(err)
	}
	db.Exec(t, "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name = 'pgxlock example'")
	until(t, "both are lost", func() bool { return m.count("invoice", lost) == 2 })
	if f := show(t, m)["invoice"]; f.Held != 0 || f.Released != 0 || f.Hold["count"] != 2 {
		t.Errorf("%+v", f)
	}
}

func TestABucketCountsThoseBeforeIt(t *testing.T) {
	t.Parallel()
	var h histogram
	for _, d := range []time.Duration{0, time.Millisecond, 2 * time.Millisecond, time.Minute, time.Hour} {
		h.add(d)
	}
	var got map[string]float64
	if err := json.Unmarshal([]byte(h.String()), &got); err != nil {
		t.Fatal(err)
	}
	if got["0.001"] != 2 || got["0.003"] != 3 || got["30"] != 3 || got["60"] != 4 || got["count"] != 5 || got["sum"] != 3660.003 {
		t.Errorf("%v", got)
	}
}

// sessions returns a Locker that is observed, and closed in the end.
func sessions(t *testing.T, pool *pgxpool.Pool, m *metrics) *pgxlock.Locker {
	t.Helper()
	locks, err := pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{Owner: "example", Observe: m.observe})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = locks.Close(context.Background()) })
	return locks
}
