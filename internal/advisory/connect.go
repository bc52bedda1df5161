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

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// connect opens the lock session. It refuses servers and poolers where advisory locks would
// exclude no other session.
func (a *Locks) connect() (*session, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dbconn.Timeout)
	defer cancel()
	conn, err := a.dialer.Dial(ctx, dbconn.Timeout, func(*pgconn.Notice) {})
	if err != nil {
		return nil, dbconn.NoAnswer(err)
	}
	s, err := a.setUp(ctx, conn)
	if err != nil {
		dbconn.CloseQuietly(conn)
		if lockerr.SQLState(err) == lockerr.StateNoStatement { // a statement was parsed in one backend and executed in another one
			err = fmt.Errorf("%w: %w", lockerr.ErrPooler, err)
		}
		return nil, dbconn.NoAnswer(err)
	}
	if a.place.Installed() {
		a.reaping.Start()
	}
	return s, nil
}

func (a *Locks) setUp(ctx context.Context, conn *pgx.Conn) (*session, error) {
	q := dbconn.Querier{Conn: conn}
	backend, _, err := dbconn.WhoServes(ctx, q) // before any setting, which a pooler would pass on to other clients
	if err != nil {
		return nil, err
	}
	if !backend.Serves(conn) {
		if err := a.mayPool(ctx, backend); err != nil {
			return nil, err
		}
		a.unfinished = dbconn.Backend{} // the pooler has reset it, and other clients may use it by now
	}
	// This is the place for Find, while search_path is still the role's. Only tokens need what it
	// finds.
	err = dbconn.Outlast(ctx, func() error { return a.place.Find(ctx, q) })
	if err != nil && (a.cfg.Tokens || a.cfg.Schema != "" || !errors.Is(err, lockerr.ErrSchema) && !lockerr.Refused(err)) {
		return nil, err
	}
	var set pgconn.CommandTag
	err = dbconn.Outlast(ctx, func() (err error) {
		set, err = conn.Exec(ctx, statements.AdvisoryLockSession.Text(), q.Args([]any{a.ttl.Milliseconds(), backend.PID})...)
		return err
	})
	switch {
	case err != nil && !lockerr.Refused(err):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("the server refuses a setting that AdvisoryConfig.TTL needs; a negative TTL does without: %w", err)
	case set.RowsAffected() == 0:
		return nil, dbconn.SwitchedBackend(backend.PID, "another one")
	}
	if err := a.unfinished.End(ctx, q); err != nil {
		return nil, err
	}
	if backend.Serves(conn) {
		a.unfinished = backend
	}

	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	own := int64(binary.BigEndian.Uint64(random[:]))
	place, err := dbconn.ProbeAdvisory(ctx, q, backend, lockkey.SessionKey(own))
	if err != nil {
		return nil, err
	}
	if !place.Keeps {
		return nil, fmt.Errorf("the server grants advisory locks and does not keep them, like some engines that speak PostgreSQL's protocol; use NewLeaseLocker: %w", errors.ErrUnsupported)
	}
	if place.Silence != a.ttl.Milliseconds() {
		return nil, fmt.Errorf("the server does not keep idle_session_timeout = %d ms, but %d ms; a negative AdvisoryConfig.TTL asks for none: %w", a.ttl.Milliseconds(), place.Silence, errors.ErrUnsupported)
	}
	s := &session{
		conn: conn, net: conn.PgConn().Conn(), writer: conn.PgConn().Conn(), frontend: conn.PgConn().Frontend(),
		session: own, backend: backend.PID,
		many: textAround(statements.AdvisoryBatch, own), patience: dbconn.Timeout,
	}
	if a.ttl > 0 {
		s.patience = min(dbconn.Timeout, a.ttl/3)
	}
	if runtime.GOMAXPROCS(0) > 1 { // with one processor a leader that looks keeps it from the server or from the callers
		s.readable = dbconn.Readable(s.net)
	}
	prepare := []statements.Name{statements.AdvisoryPrepareHolders, statements.AdvisoryPrepare}
	switch {
	case a.cfg.Tokens:
		prepare[1] = statements.AdvisoryPrepareToken
	case backend.Serves(conn) && dbconn.EndsInBackend(s.net, backend.PID, place.Client, place.Server):
		if s.functions, err = findFunctions(ctx, q); err != nil {
			return nil, err
		}
	}
	for _, name := range prepare {
		s.made = a.mux.clock()
		text := strings.ReplaceAll(ofSession(a.place.Statement(name), own), "/* backend */", strconv.Itoa(int(backend.PID)))
		if _, err := conn.PgConn().Exec(ctx, text).ReadAll(); err != nil {
			return nil, err
		}
	}

	if a.place.Installed() {
		a.host.Queue.Listen(backend.PID)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.session = own
	a.holder, a.pid = fmt.Sprintf("%s:%d", a.cfg.Owner, backend.PID), backend.PID
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
	return a.dialer.KeepsBackend(ctx, backend)
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
