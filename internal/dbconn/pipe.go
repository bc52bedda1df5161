package dbconn

import (
	"context"
	"io"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// withDeadlines returns a dial function whose connections have deadlines. Those of an SSH
// client refuse them: every bound on an exchange, and all that interrupts a wait, needs them.
func withDeadlines(dial pgconn.DialFunc) pgconn.DialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil || conn.SetDeadline(time.Time{}) == nil {
			return conn, err
		}
		ours, theirs := net.Pipe()
		go pass(theirs, conn)
		go pass(conn, theirs)
		return &piped{ours, conn}, nil
	}
}

// pass passes on what is read from one connection to the other, until one of them ends.
func pass(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.Close()
	_ = from.Close()
}

// A piped connection has the deadlines of a pipe, and the two ends of the connection behind it.
type piped struct {
	net.Conn
	behind net.Conn
}

func (p *piped) LocalAddr() net.Addr  { return p.behind.LocalAddr() }
func (p *piped) RemoteAddr() net.Addr { return p.behind.RemoteAddr() }

// Close also ends what is being written behind the pipe.
func (p *piped) Close() error {
	_ = p.behind.Close()
	return p.Conn.Close()
}
