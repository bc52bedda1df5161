package systemtest_test

import (
	"context"
	"runtime/debug"
	"slices"
	"testing"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// A program that locks often must not keep its garbage collector busy.
func TestFreeLockCostsFewAllocations(t *testing.T) {
	pgtest.Long(t)
	memory := pgxlock.NewMemoryLocker()
	defer memory.Close(context.Background())
	db := testkit.Migrated(t)
	advisory, lease := testkit.NewAdvisory(t, db, nil), testkit.NewLocker(t, db, nil)
	for kind, most := range map[string]struct {
		locks              *pgxlock.Locker
		one, maxWait, four float64
	}{
		"memory":   {locks: memory, one: 6, maxWait: 7, four: 44},
		"advisory": {locks: advisory, one: 2, maxWait: 3, four: 36},
		"lease":    {locks: lease, one: 23, maxWait: 30, four: 74},
	} {
		locks := most.locks
		pair := func(opts ...pgxlock.AcquireOption) func() error {
			return func() error {
				lock, err := locks.Acquire(t.Context(), "k", opts...)
				if err == nil {
					err = lock.Release(t.Context())
				}
				return err
			}
		}
		keys := []string{"a", "b", "c", "d"}
		four := func() error {
			all, err := locks.AcquireAll(t.Context(), keys)
			if err == nil {
				err = all.Release(t.Context())
			}
			return err
		}
		for _, call := range []struct {
			name  string
			locks float64
			do    func() error
			most  float64
		}{
			{"Acquire", 1, pair(), most.one},
			{"Acquire with MaxWait", 1, pair(testkit.LongWait), most.maxWait},
			{"AcquireAll of four keys", 4, four, most.four},
		} {
			limit := call.most
			if raceDetector() {
				limit += call.locks
			}
			n := limit + 1
			for tries := 0; n > limit && tries < 5; tries++ { // other goroutines allocate as well
				n = testing.AllocsPerRun(200, func() {
					if err := call.do(); err != nil {
						t.Error(err)
					}
				})
			}
			if n > limit {
				t.Errorf("%s, %s: %v allocations with the release, want %v at most", kind, call.name, n, limit)
			}
		}
	}
}

// raceDetector reports whether the tests run under the race detector, which keeps the compiler
// from saving one allocation for each lock.
func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
