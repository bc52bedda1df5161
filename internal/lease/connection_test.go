package lease

import (
	"context"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestARequestLeavesTimeForARenewalOnTheSameConnection(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	const ttl = 2 * time.Second
	for _, one := range []bool{true, false} {
		table := newTable(t, db.Pool, Config{TTL: ttl, OneConnection: one})
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
		if err := table.Release(lock); err != nil {
			t.Error(err)
		}
	}
}

func TestARenewalGoesBeforeRequestsThatWaitForTheSameConnection(t *testing.T) {
	t.Parallel()
	table := newTable(t, pgtest.New(t).Pool, Config{TTL: 30 * time.Second, OneConnection: true})
	table.place.Schema = "s" // nothing of it is asked
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
	<-begun
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
