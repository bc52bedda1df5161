package testkit

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// NewMonitor returns a Monitor of the database.
func NewMonitor(t *testing.T, db *pgtest.DB, cfg *pgxlock.MonitorConfig) *pgxlock.Monitor {
	t.Helper()
	monitor, err := pgxlock.NewMonitor(db.Pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return monitor
}

// Snapshot returns what the Monitor sees now, all of it.
func Snapshot(t *testing.T, monitor *pgxlock.Monitor) pgxlock.Snapshot {
	t.Helper()
	shot, err := monitor.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return shot
}

// HoldersOf returns those of one key.
func HoldersOf(shot pgxlock.Snapshot, key string) (holders []pgxlock.Holder) {
	for _, h := range shot.Holders {
		if h.Key == key {
			holders = append(holders, h)
		}
	}
	return holders
}

// WaitersFor returns the waiters for a key.
func WaitersFor(shot pgxlock.Snapshot, key string) (waiters []pgxlock.Waiter) {
	for _, w := range shot.Waiters {
		if w.Key == key {
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
