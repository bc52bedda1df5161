package lease

import (
	"errors"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestLeaseThatComesWhenNoneWasHeldIsRenewed(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := newTable(t, db.Pool, Config{TTL: 2 * pgtest.Patience})
	table.cfg.Renew = 200 * time.Millisecond
	for range 2 {
		lock, err := try(t, table, "k")
		if err != nil {
			t.Fatal(err)
		}
		first, _ := lock.Ended()
		pgtest.Until(t, "the lease is renewed", func() bool {
			until, err := lock.Ended()
			if err != nil {
				t.Fatal(err)
			}
			return until != first
		})
		_ = lock.End(nil) // as a release does first
		if err := table.Release(lock); err != nil {
			t.Fatal(err)
		}
	}
}

func TestExchangeBesideALeaseLeavesTimeForAnotherOne(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := newTable(t, db.Pool, Config{TTL: 8 * time.Second})
	table.host.Clock = func() time.Duration { return 0 } // the lease is held, no matter how long the test takes
	for range 2 {
		lock, err := try(t, table, "k")
		if err != nil {
			t.Fatal(err)
		}
		if got, want := table.renewer.patience(), table.cfg.TTL/2; got != want {
			t.Errorf("an exchange beside the lease may take %s, want %s", got, want)
		}
		_ = lock.End(nil)                                                               // as a release does first
		if err := table.Release(lock); err != nil && !errors.Is(err, lockerr.ErrLost) { // the server's clock goes on
			t.Fatal(err)
		}
		if got := table.renewer.patience(); got != dbconn.Timeout {
			t.Errorf("an exchange beside no lease may take %s, want %s", got, dbconn.Timeout)
		}
	}
}
