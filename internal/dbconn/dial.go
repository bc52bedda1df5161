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
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/place"
)

// A Dialer makes connections as the caller's pool makes its own, but it takes none from the
// pool and gives none to it: neither an exhausted pool nor the settings of a role can cost
// a lock.
type Dialer struct {
	Name   string // the application_name, unless Config has one
	Config *pgxpool.Config
}

// A Dial is one attempt to connect.
type Dial struct {
	Most  time.Duration        // how long it may last; not positive: as [Dialer.Dial] says
	Place *Installation        // looked for on the way; nil: none is needed
	Heard func(*pgconn.Notice) // is called with each notice; nil: none is needed
}

// A Conn is a new connection to a primary, on which nothing has been set.
type Conn struct {
	*pgx.Conn
	Backend
	OtherDefaults bool // as in [Querier]

	cluster  cluster
	switched bool          // a proxy has passed it on to another process since
	limit    time.Duration // how long an address had
	found    place.Found   // of the Place of the Dial
	notFound error         // why it could not be looked for
}

// Direct reports whether the process that serves the connection is the one that the server
// announced when it was made. Behind a pooler it is another one.
func (c *Conn) Direct() bool { return !c.switched && c.Serves(c.Conn) }

// Dial connects to the primary. The hooks of the caller's pool run before our settings, which
// therefore win.
//
// Each address has as long as ConnectTimeout says, as in libpq. Without one the addresses
// share DialTime, once with TLS and once without where sslmode allows both: what keeps a
// connection waiting, such as a proxy that starts a server, does so again for the second one.
func (d *Dialer) Dial(ctx context.Context, dial Dial) (*Conn, error) {
	config := d.Config.ConnConfig.Copy()
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = d.Name
	}
	if dial.Most > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, dial.Most)
		defer cancel()
	}
	if err := d.prepare(ctx, config, dial.Most); err != nil {
		return nil, err
	}
	c := &Conn{limit: config.ConnectTimeout}
	hooked := d.Config.AfterConnect != nil // it may set the search_path
	check := func(ctx context.Context, conn *pgconn.PgConn) (err error) {
		looks := dial.Place
		if hooked {
			looks = nil
		}
		return c.identify(ctx, conn, looks)
	}
	config.DialFunc = quietly(withDeadlines(config.DialFunc))
	// A request to cancel ends no wait for a notification, for which nothing runs at the server.
	config.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: conn.Conn()}
	}
	config.ValidateConnect = both(check, config.ValidateConnect) // a standby is called one, whatever target_session_attrs asks for
	config.OnNotification = nil                                  // theirs would get ours, and we none
	theirs := config.OnNotice
	config.OnNotice = func(conn *pgconn.PgConn, notice *pgconn.Notice) {
		if dial.Heard != nil {
			dial.Heard(notice)
		}
		if theirs != nil {
			theirs(conn, notice)
		}
	}
	config.StatementCacheCapacity = max(config.StatementCacheCapacity, 16)
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, d.noPrimary(err)
	}
	c.Conn = conn
	if hooked {
		ctx, cancel := context.WithTimeout(ctx, config.ConnectTimeout)
		defer cancel()
		if err := d.Config.AfterConnect(ctx, conn); err != nil {
			CloseQuietly(conn)
			return nil, fmt.Errorf("the pool's AfterConnect: %w", err)
		}
		if err := c.identify(ctx, conn.PgConn(), dial.Place); err != nil {
			CloseQuietly(conn)
			return nil, err
		}
	}
	return c, nil
}

// DialTime is how long an attempt to connect lasts where the caller's configuration says
// nothing: what takes longer has failed, and an attempt that is given up too early leaves a
// busy server one more process to start.
const DialTime = 30 * time.Second

// prepare runs the caller's BeforeConnect, finds the addresses and gives each its time.
func (d *Dialer) prepare(ctx context.Context, config *pgx.ConnConfig, most time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, DialTime)
	defer cancel()
	if d.Config.BeforeConnect != nil {
		if err := d.Config.BeforeConnect(ctx, config); err != nil {
			return fmt.Errorf("the pool's BeforeConnect: %w", err)
		}
	}
	addresses, again := resolve(ctx, config)
	limit := config.ConnectTimeout
	if limit <= 0 {
		limit = DialTime / time.Duration(addresses)
		if again {
			limit *= 2
		}
	}
	if most > 0 {
		limit = min(limit, most/time.Duration(addresses))
	}
	config.ConnectTimeout = limit
	return nil
}

// resolve looks up the hosts, each once, and returns how many addresses there are: of several
// a silent one must leave time for the others. again reports whether an address is tried twice
// in a row, with TLS and without, for which pgx has one timeout.
func resolve(ctx context.Context, config *pgx.ConnConfig) (addresses int, again bool) {
	type answer struct {
		addresses []string
		err       error
	}
	known := make(map[string]answer)
	lookup := config.LookupFunc
	all := make(map[string]struct{})
	last := ""
	for _, host := range append([]*pgconn.FallbackConfig{{Host: config.Host, Port: config.Port}}, config.Fallbacks...) {
		found, looked := known[host.Host]
		if network, _ := pgconn.NetworkAddress(host.Host, host.Port); network == "unix" {
			found = answer{addresses: []string{host.Host}}
		} else if !looked {
			found.addresses, found.err = lookup(ctx, host.Host)
			known[host.Host] = found
		}
		for _, address := range found.addresses {
			address = fmt.Sprint(address, " ", host.Port)
			again = again || address == last
			last = address
			all[address] = struct{}{}
		}
	}
	config.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
		if found, looked := known[host]; looked {
			return found.addresses, found.err
		}
		return lookup(ctx, host)
	}
	return max(len(all), 1), again
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

// Serves reports whether the process is the one that the server announced when the
// connection was made. Behind a pooler it is another one.
func (b Backend) Serves(conn *pgx.Conn) bool { return uint32(b.PID) == conn.PgConn().PID() }

// KeepsBackend returns [lockerr.ErrPooler] if the pooler in between gives the backend of a
// connection that is idle now to another one.
func (d *Dialer) KeepsBackend(ctx context.Context, backend Backend) error {
	second, err := d.Dial(ctx, Dial{})
	if err != nil {
		return fmt.Errorf("check whether the pooler is in session mode: %w", err)
	}
	defer CloseQuietly(second.Conn)
	if second.PID == backend.PID {
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

// Primary returns a check of a new connection: that its server is a primary, as [Dialer.Dial]
// checks, and then the caller's check, if any. A primary is a server that is not in recovery and no
// worker of Citus. What its transactions default to does not count: a provider makes them read-only
// when a disk is nearly full, and ours say what they are.
func Primary(theirs pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
	return both(func(ctx context.Context, conn *pgconn.PgConn) error { return new(Conn).identify(ctx, conn, nil) }, theirs)
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
