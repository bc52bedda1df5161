package lease

import (
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
)

func TestLeaseThatComesWhenNoneWasHeldIsRenewed(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := newTable(t, db.Pool, Config{TTL: 8 * time.Second})
	table.cfg.Renew = 200 * time.Millisecond
	for range 2 {
		lock, err := try(t, table, "k")
		if err != nil {
			t.Fatal(err)
		}
		if got, want := table.renewer.patience(), table.cfg.TTL/2; got != want {
			t.Errorf("an exchange beside the lease may take %s, want %s", got, want)
		}
		first, _ := lock.Ended()
		for until := first; until == first; time.Sleep(10 * time.Millisecond) {
			if until, err = lock.Ended(); err != nil || lock.Err() != nil {
				t.Fatal("it is not renewed")
			}
		}
		_ = lock.End(nil) // as a release does first
		if err := table.Release(lock); err != nil {
			t.Fatal(err)
		}
		if got := table.renewer.patience(); got != dbconn.Timeout {
			t.Errorf("an exchange beside no lease may take %s, want %s", got, dbconn.Timeout)
		}
	}
}
