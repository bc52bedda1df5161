package systemtest_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
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

// check sees to it that some new Lockers share the turns, and that they can be closed.
func (s saturation) check(t *testing.T, db *pgtest.DB) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	var turns []byte
	key := fmt.Sprint("saturated ", rand.Int64())
	lockers := make([]*pgxlock.Locker, s.lockers)
	var all sync.WaitGroup
	for i := range lockers {
		lockers[i] = saturatedKinds[s.kind](t, db)
		testkit.Hear(t, db, lockers[i])
	}
	for i, locks := range lockers {
		all.Go(func() {
			if err := testkit.Saturate(ctx, locks, key, s.callers, func() error {
				mu.Lock()
				turns = append(turns, byte(i))
				mu.Unlock()
				if s.work > 0 {
					time.Sleep(s.work)
				}
				return nil
			}); err != nil {
				t.Errorf("%s: %v", s, err)
			}
		})
	}
	testkit.UntilFair(t, s.String(), s.lockers, func() []byte {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(turns)
	})
	cancel()
	all.Wait()
	for _, locks := range lockers {
		all.Go(func() {
			if err := locks.Close(t.Context()); err != nil {
				t.Errorf("%s: %v", s, err)
			}
		})
	}
	all.Wait()
}

func TestSoakSaturatedLockersShareALockFairly(t *testing.T) {
	t.Parallel()
	rounds := pgtest.Soak(t, 0, 100)
	db := testkit.Roomy(t, testkit.Migrated(t), 40)
	for range rounds {
		kind := []string{"advisory locks", "advisory locks with tokens", "leases"}[rand.N(3)]
		s := saturation{kind, []int{2, 4}[rand.N(2)], []int{1, 2, 8, 64}[rand.N(4)], []time.Duration{0, time.Millisecond}[rand.N(2)]}
		s.check(t, db)
	}
	if rounds > 0 {
		return
	}
	for _, s := range []saturation{ // those that were starved most often
		{"advisory locks", 2, 8, 0}, {"advisory locks", 2, 64, 0}, {"advisory locks with tokens", 2, 8, 0}, {"leases", 2, 1, 0},
	} {
		t.Run(s.String(), func(t *testing.T) { s.check(t, db) })
	}
}

func TestSharesAreCountedInTurns(t *testing.T) {
	t.Parallel()
	one, two := bytes.Repeat([]byte{0}, 190), []byte{1}
	for what, test := range map[string]struct {
		turns []byte
		fair  bool
	}{
		"one after the other":          {bytes.Repeat([]byte{0, 1}, 1000), true},
		"many of one, many of another": {bytes.Repeat(append(bytes.Repeat(two, 100), one...), 50), true},
		"many of one, one of another":  {bytes.Repeat(append(one[:190:190], two...), 50), false},
		"another one never comes":      {bytes.Repeat([]byte{0}, 1_000_000), false},
	} {
		shares := testkit.Shares(test.turns, 2)
		if len(shares) == 0 || slices.ContainsFunc(shares, func(share float64) bool { return share >= testkit.FairShare != test.fair }) {
			t.Errorf("%s: parts of an equal share: %.3f; fair: %t", what, shares, test.fair)
		}
	}
}
