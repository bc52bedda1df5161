package testkit

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/monitor"
)

// NewMonitor returns a Monitor of the database.
func NewMonitor(t *testing.T, db *pgtest.DB, cfg *monitor.Config) *monitor.Monitor {
	t.Helper()
	mon, err := monitor.New(db.Pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return mon
}

// Snapshot returns what the Monitor sees now, all of it.
func Snapshot(t *testing.T, mon *monitor.Monitor) monitor.Snapshot {
	t.Helper()
	shot, err := mon.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return shot
}

// HoldersOf returns those of one key.
func HoldersOf(shot monitor.Snapshot, key string) (holders []pgxlock.Holder) {
	for _, h := range shot.Holders {
		if h.LockKey() == key {
			holders = append(holders, h)
		}
	}
	return holders
}

// WaitersFor returns the waiters for a key.
func WaitersFor(shot monitor.Snapshot, key string) (waiters []monitor.Waiter) {
	for _, w := range shot.Waiters {
		if w.LockKey() == key {
			waiters = append(waiters, w)
		}
	}
	return waiters
}

// Backend opens a session, and says which process of the server's it has.
func Backend(t *testing.T, db *pgtest.DB) (*pgx.Conn, int32) {
	t.Helper()
	conn := pgtest.Connect(t, db.URL)
	return conn, int32(conn.PgConn().PID())
}

// ExecOn runs statements on a session.
func ExecOn(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%v\n%s", err, sql)
	}
}
