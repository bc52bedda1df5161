//go:build unix

package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// These tests are about a limit that processes share.

const (
	hammeredLimit = 100 // per second and key: so few that a slow machine uses them up
	hammeredBurst = 400 // so that a machine that stands still for a moment loses nothing
	hammeredKeys  = 3
)

// hammer asks for events of each of the keys as fast as it can, after the child was told
// to begin. Told again it reports how many it was allowed, and told once more it does so
// and ends.
func hammer(ctx context.Context, url, key string, report func(any) error) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	limiter, err := ratelimit.New(pool, hammeredLimit, hammeredBurst, nil)
	if err != nil {
		return err
	}
	for connected := false; !connected; { // a machine that is very busy may not connect in time
		_, err := limiter.Allow(ctx, "warm up")
		if connected = err == nil; err != nil && !errors.Is(err, pgxlock.ErrUnavailable) {
			return err
		}
	}
	if err := report("ready"); err != nil {
		return err
	}
	if err := untilTold(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var granted [hammeredKeys]atomic.Int64
	var all sync.WaitGroup
	for i := range 2 * hammeredKeys { // half of them wait, the others try
		n, waits := i%hammeredKeys, i < hammeredKeys
		all.Go(func() {
			for ctx.Err() == nil {
				ok, err := false, error(nil)
				if waits {
					err = limiter.Wait(ctx, fmt.Sprint(key, n))
					ok = err == nil
				} else {
					ok, err = limiter.Allow(ctx, fmt.Sprint(key, n))
				}
				if ok {
					granted[n].Add(1)
				}
				if err != nil && !locked(err) { // with so many, one may stand still with a row
					cancel(err) // if it has not been ended
				}
			}
		})
	}
	for range 2 {
		if err := untilTold(); err != nil {
			return err
		}
		var counts [hammeredKeys]int64
		for n := range granted {
			counts[n] = granted[n].Load()
		}
		if err := report(counts); err != nil {
			return err
		}
	}
	cancel(nil)
	all.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return limiter.Close(context.Background())
}

// counts asks all of them how many events they were allowed of each key, and returns the
// time of the server before and after, and how many were saved up before: on a busy machine
// they do not use all that they may. That is of one statement, or what is saved up between
// the two would count as lost.
func counts(t *testing.T, db *pgtest.DB, children []*child) (sums, saved [hammeredKeys]float64, before, after time.Duration) {
	t.Helper()
	const saving = `with clock as materialized (select pgxlock_limit_clock() as now)
		select c.now, array(select least(greatest($1 - $2 * (q.tat - c.now) / 1e9, 0), $1)::float8 from pgxlock_limits q where q.limit_key like 'k%' order by q.limit_key) from clock c`
	var each []float64
	if err := db.Pool.QueryRow(t.Context(), saving, hammeredBurst, hammeredLimit).Scan(&before, &each); err != nil || len(each) != len(saved) {
		t.Fatal(each, err)
	}
	copy(saved[:], each)
	for _, c := range children {
		c.tell(t)
	}
	for _, c := range children {
		var each [hammeredKeys]float64
		c.report(t, &each)
		for i := range each {
			sums[i] += each[i]
		}
	}
	return sums, saved, before, testkit.Query[time.Duration](t, db, "select pgxlock_limit_clock()")
}

// What eight processes are allowed together is what the time of the server allows, to
// one in a hundred; and two that were killed take nothing with them.
func TestSoakProcessesShareALimitAndTheDeadTakeNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 30)
	began := testkit.Query[time.Duration](t, db, "select pgxlock_limit_clock()")
	children := startAll(t, db, "hammer a limit", "k", 10)
	// So long by the server's clock, as what they use shows.
	used := func(d time.Duration) {
		t.Helper()
		since := testkit.Query[time.Duration](t, db, "select pgxlock_limit_clock()")
		pgtest.Until(t, "they have used enough", func() bool {
			return testkit.Query[bool](t, db, "select count(*) = $1 and min(tat) > $2 from pgxlock_limits where limit_key like 'k%'", hammeredKeys, (since + d).Nanoseconds())
		})
	}
	const empty = hammeredBurst * time.Second / hammeredLimit // so far ahead of the clock is a key without events
	used(empty + 200*time.Millisecond)                        // what they had saved up, and more
	for _, c := range children[8:] {
		c.signal(t, syscall.SIGKILL)
	}
	children = children[:8]
	first, savedFirst, before, from := counts(t, db, children)
	used(empty + pgtest.Soak(t, 3*time.Second, 9*time.Second))
	second, savedLast, to, after := counts(t, db, children)
	for _, c := range children {
		c.end(t)
	}
	for i := range first {
		got, least, most := second[i]-first[i], hammeredLimit*(to-from).Seconds(), hammeredLimit*(after-before).Seconds()
		t.Logf("key %d: %.0f events, %.1f to %.1f in that time, and %.0f saved up before", i, got, least, most, savedFirst[i])
		const underWay = 2 * 8 // each process may have two that it was just told of: one of who waits, one of who tries
		if got < 0.99*least-savedLast[i]-underWay || got > 1.01*most+savedFirst[i]+underWay {
			t.Errorf("key %d: %.0f events, want %.0f to %.0f", i, got, least, most)
		}
		if most := hammeredBurst + hammeredLimit*(after-began).Seconds(); second[i] > most+1 {
			t.Errorf("key %d: %.0f events since the first one, %.0f would have been right", i, second[i], most)
		}
	}
}
