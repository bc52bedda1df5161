//go:build unix

package main

import (
	"context"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// starting returns a connection string of a server that says so often that it is starting, and
// how many connections it has had.
func starting(t *testing.T, db *pgtest.DB, times int32) (connString string, connections *atomic.Int32) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	target := db.Pool.Config().ConnConfig
	network, address := pgconn.NetworkAddress(target.Host, target.Port)
	connections = new(atomic.Int32)
	ctx, end := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	t.Cleanup(func() {
		end()
		_ = listener.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			nth := connections.Add(1)
			serving.Go(func() {
				defer context.AfterFunc(ctx, func() { _ = client.Close() })()
				defer client.Close()
				if nth <= times {
					backend := pgproto3.NewBackend(client, client)
					if _, err := backend.ReceiveStartupMessage(); err == nil {
						backend.Send(&pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P03", Message: "the database system is starting up"})
						_ = backend.Flush()
					}
					return
				}
				server, err := net.Dial(network, address)
				if err != nil {
					return
				}
				defer context.AfterFunc(ctx, func() { _ = server.Close() })()
				serving.Go(func() {
					_, _ = io.Copy(server, client)
					_ = server.Close()
				})
				_, _ = io.Copy(client, server)
			})
		}
	})
	where := url.URL{Scheme: "postgres", User: url.UserPassword(target.User, target.Password), Host: listener.Addr().String(), Path: target.Database, RawQuery: "sslmode=disable"}
	return where.String(), connections
}

func TestRunWaitsForAServerThatIsStarting(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for _, kind := range []string{"lease", "advisory"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			connString, connections := starting(t, db, 3)
			env := []string{"DATABASE_URL=" + connString}
			execute(t, env, "run", "--kind", kind, "k", "--", "true").want(t, exitUnavailable, "", "starting up")
			if n := connections.Load(); n != 1 {
				t.Errorf("without --wait: %d attempts, want 1", n)
			}
			execute(t, env, "run", "--kind", kind, "-w", "1h", "k:"+kind, "--", "echo", "done").want(t, exitOK, "done\n", "")
		})
	}
}

func TestRunWaitsNoLongerThanToldForAServerThatIsStarting(t *testing.T) {
	t.Parallel()
	connString, _ := starting(t, pgtest.New(t), 1<<30)
	execute(t, []string{"DATABASE_URL=" + connString}, "run", "-w", "500ms", "k", "--", "true").want(t, exitUnavailable, "", "tried ")
}
