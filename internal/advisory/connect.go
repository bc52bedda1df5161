package advisory

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// connect opens the lock session. It refuses servers and poolers where advisory locks would
// exclude no other session. If ctx is cancelled, it returns [lockerr.ErrClosed].
func (a *Locks) connect(ctx context.Context) (*session, error) {
	var s *session
	_, err := a.attempts.Connect(ctx, dbconn.Dial{Place: &a.place}, func(ctx context.Context, c *dbconn.Conn) (err error) {
		s, err = a.setUp(ctx, c)
		if lockerr.SQLState(err) == lockerr.StateNoStatement { // a statement was parsed in one backend and executed in another one
			err = fmt.Errorf("%w: %w", lockerr.ErrPooler, err)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if a.place.Installed() {
		a.reaping.Start()
	}
	return s, nil
}

func (a *Locks) setUp(ctx context.Context, c *dbconn.Conn) (*session, error) {
	if !c.Direct() {
		if err := a.mayPool(ctx, c.Backend); err != nil {
			return nil, err
		}
		a.unfinished = dbconn.Backend{} // the pooler has reset it, and other clients may use it by now
	}
	var own int64
	var made time.Duration
	answers, err := c.Own(ctx, dbconn.Own{
		Place: &a.place, Lazy: !a.cfg.Tokens && a.cfg.Schema == "", // only tokens need it
		Session: dbconn.Step{SQL: statements.AdvisoryLockSession.Text(), Args: []any{a.ttl.Milliseconds(), c.PID}},
		Old:     a.unfinished,
		Then: func(schema string) []dbconn.Step {
			var random [8]byte
			_, _ = rand.Read(random[:]) // never fails
			own, made = int64(binary.BigEndian.Uint64(random[:])), a.mux.clock()
			batch := statements.AdvisoryPrepare
			if a.cfg.Tokens {
				batch = statements.AdvisoryPrepareToken
			}
			steps := []dbconn.Step{c.AdvisoryProbe(lockkey.SessionKey(own)), {SQL: statements.AdvisoryFunctions.Text()}}
			for _, name := range []statements.Name{statements.AdvisoryPrepareHolders, batch} {
				text := strings.ReplaceAll(ofSession(name.In(schema), own), "/* backend */", strconv.Itoa(int(c.PID)))
				steps = append(steps, dbconn.Step{SQL: text})
			}
			return steps
		},
	})
	switch {
	case errors.Is(err, dbconn.ErrSettings):
		return nil, fmt.Errorf("the server refuses a setting that AdvisoryConfig.TTL needs; a negative TTL does without: %w", err)
	case err != nil:
		return nil, err
	}
	if c.Direct() {
		a.unfinished = c.Backend
	}
	place, err := c.ReadProbe(answers[0])
	if err != nil {
		return nil, err
	}
	if !place.Keeps {
		return nil, lockerr.NoLocks(dbconn.Engine(c.PgConn()))
	}
	if place.Silence != a.ttl.Milliseconds() {
		return nil, fmt.Errorf("the server does not keep idle_session_timeout = %d ms, but %d ms; a negative AdvisoryConfig.TTL asks for none: %w", a.ttl.Milliseconds(), place.Silence, errors.ErrUnsupported)
	}
	conn := c.PgConn()
	s := &session{
		conn: c.Conn, net: conn.Conn(), writer: conn.Conn(), frontend: conn.Frontend(),
		session: own, backend: c.PID, made: made,
		many: textAround(statements.AdvisoryBatch, own), patience: dbconn.Timeout,
	}
	if a.ttl > 0 {
		s.patience = min(dbconn.Timeout, a.ttl/3)
	}
	if runtime.GOMAXPROCS(0) > 1 { // with one processor a leader that looks keeps it from the server or from the callers
		s.readable = dbconn.Readable(s.net)
	}
	if !a.cfg.Tokens && c.Direct() && dbconn.EndsInBackend(s.net, c.PID, place.Client, place.Server) {
		if s.functions, err = readFunctions(c.TypeMap(), answers[1]); err != nil {
			return nil, err
		}
	}
	if a.place.Installed() {
		a.host.Queue.Listen(c.PID)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.place.CheckMoved(c); err != nil { // moved has not seen this session
		return nil, err
	}
	a.session = own
	a.end = func() { _ = conn.Conn().Close() }
	a.holder, a.pid = fmt.Sprintf("%s:%d", a.cfg.Owner, c.PID), c.PID
	if a.cfg.MaxLocks == 0 {
		a.room = max(int(min(place.Capacity/10, defaultMaxLocks)), 1)
	}
	return s, nil
}

// mayPool returns an error unless a connection through a pooler can hold locks: a pooler that
// switches the server connection after each transaction cannot. backend serves a connection
// that is idle now.
func (a *Locks) mayPool(ctx context.Context, backend dbconn.Backend) error {
	if !a.cfg.SessionPooler {
		return fmt.Errorf("%w: backend %d answers, not the one that opened the connection; connect to the server itself, set AdvisoryConfig.SessionPooler if the pooler is in session mode, or use NewLeaseLocker", lockerr.ErrPooler, backend.PID)
	}
	return a.attempts.KeepsBackend(ctx, backend)
}

// textAround returns the three parts of a statement around the requests and their locks.
func textAround(name statements.Name, session int64) [3]string {
	start, rest, ok := strings.Cut(ofSession(name.Text(), session), "/* what */")
	middle, end, ok2 := strings.Cut(rest, "/* keys */")
	if !ok || !ok2 {
		panic("pgxlock: sql/" + string(name) + ".sql lacks a place")
	}
	return [3]string{start, middle, end}
}

// ofSession returns a statement for the session with that number. The names of prepared
// statements contain the number, so that no other session behind a pooler has them.
func ofSession(text string, session int64) string {
	return strings.ReplaceAll(text, "/* session */", strconv.FormatInt(session, 10))
}
