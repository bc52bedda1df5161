package advisory

import (
	"errors"
	"testing"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestEvictedHolderLosesItsLockAndNoOther(t *testing.T) {
	t.Parallel()
	db := migrated.New(t)
	p := connected(t, db.Pool, Config{})
	lock, unharmed := mustAcquire(t, p, "k", hold.Exclusive), mustAcquire(t, p, "unharmed", hold.Exclusive)
	pgtest.Until(t, "the lock is lost", func() bool { // in doubt, soon after the grant, it keeps the lock
		var had bool
		if err := db.Pool.QueryRow(t.Context(), "select evict_advisory_lock($1, $2, 'it is drained')", p.pid, numberOf("k")).Scan(&had); err != nil || !had {
			t.Fatal(had, err)
		}
		p.Evicted()
		<-p.evicting.Done()
		return lock.Err() != nil
	})
	if err := lock.Err(); !errors.Is(err, lockerr.ErrLost) || !errors.Is(err, lockerr.ErrEvicted) {
		t.Errorf("the evicted one: %v", err)
	}
	wantFree(t, p, "k")
	next := mustAcquire(t, p, "k", hold.Exclusive)
	p.Evicted() // for the holder before
	<-p.evicting.Done()
	if err := errors.Join(next.Err(), unharmed.Err()); err != nil {
		t.Errorf("the others: %v", err)
	}
}
