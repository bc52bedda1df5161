package systemtest_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// saturatedKinds are the Lockers that share a lock fairly with other processes.
var saturatedKinds = map[string]func(*testing.T, *pgtest.DB) *pgxlock.Locker{
	"advisory locks": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
		t.Helper()
		return testkit.NewAdvisory(t, db, nil)
	},
	"advisory locks with tokens": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
		t.Helper()
		return testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true})
	},
	"leases": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
		t.Helper()
		return testkit.NewLocker(t, db, nil)
	},
}

// A saturation is Lockers each of which has callers that acquire one key all the time.
type saturation struct {
	kind    string
	lockers int
	callers int // of each Locker
	work    time.Duration
}

func (s saturation) String() string {
	return fmt.Sprintf("%d Lockers with %d callers, %s of work, %s", s.lockers, s.callers, s.work, s.kind)
}

// check returns the least share that one of some new Lockers had in d or longer, which begins when each
// of them is connected and has had a few turns. None may be starved, and they close at once.
func (s saturation) check(t *testing.T, db *pgtest.DB, d time.Duration) float64 {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	lockers, turns := make([]*pgxlock.Locker, s.lockers), make([]atomic.Int64, s.lockers)
	key := fmt.Sprint("saturated ", rand.Int64())
	var all sync.WaitGroup
	for i := range lockers {
		lockers[i] = saturatedKinds[s.kind](t, db)
		all.Go(func() {
			if err := testkit.Saturate(ctx, lockers[i], key, s.callers, func() {
				turns[i].Add(1)
				if s.work > 0 {
					time.Sleep(s.work)
				}
			}); err != nil {
				t.Errorf("%s: %v", s, err)
			}
		})
	}
	had := func(before []int) []int {
		counts := make([]int, len(turns))
		for i := range turns {
			counts[i] = int(turns[i].Load()) - before[i]
		}
		return counts
	}
	none := make([]int, len(turns))
	pgtest.Until(t, fmt.Sprintf("%s: each has had a turn", s), func() bool { return slices.Min(had(none)) > 2 })
	before, began := had(none), time.Now()
	pgtest.Until(t, fmt.Sprintf("%s: the time is over, and there were enough turns to compare", s), func() bool {
		now := had(before)
		fair := testkit.Share(now) >= testkit.Starved || time.Since(began) > 10*d // the machine may let one stand still for d
		return time.Since(began) > d && slices.Max(now) > 40 && fair
	})
	got := had(before)
	cancel()
	all.Wait()
	closing := time.Now()
	for _, locks := range lockers {
		all.Go(func() {
			if err := locks.Close(context.Background()); err != nil {
				t.Errorf("%s: %v", s, err)
			}
		})
	}
	all.Wait()
	t.Logf("%s: %d turns; before that %d; closed in %s", s, got, before, time.Since(closing).Round(time.Millisecond))
	if testkit.Share(got) < testkit.Starved {
		t.Errorf("%s: one of them had %.3f of an equal share: %d turns", s, testkit.Share(got), got)
	}
	if took := time.Since(closing); took > time.Minute { // an idle machine takes 20 ms
		t.Errorf("%s: closed in %s", s, took)
	}
	return testkit.Share(got)
}

func TestSoakSaturatedLockersShareALockFairly(t *testing.T) {
	t.Parallel()
	db := testkit.Roomy(t, testkit.Migrated(t), 40)
	rounds := pgtest.Soak(t, 0, 100)
	var unfair int // rounds in which one had less than a quarter of an equal share
	for range rounds {
		kind := []string{"advisory locks", "advisory locks with tokens", "leases"}[rand.N(3)]
		s := saturation{kind, []int{2, 4}[rand.N(2)], []int{1, 2, 8, 64}[rand.N(4)], []time.Duration{0, time.Millisecond}[rand.N(2)]}
		if s.check(t, db, 2*time.Second) < 1./4 {
			unfair++
		}
	}
	if unfair > rounds/20 { // other long tests run beside this one
		t.Errorf("in %d of %d rounds one had less than a quarter of an equal share", unfair, rounds)
	}
	if rounds > 0 {
		return
	}
	for _, s := range []saturation{ // those that were starved most often
		{"advisory locks", 2, 8, 0}, {"advisory locks", 2, 64, 0}, {"advisory locks with tokens", 2, 8, 0}, {"leases", 2, 1, 0},
	} {
		t.Run(s.String(), func(t *testing.T) {
			t.Parallel()
			s.check(t, db, 2*time.Second)
		})
	}
}
