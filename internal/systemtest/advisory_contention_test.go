package systemtest_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/pgxlock/pgxlock/internal/testkit"
)

func TestAdvisoryTokensAreNeverZeroUnderContention(t *testing.T) {
	t.Parallel()
	locks := withTokens(t, testkit.Migrated(t), "contended")
	var callers sync.WaitGroup
	var mu sync.Mutex
	grants, zero := 0, 0
	last := make(map[string]int64)
	for range 8 {
		callers.Go(func() {
			for range 100 {
				key := fmt.Sprint("k", rand.IntN(12))
				lock, err := locks.Acquire(t.Context(), key)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				grants++
				if lock.Token() == 0 {
					zero++
				} else if lock.Token() <= last[key] {
					t.Errorf("token %d of %s after %d", lock.Token(), key, last[key])
				}
				last[key] = lock.Token()
				mu.Unlock()
				if err := lock.Release(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
	if zero > 0 {
		t.Errorf("%d of %d locks have token 0", zero, grants)
	}
}
