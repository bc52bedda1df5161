package systemtest_test

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	statements "github.com/pgxlock/pgxlock/sql"
)

// What sql/advisory/lock_session.sql makes of a session: one whose locks the server frees
// a TTL after its client fell silent.

// lockSession opens a session that holds the advisory lock of that number for a
// TTL, which begins last, and says when its last request was sent.
func lockSession(t *testing.T, url string, ttl time.Duration, key int64) (conn *pgx.Conn, sent time.Time) {
	t.Helper()
	conn = pgtest.Connect(t, url)
	if _, err := conn.Exec(t.Context(), "select pg_advisory_lock($1)", key); err != nil {
		t.Fatal(err)
	}
	sent = time.Now()
	if _, err := conn.Exec(t.Context(), statements.AdvisoryLockSession.Text(), ttl.Milliseconds(), conn.PgConn().PID()); err != nil {
		t.Fatal(err)
	}
	return conn, sent
}

// heldLocks returns the numbers of the advisory locks that are held.
func heldLocks(t *testing.T, watch *pgx.Conn) map[int64]bool {
	t.Helper()
	rows, err := watch.Query(t.Context(), "select objid::bigint from pg_locks where locktype = 'advisory' and granted")
	if err != nil {
		t.Fatal(err)
	}
	keys, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		t.Fatal(err)
	}
	held := make(map[int64]bool)
	for _, key := range keys {
		held[key] = true
	}
	return held
}

// wireMessage makes a message of the protocol.
func wireMessage(kind byte, body string) string {
	return string(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4))) + body
}

// extended makes the messages that run a statement, without the Sync at their end.
func extended(sql string) string {
	return wireMessage('P', "\x00"+sql+"\x00\x00\x00") + wireMessage('B', strings.Repeat("\x00", 8)) + wireMessage('E', "\x00\x00\x00\x00\x00")
}

func TestServerEndsALockSessionThatFellSilentWhateverItWasDoing(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const (
		ttl           = 3 * time.Second // a busy machine may take long between two messages
		taken, lasts  = 100, 101
		stillBelieved = ttl - ttl/10 // from the request on
	)
	for name, cut := range map[string]bool{"because its network is cut": true, "because its client is frozen": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := pgtest.Remote(t, pgserver.Config{})
			watch := pgtest.Connect(t, server.URL("postgres"))
			lockSession(t, server.URL("postgres"), 0, taken)
			lockSession(t, server.TCPURL("postgres"), 0, lasts)
			var transactionTimeout bool
			const since17 = "select current_setting('transaction_timeout', true) is not null"
			if err := watch.QueryRow(t.Context(), since17).Scan(&transactionTimeout); err != nil {
				t.Fatal(err)
			}
			tcp := cut && server.Packets // a frozen client's kernel goes on answering
			type held struct {
				after string
				sent  time.Time
			}
			sessions := make(map[int64]held)
			for _, last := range []struct {
				after, says string
				ends        bool
			}{
				{"nothing", "", true},
				{"a statement", wireMessage('Q', "select pg_sleep(600)\x00"), true},
				{"a wait for a lock", wireMessage('Q', "select pg_advisory_lock(100)\x00"), true},
				{"an open transaction", wireMessage('Q', "begin\x00"), true},
				{"the beginning of a message", wireMessage('Q', "select 1\x00")[:3], true},
				{"the greater part of one", wireMessage('Q', "select 1\x00")[:10], true},
				{"what has a long answer", wireMessage('Q', "select repeat('x', 1000) from generate_series(1, 1000000)\x00"), server.Packets},
				{"an Execute without Sync", extended("select 1"), tcp || transactionTimeout},
				{"a long Execute without Sync", extended("select pg_sleep(600)"), tcp},
				{"a wrong Execute without Sync", extended("select 1 / 0"), tcp},
			} {
				if !last.ends {
					continue
				}
				key := int64(len(sessions))
				conn, sent := lockSession(t, server.TCPURL("postgres"), ttl, key)
				if _, err := conn.PgConn().Conn().Write([]byte(last.says)); err != nil {
					t.Logf("this machine stood still until the session was over, before %s: %v", last.after, err)
				}
				sessions[key] = held{last.after, sent}
			}
			if cut {
				server.Cut(t)
			}
			defer func() {
				for _, session := range sessions {
					t.Logf("after %s it keeps its lock", session.after)
				}
			}()
			pgtest.Until(t, "no session keeps its lock", func() bool {
				locks := heldLocks(t, watch)
				for key, session := range sessions {
					if locks[key] {
						continue
					}
					if believed := time.Until(session.sent.Add(stillBelieved)); believed > 0 {
						t.Errorf("after %s it lost its lock while the client believes in it for %s", session.after, believed)
					}
					delete(sessions, key)
				}
				return len(sessions) == 0
			})
			if locks := heldLocks(t, watch); !locks[taken] || !locks[lasts] {
				t.Error("without a TTL a lock was freed")
			}
		})
	}
}

func TestLockSessionIsSetUpInAHostileSearchPath(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, `
		create schema hostile;
		create function hostile.trap(int, int) returns int language plpgsql as 'begin raise ''trapped''; end';
		create function hostile.believed(int, int) returns bool language plpgsql as 'begin raise ''trapped''; end';
		create operator hostile.- (leftarg = int, rightarg = int, function = hostile.trap);
		create operator hostile.> (leftarg = int, rightarg = int, function = hostile.believed);
		create operator hostile.= (leftarg = int, rightarg = int, function = hostile.believed);
		create domain hostile.int4 as text check (false);
		create domain hostile.text as int check (false)`)
	conn := db.Connect(t)
	const settings = "select current_setting('search_path'), current_setting('idle_session_timeout')"
	for ttl, want := range map[time.Duration]string{30 * time.Second: "30s", 0: "0", 1<<31*time.Millisecond - time.Millisecond: "2147483647ms"} {
		if _, err := conn.Exec(t.Context(), "set search_path = hostile, pg_catalog; set idle_session_timeout = '1h'"); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), statements.AdvisoryLockSession.Text(), ttl.Milliseconds(), conn.PgConn().PID()); err != nil {
			t.Fatal(err)
		}
		var path, idle string
		if err := conn.QueryRow(t.Context(), settings).Scan(&path, &idle); err != nil {
			t.Fatal(err)
		}
		if path != "pg_catalog, pg_temp" || idle != want {
			t.Errorf("search_path %s, idle_session_timeout %s; want pg_catalog, pg_temp and %s", path, idle, want)
		}
	}
}
