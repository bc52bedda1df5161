package dbconn

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// A deadline is the context of one exchange. The socket has the same deadline, so that nothing
// has to watch the context, which would cost a fifth of the exchange of a lone caller. Nothing
// but the time ends it, and its Done is nil.
type deadline struct {
	context.Context // for its values: none
	until           time.Time
}

func newDeadline(left time.Duration) *deadline {
	return &deadline{context.Background(), time.Now().Add(left)}
}

func (d *deadline) Deadline() (time.Time, bool) { return d.until, true }

// Err tells what the socket's timeout was.
func (d *deadline) Err() error {
	if time.Now().Before(d.until) {
		return nil
	}
	return context.DeadlineExceeded
}

// guard gives the deadline to the socket of a connection. It stays there, because whatever uses
// the socket next sets its own. It fails only on a closed socket, as the exchange does then.
func (d *deadline) guard(conn *pgx.Conn) { _ = conn.PgConn().Conn().SetDeadline(d.until) }
