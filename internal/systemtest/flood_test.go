package systemtest_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Any role that may connect can send notifications, and does not need to know any lock for that.
func TestFloodOfNotificationsMakesALockerSendNothing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	looked := make(chan struct{}, 1)
	var mu sync.Mutex
	var queued []string
	onStatement := testkit.EachStatement(func(sql string) {
		switch {
		case strings.Contains(sql, "pgxlock_evicted("):
			select {
			case looked <- struct{}{}:
			default:
			}
		case strings.Contains(sql, "_batch(") || strings.Contains(sql, "pgxlock_notify_holders"):
			mu.Lock()
			defer mu.Unlock()
			queued = append(queued, sql)
		}
	})
	sent := func() []string {
		mu.Lock()
		defer mu.Unlock()
		statements := queued
		queued = nil
		return statements
	}
	victim := testkit.Advisory(t, db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = onStatement }), nil)
	defer victim.Close(context.Background())
	var wanted []*pgxlock.Lock
	var ids []int64
	for i := range 50 {
		wanted = append(wanted, testkit.Acquire(t, victim, fmt.Sprint("wanted", i)))
		ids = append(ids, lockkey.Identify(wanted[i].Key()).Number)
	}
	holder := wanted[0].Holder()
	channel := "pgxlock_holder_" + holder[strings.LastIndex(holder, ":")+1:]
	evict := func() { db.Exec(t, "select pg_notify($1, '1:evict')", channel) }
	pgtest.Until(t, "the victim listens", func() bool {
		evict()
		select {
		case <-looked:
			return true
		default:
			return false
		}
	})
	use, stop := context.WithCancel(t.Context())
	var using sync.WaitGroup
	using.Go(func() {
		for use.Err() == nil {
			lock, err := victim.Acquire(t.Context(), "busy")
			if err != nil {
				t.Error(err)
				return
			}
			testkit.Release(t, lock)
		}
	})
	flood := func(also string, args ...any) {
		t.Helper()
		tx := testkit.Begin(t, db, pgx.TxOptions{})
		const half = "select count(pg_notify($1, concat_ws(':', 1 + i % 9, 1 + i % 2, i))) from generate_series($2::bigint, $2 + 100000) as i"
		if _, err := tx.Exec(t.Context(), half, channel, 0); err != nil {
			t.Fatal(err)
		}
		if also != "" {
			if _, err := tx.Exec(t.Context(), also, args...); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := tx.Exec(t.Context(), half, channel, 1_000_000); err != nil {
			t.Fatal(err)
		}
		testkit.Commit(t, tx)
		for len(looked) > 0 {
			<-looked
		}
		evict()
		pgtest.Receive(t, "the victim has handled the flood", looked)
	}
	sent()
	flood("")
	if all := sent(); len(all) > 0 {
		t.Errorf("%d statements were sent because of forged notifications: %.200s", len(all), all)
	}
	flood("select pgxlock_notify_holders(array_fill(1, array[cardinality($1::bigint[])]), $1)", ids)
	if all := sent(); len(all) > 0 {
		t.Errorf("%d statements were sent because of waiters for locks that are held: %.200s", len(all), all)
	}
	stop()
	using.Wait()
	for i, lock := range wanted {
		testkit.Release(t, lock)
		pgtest.Until(t, fmt.Sprintf("the release of lock %d wakes its waiter", i), func() bool { return len(sent()) > 0 })
	}
}
