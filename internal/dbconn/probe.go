package dbconn

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// ErrUnheard means that a notification that a connection sent to itself did not arrive.
var ErrUnheard = errors.New("a notification did not arrive")

// An AdvisoryProbe is what a backend says of itself before it may hold advisory locks.
type AdvisoryProbe struct {
	Keeps          bool     // it keeps what it grants
	Capacity       int64    // how many locks the server has room for, at least
	Silence        int64    // idle_session_timeout in milliseconds
	Client, Server Endpoint // of the connection
}

// AdvisoryProbe is the statement that acquires the session's own lock, the key by which others
// see that it lives, in the backend of the connection. If another one answers, nothing is
// acquired.
func (c *Conn) AdvisoryProbe(key int64) Step {
	return Step{SQL: statements.AdvisoryProbe.Text(), Args: []any{key, c.PID}}
}

// ReadProbe reads the answer. If another backend answered, it returns [lockerr.ErrPooler].
func (c *Conn) ReadProbe(answer *pgconn.Result) (p AdvisoryProbe, err error) {
	var pid int32
	err = ScanRow(c.TypeMap(), answer, &pid, &p.Keeps, &p.Capacity, &p.Silence, &p.Client.Host, &p.Client.Port, &p.Server.Host, &p.Server.Port)
	if err == nil && pid != c.PID {
		err = SwitchedBackend(c.PID, pid)
	}
	return p, err
}

// ProbeAdvisory probes a connection on which nothing is set.
func (c *Conn) ProbeAdvisory(ctx context.Context, key int64) (AdvisoryProbe, error) {
	const local = true
	results, _, err := pipeline(ctx, c.PgConn(), c.TypeMap(), []Step{{SQL: statements.ConnSearchPath.Text(), Args: []any{local}}, c.AdvisoryProbe(key)})
	if err != nil {
		return AdvisoryProbe{}, err
	}
	return c.ReadProbe(results[1])
}

// Keeps reports whether the backend that answered first still serves the connection.
func (c *Conn) Keeps(ctx context.Context) (bool, error) {
	now := Conn{Conn: c.Conn}
	err := now.identify(ctx, c.PgConn(), nil)
	return now.PID == c.PID, err
}

// Engine names a server that says at connect that it is no PostgreSQL; "" for any other.
func Engine(conn *pgconn.PgConn) string { return conn.ParameterStatus("crdb_version") }

// SwitchedBackend returns the error of a session that another backend answers for.
func SwitchedBackend(was int32, now any) error {
	return fmt.Errorf("%w: the backend was %d and now is %v", lockerr.ErrPooler, was, now)
}

// RandomID returns a random number above 0, which no other process has.
func RandomID() int64 {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	return int64(binary.BigEndian.Uint64(random[:])>>1) | 1
}
