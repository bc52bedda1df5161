package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// eachRemote runs a test on each kind of network that this machine can have.
func eachRemote(t *testing.T, test func(t *testing.T, server *RemoteServer)) {
	t.Parallel()
	for name, make := range map[string]func(testing.TB, pgserver.Config) *RemoteServer{"best": Remote, "relay": relayed} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, make(t, pgserver.Config{}))
		})
	}
}

// heldBy opens a session that holds the advisory lock of that number.
func heldBy(t *testing.T, url string, key int64, idle string) *pgx.Conn {
	t.Helper()
	conn := Connect(t, url)
	for sql, arg := range map[string]any{"select set_config('idle_session_timeout', $1, false)": idle, "select pg_advisory_lock($1)": key} {
		if _, err := conn.Exec(t.Context(), sql, arg); err != nil {
			t.Fatal(err)
		}
	}
	return conn
}

func isHeld(t *testing.T, watch *pgx.Conn, key int64) (held bool) {
	t.Helper()
	const look = "select exists (select from pg_locks where locktype = 'advisory' and objid::bigint = $1)"
	if err := watch.QueryRow(t.Context(), look, key).Scan(&held); err != nil {
		t.Fatal(err)
	}
	return held
}

// waitsFor says whether somebody waits for the advisory lock of that number.
func waitsFor(t *testing.T, watch *pgx.Conn, key int64) (waits bool) {
	t.Helper()
	const look = "select exists (select from pg_locks where locktype = 'advisory' and objid::bigint = $1 and not granted)"
	if err := watch.QueryRow(t.Context(), look, key).Scan(&waits); err != nil {
		t.Fatal(err)
	}
	return waits
}

func untilFree(t *testing.T, watch *pgx.Conn, key int64) {
	t.Helper()
	for deadline := time.Now().Add(Patience); isHeld(t, watch, key); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("lock %d is still held", key)
		}
	}
}

func TestOnlyATimeoutFreesALockBehindACutNetwork(t *testing.T) {
	Long(t)
	eachRemote(t, func(t *testing.T, server *RemoteServer) {
		const leased, forever, closed, gate = 1, 2, 3, 4
		watch := Connect(t, server.URL("postgres"))
		through := server.TCPURL("postgres")
		leasing := heldBy(t, through, leased, "0")
		heldBy(t, through, forever, "0")
		gone := heldBy(t, through, closed, "0")

		// It begins to be idle when the network is cut.
		lock := func(sql string) {
			t.Helper()
			if _, err := watch.Exec(t.Context(), sql, gate); err != nil {
				t.Fatal(err)
			}
		}
		lock("select pg_advisory_lock($1)")
		leasing.PgConn().Frontend().Send(&pgproto3.Query{String: fmt.Sprintf("set idle_session_timeout = '200ms'; select pg_advisory_lock(%d)", gate)})
		if err := leasing.PgConn().Frontend().Flush(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(Patience); !waitsFor(t, watch, gate); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("it does not wait")
			}
		}
		server.Cut(t)
		lock("select pg_advisory_unlock($1)")
		ended := leasing.PgConn().Conn()
		_ = gone.Close(t.Context()) // its goodbye is lost like all else
		untilFree(t, watch, leased)
		if !isHeld(t, watch, forever) {
			t.Error("a session without a timeout lost its lock")
		}
		if !isHeld(t, watch, closed) {
			t.Error("the server has heard through the cut network that a connection was closed")
		}
		_ = ended.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		if n, err := ended.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the client has heard through the cut network that its session ended: %d bytes, %v", n, err)
		}
		server.Heal(t)
		untilFree(t, watch, closed) // it is repeated, and arrives
		if !isHeld(t, watch, forever) {
			t.Error("a connection did not outlive the cut")
		}
	})
}

func TestCutNetworkRefusesNothing(t *testing.T) {
	Long(t)
	eachRemote(t, func(t *testing.T, server *RemoteServer) {
		conn := Connect(t, server.TCPURL("postgres"))
		server.Cut(t)
		for what, try := range map[string]func(context.Context) error{
			"a query": conn.Ping,
			"a new connection": func(ctx context.Context) error {
				_, err := pgx.Connect(ctx, server.TCPURL("postgres"))
				return err
			},
		} {
			// Longer than it takes a kernel to find that nobody answers to an address.
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
			if err := try(ctx); !pgconn.Timeout(err) {
				t.Errorf("%s ended otherwise than by its own patience: %v", what, err)
			}
			cancel()
		}
		server.Heal(t)
		if err := Connect(t, server.TCPURL("postgres")).Ping(t.Context()); err != nil {
			t.Errorf("the network does not heal: %v", err)
		}
	})
}
