// Package dbconn makes connections of the package's own to PostgreSQL, which survive
// poolers, failovers and the settings of a role.
//
//	Dialer        connects to the primary
//	Session       one connection, made again when it breaks; it ends the old backend first
//	Querier       sends a statement as the connection, or the pooler behind it, allows
//	Installation  where in the database the tables and functions are
//	Endpoint      proves that a connection ends in a backend, with no proxy in between
//	Readable      looks, without waiting, whether an answer has come
//
// The mutex of a Session is held during an exchange, and before that of an Installation.
//
// The package exports more than 25 names because every room that asks the server uses the
// parts alone: a lock session dials and proves, a batch asks, the doctor looks at all.
package dbconn

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// A Dialer makes connections as the caller's pool makes its own, but it takes none from the
// pool and gives none to it: neither an exhausted pool nor the settings of a role can cost
// a lock.
type Dialer struct {
	Name   string // the application_name, unless Config has one
	Config *pgxpool.Config
}

// Dial connects to the primary, within patience, and passes notices to listen. The hooks of
// the caller's pool run before our settings, which therefore win.
func (d *Dialer) Dial(ctx context.Context, patience time.Duration, listen func(*pgconn.Notice)) (*pgx.Conn, error) {
	config := d.Config.ConnConfig.Copy()
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = d.Name
	}
	if d.Config.BeforeConnect != nil {
		if err := d.Config.BeforeConnect(ctx, config); err != nil {
			return nil, fmt.Errorf("the pool's BeforeConnect: %w", err)
		}
	}
	config.ValidateConnect = both(requirePrimary, config.ValidateConnect) // a standby is called one, whatever target_session_attrs asks for
	config.OnNotification = nil                                           // theirs would get ours, and we none
	theirs := config.OnNotice
	config.OnNotice = func(conn *pgconn.PgConn, notice *pgconn.Notice) {
		listen(notice)
		if theirs != nil {
			theirs(conn, notice)
		}
	}
	config.StatementCacheCapacity = max(config.StatementCacheCapacity, 16)
	// Of several hosts a silent one must leave time for the others.
	share := patience / time.Duration(len(config.Fallbacks)+2)
	if config.ConnectTimeout <= 0 || config.ConnectTimeout > share {
		config.ConnectTimeout = share
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, d.noPrimary(err)
	}
	if d.Config.AfterConnect != nil {
		if err := d.Config.AfterConnect(ctx, conn); err != nil {
			CloseQuietly(conn)
			return nil, fmt.Errorf("the pool's AfterConnect: %w", err)
		}
	}
	return conn, nil
}

// noPrimary makes err, which is why no server was found, lockerr.ErrUnavailable as well if there are
// several hosts and the best that was found is a standby: another one may be promoted, or
// come back. One host that is a standby is not the place to connect to.
func (d *Dialer) noPrimary(err error) error {
	if !errors.Is(err, lockerr.ErrReadOnly) || lockerr.Denied(err) {
		return err
	}
	first := d.Config.ConnConfig
	for _, other := range first.Fallbacks { // there may be one for each host without TLS
		if other.Host != first.Host || other.Port != first.Port {
			return fmt.Errorf("%w: none of the hosts is a primary now: %w", lockerr.ErrUnavailable, err)
		}
	}
	return err
}

// Backend names a server process for good: a pid alone is used again.
type Backend struct {
	PID     int32
	started int64 // microseconds since 1970; 0: not known
}

// WhoServes returns the server process at the other end, and whether the role's
// transactions are READ COMMITTED and READ WRITE by default, as ours must be.
func WhoServes(ctx context.Context, q Querier) (b Backend, asOurs bool, err error) {
	err = Outlast(ctx, func() error {
		return q.Row(ctx, statements.ConnBackend.Text()).Scan(&b.PID, &b.started, &asOurs)
	})
	return b, asOurs, err
}

// Outlast asks again, up to ten times, what the role's statement_timeout ended. We may set
// another timeout only once we know whose connection it is, and a busy server may need
// longer for the first statements of a connection.
func Outlast(ctx context.Context, ask func() error) error {
	for again := 10; ; again-- {
		if err := ask(); lockerr.SQLState(err) != lockerr.StateCanceled || ctx.Err() != nil || again == 0 {
			return err
		}
	}
}

// Prepare makes a connection of our own fit for its work, whatever the role is set to, and
// finds the schema. async: as in [Session].
func Prepare(ctx context.Context, q Querier, place *Installation, async bool) error {
	const local = false
	if err := Outlast(ctx, func() error { return q.Exec(ctx, statements.ConnSession.Text(), local) }); err != nil {
		return err
	}
	if async {
		if err := q.Exec(ctx, statements.ConnAsync.Text(), local); err != nil {
			return err
		}
	}
	if err := place.Find(ctx, q); err != nil { // while search_path is still the role's
		return err
	}
	return q.Exec(ctx, statements.ConnSearchPath.Text(), local)
}

// Serves reports whether the process is the one that the server announced when the
// connection was made. Behind a pooler it is another one.
func (b Backend) Serves(conn *pgx.Conn) bool { return uint32(b.PID) == conn.PgConn().PID() }

// End makes sure that the process no longer runs anything.
func (b Backend) End(ctx context.Context, q Querier) error {
	if b.started == 0 {
		return nil
	}
	ended := true // there is no row if it has ended already
	err := q.Row(ctx, statements.EvictTerminate.Text(), b.PID, b.started).Scan(&ended)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("end the backend of the broken connection: %w", err)
	}
	if !ended {
		return fmt.Errorf("the backend of the broken connection, pid %d, does not end", b.PID)
	}
	return nil
}

// KeepsBackend returns [lockerr.ErrPooler] if the pooler in between gives the backend of a
// connection that is idle now to another one.
func (d *Dialer) KeepsBackend(ctx context.Context, backend Backend) error {
	second, err := d.Dial(ctx, Timeout, func(*pgconn.Notice) {})
	if err != nil {
		return fmt.Errorf("check whether the pooler is in session mode: %w", err)
	}
	defer CloseQuietly(second)
	other, _, err := WhoServes(ctx, Querier{Conn: second})
	if err != nil {
		return fmt.Errorf("check whether the pooler is in session mode: %w", err)
	}
	if other.PID == backend.PID {
		return fmt.Errorf("%w: two connections share backend %d, so the pooler is not in session mode", lockerr.ErrPooler, backend.PID)
	}
	return nil
}

// CancelledReplication reports whether a notice says that the wait for a synchronous
// standby was cancelled. We recognise it by the routine that raises it: many warnings have
// its code, and its text is translated.
func CancelledReplication(notice *pgconn.Notice) bool { return notice.Routine == "SyncRepWaitForLSN" }

// CloseQuietly closes the connection; the server may already be gone.
func CloseQuietly(conn *pgx.Conn) {
	_ = conn.PgConn().Conn().SetDeadline(time.Time{}) // of the last exchange
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// requirePrimary refuses a standby while the address is still being chosen, so
// that a connection string with several hosts leads to the primary.
func requirePrimary(ctx context.Context, conn *pgconn.PgConn) error {
	var result *pgconn.Result
	err := Outlast(ctx, func() error {
		result = conn.ExecParams(ctx, statements.ConnPrimary.Text(), nil, nil, nil, nil).Read()
		return result.Err
	})
	if err != nil {
		return err
	}
	if len(result.Rows) != 1 || len(result.Rows[0]) != 1 {
		return errors.New("the server does not say whether it is a standby")
	}
	if string(result.Rows[0][0]) != "f" {
		return fmt.Errorf("%w: the server is in recovery", lockerr.ErrReadOnly)
	}
	return nil
}

// both runs our check of a new connection, and then the caller's, if any.
func both(ours, theirs pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
	if theirs == nil {
		return ours
	}
	return func(ctx context.Context, conn *pgconn.PgConn) error {
		if err := ours(ctx, conn); err != nil {
			return err
		}
		return theirs(ctx, conn)
	}
}

// ApplicationName is the application_name of a Locker's connections unless the pool's
// configuration has one. The server keeps 63 bytes.
func ApplicationName(owner string) string { return fmt.Sprintf("pgxlock %.50s", owner) }
