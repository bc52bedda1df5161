package advisory

import (
	"errors"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestEvictedHolderLosesItsLockAndNoOther(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	p := connected(t, db.Pool, Config{})
	lock, unharmed := mustAcquire(t, p, "k", hold.Exclusive), mustAcquire(t, p, "unharmed", hold.Exclusive)
	for limit := time.Now().Add(time.Minute); lock.Err() == nil && time.Now().Before(limit); { // in doubt, soon after the grant, it keeps the lock
		var had bool
		if err := db.Pool.QueryRow(t.Context(), "select evict_advisory_lock($1, $2, 'it is drained')", p.pid, numberOf("k")).Scan(&had); err != nil || !had {
			t.Fatal(had, err)
		}
		p.Evicted()
		<-p.evicting.Done()
	}
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
