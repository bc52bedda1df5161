package systemtest_test

import (
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// A crashingServer loses in a crash what was not flushed at a commit: its log writer sleeps.
type crashingServer struct {
	*pgserver.Server
	db *pgtest.DB
}

func newCrashingServer(t *testing.T) *crashingServer {
	t.Helper()
	server, db := privateServer(t, map[string]string{"fsync": "on", "wal_writer_delay": "10s", "autovacuum": "off", "bgwriter_lru_maxpages": "0"})
	return &crashingServer{server, db}
}

func (s *crashingServer) crash(t *testing.T) {
	t.Helper()
	if err := s.Crash(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.db = testkit.On(t, "", s.Server)
}

func (s *crashingServer) has(t *testing.T, key string) bool {
	t.Helper()
	return testkit.Query[bool](t, s.db, "select exists (select from distributed_locks where lock_name = $1)", key)
}

// rarely renews nothing while a test runs, but at once when a connection was made anew.
func rarely(d pgxlock.Durability) *pgxlock.LeaseConfig {
	return &pgxlock.LeaseConfig{TTL: 10 * time.Hour, Durability: d}
}

func TestAsyncLeasesMayBeLostInACrashAndTheirTokensAreNotRepeated(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := newCrashingServer(t)
	locks := testkit.NewLocker(t, server.db, rarely(pgxlock.Async))
	var highest int64
	told := func(lock *pgxlock.Lock) *pgxlock.Lock {
		t.Helper()
		if lock.Token() <= highest {
			t.Errorf("token %d, and %d was given out before", lock.Token(), highest)
		}
		highest = max(highest, lock.Token())
		return lock
	}
	lost, undone := false, false
	for round := 0; round < 30 && (!lost || !undone); round++ {
		released := told(testkit.Acquire(t, locks, "released"))
		if err := released.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		testkit.Release(t, released)
		held := told(testkit.Acquire(t, locks, "held"))
		server.crash(t)
		lost, undone = !server.has(t, "held"), server.has(t, "released")

		told(testkit.Acquire(t, locks, "next")) // on a new connection
		if lost {
			<-held.Lost() // long before its next renewal is due
		}
		server.db.Exec(t, "delete from distributed_locks")
	}
	if !lost || !undone {
		t.Error("no crash took back an acquire and a release: nothing was tested")
	}
	told(testkit.Acquire(t, locks, "held"))
}

func TestAsyncLeaseThatWasRenewedSurvivesACrash(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := newCrashingServer(t)
	for name, one := range map[string]bool{"one": true, "two": false} {
		cfg := rarely(pgxlock.Async)
		cfg.OneConnection = one
		locks := testkit.NewLocker(t, server.db, cfg)
		testkit.Acquire(t, locks, "first of "+name) // after a crash, which is durable
		lock := testkit.Acquire(t, locks, name)
		if err := lock.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		server.crash(t)
		if !server.has(t, name) {
			t.Errorf("OneConnection %t: a renewed lease is gone", one)
		}
		if err := lock.Renew(t.Context()); err != nil {
			t.Errorf("OneConnection %t: %v", one, err)
		}
	}
}

func TestDurableLeasesSurviveACrashBesideAsyncOnes(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := newCrashingServer(t)
	async, durable := testkit.NewLocker(t, server.db, rarely(pgxlock.Async)), testkit.NewLocker(t, server.db, rarely(pgxlock.Durable))
	for range 2 {
		a := testkit.Acquire(t, async, "async")
		released, held := testkit.Acquire(t, durable, "released"), testkit.Acquire(t, durable, "held")
		testkit.Release(t, released)
		server.crash(t)
		if !server.has(t, "held") || server.has(t, "released") || !server.has(t, "async") {
			t.Error("a crash took back what was acknowledged")
		}
		b := testkit.Acquire(t, durable, "b")
		if b.Token() <= max(a.Token(), held.Token()) {
			t.Errorf("token %d after %d and %d", b.Token(), a.Token(), held.Token())
		}
		for _, lock := range []*pgxlock.Lock{b, held, a} {
			testkit.Release(t, lock)
		}
	}
}
