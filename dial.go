package pgxlock

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

// A dialer makes connections of our own: as the caller's pool makes its own, but
// never from it and never given to it, so that neither an exhausted pool nor the
// settings of a role can cost a lock.
type dialer struct {
	name   string // the application_name, unless the configuration has one
	config *pgxpool.Config
}

// dial connects to the primary, within patience, and tells notices to listen. The
// caller's hooks come first, so that settings of ours stand.
func (d *dialer) dial(ctx context.Context, patience time.Duration, listen func(*pgconn.Notice)) (*pgx.Conn, error) {
	config := d.config.ConnConfig.Copy()
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = d.name
	}
	if d.config.BeforeConnect != nil {
		if err := d.config.BeforeConnect(ctx, config); err != nil {
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
	if d.config.AfterConnect != nil {
		if err := d.config.AfterConnect(ctx, conn); err != nil {
			closeQuietly(conn)
			return nil, fmt.Errorf("the pool's AfterConnect: %w", err)
		}
	}
	return conn, nil
}

// noPrimary makes err, which is why no server was found, lockerr.ErrUnavailable as well if there are
// several hosts and the best that was found is a standby: another one may be promoted, or
// come back. One host that is a standby is not the place to connect to.
func (d *dialer) noPrimary(err error) error {
	if !errors.Is(err, lockerr.ErrReadOnly) || lockerr.Denied(err) {
		return err
	}
	first := d.config.ConnConfig
	for _, other := range first.Fallbacks { // there may be one for each host without TLS
		if other.Host != first.Host || other.Port != first.Port {
			return fmt.Errorf("%w: none of the hosts is a primary now: %w", lockerr.ErrUnavailable, err)
		}
	}
	return err
}

// backendID names a server process for good: a pid alone is used again.
type backendID struct {
	pid     int32
	started int64 // microseconds since 1970; 0: not known
}

// whoServes returns the server process at the other end, and whether the role's
// transactions are as ours must be.
func whoServes(ctx context.Context, q querier) (b backendID, asOurs bool, err error) {
	err = outlast(ctx, func() error {
		return q.row(ctx, statements.ConnBackend.Text()).Scan(&b.pid, &b.started, &asOurs)
	})
	return b, asOurs, err
}

// outlast asks again, up to ten times, what the role's statement_timeout ended. It stands
// until we know whose connection it is and may set another one, and a busy server may
// need longer for the first statements of a connection.
func outlast(ctx context.Context, ask func() error) error {
	for again := 10; ; again-- {
		if err := ask(); lockerr.SQLState(err) != lockerr.StateCanceled || ctx.Err() != nil || again == 0 {
			return err
		}
	}
}

// serves reports whether the process is the one that the server announced when
// the connection was made. A pooler shows another one.
func (b backendID) serves(conn *pgx.Conn) bool { return uint32(b.pid) == conn.PgConn().PID() }

// end makes sure that the process does nothing any more.
func (b backendID) end(ctx context.Context, q querier) error {
	if b.started == 0 {
		return nil
	}
	ended := true // there is no row if it has gone by itself
	err := q.row(ctx, statements.EvictTerminate.Text(), b.pid, b.started).Scan(&ended)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("end the backend of the broken connection: %w", err)
	}
	if !ended {
		return fmt.Errorf("the backend of the broken connection, pid %d, does not end", b.pid)
	}
	return nil
}

// cancelledReplication reports whether a notice tells of a commit that was not
// waited for. It is known by the routine that raises it: many warnings have its
// code, and its text is translated.
func cancelledReplication(notice *pgconn.Notice) bool { return notice.Routine == "SyncRepWaitForLSN" }

// closeQuietly says goodbye to the server, which need not hear it.
func closeQuietly(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// requirePrimary refuses a standby while the address is still being chosen, so
// that a connection string with several hosts leads to the primary.
func requirePrimary(ctx context.Context, conn *pgconn.PgConn) error {
	var result *pgconn.Result
	err := outlast(ctx, func() error {
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

// applicationName is what our connections are called unless the pool's
// configuration says otherwise: 63 bytes are what the server keeps.
func applicationName(owner string) string { return fmt.Sprintf("pgxlock %.50s", owner) }
