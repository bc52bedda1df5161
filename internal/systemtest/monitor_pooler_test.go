package systemtest_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
)

// A monitor needs no session of its own: behind a pooler it sees and does the same.
func TestMonitorWorksThroughAPoolerInEveryMode(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server, db := privateServer(t, nil)
	for _, setting := range []string{"default_transaction_read_only = on", "default_transaction_isolation = 'serializable'", "search_path = public, pg_temp"} {
		db.Exec(t, "alter role postgres set "+setting) // were one of ours not made, this would show
	}
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		locks, others := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: "holder", Renew: 100 * time.Millisecond}), testkit.NewLocker(t, db, nil)
		sessions := testkit.NewAdvisory(t, db, nil)
		lease, session := testkit.Acquire(t, locks, "k", pgxlock.Metadata("pod-7")), testkit.Acquire(t, sessions, "in a session")
		next := testkit.Waits(t, others, "k", testkit.LongWait)
		testkit.UntilQueued(t, db, "k", 1)
		conn, pid := testkit.Backend(t, db)
		testkit.ExecOn(t, conn, `begin isolation level read committed read write; select acquire_lock('old', 'died'); update distributed_locks set expires_at = now() where lock_name = 'old'; commit;
			select pg_advisory_lock(7)`)

		through := pgtest.Pool(t, pooler.URL("postgres"))
		mon := testkit.NewMonitor(t, &pgtest.DB{Pool: through}, &monitor.Config{Names: []string{"in a session"}})
		shots := 0
		for shot, err := range mon.Watch(t.Context(), time.Second) {
			if err != nil {
				t.Fatal(err)
			}
			if k := testkit.HoldersOf(shot, "k"); len(k) != 1 || k[0].ID != lease.Holder() || k[0].Metadata != "pod-7" || k[0].Since.IsZero() || len(testkit.HoldersOf(shot, "in a session")) != 1 || len(testkit.HoldersOf(shot, pgxlock.RawKey(7))) != 1 {
				t.Errorf("%+v", shot.Holders)
			}
			if len(shot.Expired) != 1 || len(shot.Missing) > 0 {
				t.Errorf("%+v, missing %q", shot.Expired, shot.Missing)
			}
			if len(shot.Waiters) != 1 || shot.Waiters[0].Key != "k" || shot.Waiters[0].Kind != pgxlock.KindLease {
				t.Errorf("%+v", shot.Waiters)
			}
			if shots++; shots == 2 {
				break
			}
		}
		if n, err := mon.Reap(t.Context(), 0); n != 1 || err != nil {
			t.Errorf("reaped %d, %v", n, err)
		}
		for _, lock := range []*pgxlock.Lock{lease, session} {
			if !evict(t, mon, holder(t, mon, lock.Key())) {
				t.Fatalf("%s: it was not the holder", lock.Key())
			}
			wantEvicted(t, lock)
		}
		testkit.Release(t, <-next)
		if found, err := mon.Waiters(t.Context(), monitor.Filter{}); len(found) > 0 || err != nil {
			t.Errorf("%+v, %v", found, err)
		}
		hung, err := mon.Session(t.Context(), pid)
		if err != nil || !slices.ContainsFunc(hung.Holders, func(h pgxlock.Holder) bool { return h.LockKey() == pgxlock.RawKey(7) }) {
			t.Fatalf("%+v, %v", hung, err)
		}
		if terminated, err := mon.Terminate(t.Context(), hung, "why"); !terminated || err != nil {
			t.Errorf("%t, %v", terminated, err)
		}
		if _, err := mon.Session(t.Context(), pid); !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("%v", err)
		}
		// An error leaves nothing open, and the next call works.
		_, err = mon.Evict(t.Context(), pgxlock.Holder{Kind: pgxlock.KindLease, Key: strings.Repeat("x", 300), ID: "A", Token: 1}, "why")
		wantServerError(t, err, "22023")
		if found := testkit.HoldersOf(testkit.Snapshot(t, mon), "k"); found != nil {
			t.Errorf("%+v", found)
		}

		through.Close() // in session mode it has a connection to the server for itself
		if err := errors.Join(locks.Close(t.Context()), others.Close(t.Context()), sessions.Close(t.Context())); err != nil {
			t.Error(err)
		}
		pgtest.Until(t, "their sessions have ended", func() bool {
			return testkit.Query[int](t, db, "select count(*) from pg_locks where locktype = 'advisory'") == 0
		})
		wantClean(t, mode, pooler, db)
		for line := range strings.Lines(server.LogTail()) { // a busy server may take long to end a session
			if strings.Contains(line, "WARNING") && !strings.Contains(line, "did not terminate within") {
				t.Errorf("the server had to warn: %s", line)
			}
		}
	})
}
