package lease

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

func TestRequestLeavesTimeForARenewalOnTheSameConnection(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	const ttl = 8 * time.Second
	for _, one := range []bool{true, false} {
		table := newTable(t, db.Pool, Config{TTL: ttl, OneConnection: one})
		table.host.Clock = func() time.Duration { return 0 } // the lease is held, no matter how long the test takes
		lock, err := try(t, table, "k")
		if err != nil {
			t.Fatal(err)
		}
		var within time.Duration
		if err := table.request(t.Context(), func(ctx context.Context, _ dbconn.Querier, _ bool) error {
			deadline, _ := ctx.Deadline()
			within = time.Until(deadline)
			return nil
		}); err != nil {
			t.Error(err)
		}
		if one && within > ttl/2 {
			t.Errorf("a request may take %s beside leases of %s", within, ttl)
		}
		if err := table.Release(lock); err != nil && !errors.Is(err, lockerr.ErrLost) { // the server's clock goes on
			t.Error(err)
		}
	}
}

func TestRenewalGoesBeforeRequestsThatWaitForTheSameConnection(t *testing.T) {
	t.Parallel()
	table := newTable(t, newBatchDB(t).Pool, Config{TTL: 30 * time.Second, OneConnection: true})
	var exchanges sync.WaitGroup
	order := make(chan string, 10)
	exchange := func(run func(dbconn.Exchange) error, name string, before func()) {
		exchanges.Go(func() {
			if err := run(func(context.Context, dbconn.Querier, bool) error {
				before()
				order <- name
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	begun, finish := make(chan struct{}), make(chan struct{})
	request := func(fn dbconn.Exchange) error { return table.request(t.Context(), fn) }
	exchange(request, "under way", func() { close(begun); <-finish })
	pgtest.Receive(t, "an exchange", begun)
	for range 4 {
		exchange(request, "request", func() {})
	}
	for range 100 {
		runtime.Gosched() // so that most of them wait by now
	}
	exchange(table.renewal, "renewal", func() {})
	for table.sharing.TryRLock() { // until it waits
		table.sharing.RUnlock()
		runtime.Gosched()
	}
	close(finish)
	exchanges.Wait()
	if first, second := <-order, <-order; first != "under way" || second != "renewal" {
		t.Errorf("%s, then %s", first, second)
	}
}
