package pgxlock

import (
	"errors"
	"net"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// A server that stops at once says why in a warning, and then nothing more.
func TestTheLastWarningOfAServerIsWhyTheSessionEnded(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"57P01", "57P02", "57P04", "57P05", "25P03", "25P04"} {
		for name, read := range map[string]func(*lockConn) error{
			"idle":               (*lockConn).listen,
			"during an exchange": func(c *lockConn) error { return c.receive(&message{}) },
		} {
			client, server := net.Pipe()
			go func() {
				backend := pgproto3.NewBackend(server, server)
				backend.Send(&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: "01000", Message: "something else"})
				backend.Send(&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: code, Message: "terminating connection"})
				_ = backend.Flush()
				_ = server.Close()
			}()
			err := read(&lockConn{net: client, frontend: pgproto3.NewFrontend(client, client)})
			if warning, ok := errors.AsType[*pgconn.PgError](err); !ok || warning.Code != code {
				t.Errorf("%s: %v, want SQLSTATE %s", name, err, code)
			}
			_ = client.Close()
		}
	}
}
