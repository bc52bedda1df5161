package systemtest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// One name that leads to a server of another cluster after a while, or back to an old primary. The
// servers are databases of one server, of which each may tell another cluster and timeline.

// asCluster makes the database one of a cluster with that identifier, on that timeline.
func asCluster(t *testing.T, db *pgtest.DB, system int64, timeline int) {
	t.Helper()
	db.Exec(t, fmt.Sprintf(`set allow_system_table_mods = on;
		alter function pg_catalog.pg_control_system() rename to real_control_system;
		create function pg_catalog.pg_control_system(out pg_control_version integer, out catalog_version_no integer, out system_identifier bigint, out pg_control_last_modified timestamptz)
			language sql as 'select 1, 1, %d::bigint, pg_catalog.now()';
		alter function pg_catalog.pg_walfile_name(pg_lsn) rename to real_walfile_name;
		create function pg_catalog.pg_walfile_name(pg_lsn) returns text language sql as 'select ''%08X0000000000000001''';
		set allow_system_table_mods = off`, system, timeline))
	db.Pool.Reset()
}

// A movingName leads to one of two databases.
type movingName struct {
	*pgtest.DB
	of [2]*pgtest.DB

	mu    sync.Mutex
	which int
	open  []net.Conn
}

// newName returns a name that leads to the first of them.
func newName(t *testing.T, first, second *pgtest.DB) *movingName {
	t.Helper()
	n := &movingName{of: [2]*pgtest.DB{first, second}}
	pool := first.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = n.dial
	})
	n.DB = &pgtest.DB{Pool: pool, URL: first.URL, Name: first.Name}
	return n
}

func (n *movingName) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open = append(n.open, conn)
	return &renamed{conn, n.of[0].Name, n.of[n.which].Name}, nil
}

// lead makes new connections end in that database.
func (n *movingName) lead(to int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.which = to
}

// cut ends the connections there are.
func (n *movingName) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, conn := range n.open {
		_ = conn.Close()
	}
	n.open = nil
}

// said is what a Locker logs.
type said struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// twoClusters returns databases that say they are in clusters 41 and 42.
func twoClusters(t *testing.T) (first, second *pgtest.DB) {
	t.Helper()
	first, second = testkit.Migrated(t), testkit.Migrated(t)
	asCluster(t, first, 41, 1)
	asCluster(t, second, 42, 1)
	return first, second
}

// wantMoved checks that a lock is lost because the name leads to another cluster.
func wantMoved(t *testing.T, lock *pgxlock.Lock, log *said) {
	t.Helper()
	pgtest.Receive(t, "the loss of "+lock.Key(), lock.Lost())
	if err := lock.Err(); !errors.Is(err, pgxlock.ErrLost) {
		t.Errorf("%v, want ErrLost", err)
	}
	pgtest.Until(t, "the log says why", func() bool {
		return strings.Contains(log.String(), "the database is on another cluster now, with system identifier 42: it was 41")
	})
}

// A replica that takes writes has the rows of its publisher, so that renewals would go on there while
// others get the lease where it was acquired.
func TestLeaseIsLostOnAnotherCluster(t *testing.T) {
	t.Parallel()
	for _, one := range []bool{false, true} {
		if one && testing.Short() {
			continue
		}
		first, second := twoClusters(t)
		var log said
		name := newName(t, first, second)
		locks := testkit.NewLocker(t, name.DB, &pgxlock.LeaseConfig{TTL: time.Hour, OneConnection: one, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		held := []*pgxlock.Lock{testkit.Acquire(t, locks, "a"), testkit.Acquire(t, locks, "b", pgxlock.Shared)}
		if err := held[0].Renew(t.Context()); err != nil { // both connections are there
			t.Fatal(err)
		}
		second.Exec(t, "insert into distributed_locks select 'a', $1, now(), now() + interval '1 hour', '{}', $2", held[0].Holder(), held[0].Token())
		name.lead(1)
		name.cut()
		if err := held[0].Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
			t.Errorf("OneConnection %t: Renew says %v, want ErrLost", one, err)
		}
		for _, lock := range held {
			wantMoved(t, lock, &log)
		}
		testkit.Acquire(t, locks, "c")
		if n := testkit.Query[int](t, second, "select count(*) from distributed_locks where lock_name = 'c'"); n != 1 {
			t.Errorf("OneConnection %t: it is not on the second", one)
		}
	}
}

// Both connections of a Locker end in one cluster: the one that did not break follows the other.
func TestConnectionsOfALockerEndInOneCluster(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	first, second := twoClusters(t)
	name := newName(t, first, second)
	var log said
	locks := testkit.NewLocker(t, name.DB, &pgxlock.LeaseConfig{TTL: time.Hour, Owner: "two", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	lock := testkit.Acquire(t, locks, "a")
	if err := lock.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	name.lead(1)
	requests := testkit.Query[int32](t, first, "select pid from pg_stat_activity where application_name = 'pgxlock two' and datname = current_database() order by backend_start limit 1")
	testkit.Query[bool](t, first, "select pg_terminate_backend($1, 600000)", requests)
	testkit.Acquire(t, locks, "b") // on a new connection
	wantMoved(t, lock, &log)
	third := testkit.Acquire(t, locks, "c")
	if err := third.Renew(t.Context()); err != nil {
		t.Errorf("a renewal on the connection that did not break: %v", err)
	}
	rows := testkit.Rows(t, second)
	if len(rows) != 2 || len(testkit.Backends(t, first, "two")) != 0 {
		t.Errorf("%v on the second, %d connections to the first", rows, len(testkit.Backends(t, first, "two")))
	}
}

func TestAdvisoryLockIsLostOnAnotherCluster(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	first, second := twoClusters(t)
	for _, cut := range []bool{true, false} {
		name := newName(t, first, second)
		var log said
		owner := "moved-" + strings.ToLower(rand.Text())
		locks := testkit.NewAdvisory(t, name.DB, &pgxlock.AdvisoryConfig{Owner: owner, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		lock := testkit.Acquire(t, locks, fmt.Sprint("mine ", cut))
		busy := testkit.Acquire(t, testkit.NewAdvisory(t, first, nil), fmt.Sprint("busy ", cut))
		name.lead(1)
		if cut {
			name.cut()
		} else { // all connections but that of the lock session
			_, pid, _ := strings.Cut(lock.Holder(), ":")
			pgtest.Until(t, "the listener is there", func() bool { return len(testkit.Backends(t, first, owner)) > 1 })
			testkit.Query[int](t, first, "select count(pg_terminate_backend(pid, 600000)) from pg_stat_activity where application_name = 'pgxlock ' || $1 and pid <> $2::text::int", owner, pid)
		}
		_, err := locks.Acquire(t.Context(), busy.Key(), testkit.LongWait)
		if err != nil { // on the second the key is free
			t.Error(err)
		}
		wantMoved(t, lock, &log)
		pgtest.Until(t, "all its sessions are on the second", func() bool { return len(testkit.Backends(t, first, owner)) == 0 })
	}
}

// After a promotion the old primary grants nothing to a Locker that has used the new one.
func TestOldPrimaryIsNotUsedAgain(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	first, second := testkit.Migrated(t), testkit.Migrated(t)
	asCluster(t, first, 41, 2)
	asCluster(t, second, 41, 1)
	for what, make := range testkit.WaitingKinds {
		name := newName(t, first, second)
		locks := make(t, name.DB, "loyal")
		lock := testkit.Acquire(t, locks, what)
		name.lead(1)
		name.cut()
		_, err := locks.TryAcquire(t.Context(), what+" on the old primary")
		if !errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, pgxlock.ErrReadOnly) {
			t.Errorf("%s: %v, want ErrUnavailable", what, err)
		} else {
			wantOneLine(t, err, "an old primary, on timeline 1 of a cluster whose timeline 2 was in use", "fence it off")
		}
		if n := len(testkit.Rows(t, second)); n != 0 {
			t.Errorf("%s: %d leases on the old primary", what, n)
		}
		name.lead(0)
		testkit.Acquire(t, locks, what+" on the new primary")
		if what == "leases" && lock.Err() != nil {
			t.Errorf("%s: %v, though the cluster is the same", what, lock.Err())
		}
	}
}

// A role without the right to know the cluster can lock all the same.
func TestUnknownClusterIsNoReasonToRefuse(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, hidden := range []string{"pg_control_system()", "pg_walfile_name(pg_lsn)"} {
		db := testkit.Migrated(t)
		db.Exec(t, "set allow_system_table_mods = on; alter function pg_catalog."+hidden+" rename to hidden_"+strings.ToLower(rand.Text())+"; set allow_system_table_mods = off")
		for kind, make := range testkit.WaitingKinds {
			locks := make(t, db, "ignorant")
			lock := testkit.Acquire(t, locks, kind)
			testkit.Terminate(t, db, "ignorant")
			if err := lock.Renew(t.Context()); kind == "leases" && err != nil {
				t.Errorf("%s: %v", hidden, err)
			}
			testkit.Acquire(t, locks, kind+" again")
			if err := locks.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}
