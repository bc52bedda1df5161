package systemtest_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// Advisory Lockers are left alone here with what they hold.

func TestEndOfAnIdleSessionIsNoticedWithoutACall(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	locks := testkit.Advisory(t, db.NewPool(t), &pgxlock.AdvisoryConfig{Owner: "idle", TTL: -1}) // no ping finds it out
	defer locks.Close(context.Background())
	for range 3 {
		held := []*pgxlock.Lock{testkit.Acquire(t, locks, "a"), testkit.Acquire(t, locks, "b", pgxlock.Shared), testkit.Acquire(t, locks, "b", pgxlock.Shared)}
		ctx, cancel := held[0].Context(t.Context())
		testkit.Terminate(t, db, "idle")
		for _, lock := range held {
			pgtest.Receive(t, "somebody notices that the session has ended", lock.Lost())
		}
		<-ctx.Done()
		cancel()
	}
}

func TestPingsKeepAnIdleSessionAlive(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const ttl, periods, attempts = 2 * time.Second, 4, 100
	db := pgtest.New(t)
	silentTap, silentPool := tappedPool(t, db)
	silent := testkit.Advisory(t, silentPool, &pgxlock.AdvisoryConfig{TTL: -1})
	defer silent.Close(context.Background())
	bound := testkit.Acquire(t, silent, "silent")
	before := silentTap.count()

	tap, pool := tappedPool(t, db)
	locks := testkit.Advisory(t, pool, &pgxlock.AdvisoryConfig{TTL: ttl})
	defer locks.Close(context.Background())
	// A machine that stands still for a second loses it rightly.
	for attempt := 0; ; attempt++ {
		lock, err := locks.Acquire(t.Context(), fmt.Sprint("k", attempt))
		if err != nil {
			if attempt == attempts {
				t.Fatal(err)
			}
			continue
		}
		sent, began := tap.count(), time.Now()
		pgtest.Until(t, "some TTLs are over", func() bool { return lock.Err() != nil || time.Since(began) > periods*ttl })
		pings, passed := tap.since(sent), time.Since(began)
		if err := lock.Err(); err != nil {
			if attempt == attempts {
				t.Fatalf("lost again after %d pings in %s: %v", len(pings), passed, err)
			}
			continue
		}
		t.Logf("%d pings in %s", len(pings), passed)
		if most := 2 * int(passed/(ttl/3)+1); len(pings) < periods/2 || len(pings) > most {
			t.Errorf("%d pings in %s, want one per third of %s, and surely not more than %d", len(pings), passed, ttl, most)
		}
		for _, m := range pings {
			if len(m.asks) != 0 {
				t.Errorf("a ping asks for %v", m.asks)
			}
		}
		break
	}
	if n := silentTap.count() - before; n != 0 || bound.Err() != nil {
		t.Errorf("without a TTL it sent %d messages by itself; %v", n, bound.Err())
	}
	if _, bounded := bound.Deadline(); bounded {
		t.Error("without a TTL it has a deadline")
	}
}
