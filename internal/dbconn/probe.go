package dbconn

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"

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

// ProbeAdvisory acquires the session's own lock, the key by which others see that it lives,
// in that backend. If another backend answers, it returns [lockerr.ErrPooler], and nothing
// is acquired.
func ProbeAdvisory(ctx context.Context, q Querier, backend Backend, key int64) (p AdvisoryProbe, err error) {
	var pid int32
	err = q.Row(ctx, statements.AdvisoryProbe.Text(), key, backend.PID).
		Scan(&pid, &p.Keeps, &p.Capacity, &p.Silence, &p.Client.Host, &p.Client.Port, &p.Server.Host, &p.Server.Port)
	if err == nil && pid != backend.PID {
		err = SwitchedBackend(backend.PID, pid)
	}
	return p, err
}

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
