package systemtest_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// These tests are about Lockers beside a *sql.DB.

// openSQL opens the database with the driver of pgx.
func openSQL(t *testing.T, db *pgtest.DB) *sql.DB {
	t.Helper()
	handle, err := sql.Open("pgx", db.URL)
	if err != nil {
		t.Fatal(err)
	}
	return closing(t, handle)
}

// closing has it closed when the test is over.
func closing(t *testing.T, handle *sql.DB) *sql.DB {
	t.Helper()
	t.Cleanup(func() {
		if err := handle.Close(); err != nil {
			t.Error(err)
		}
	})
	return handle
}

// closeLocker closes it when the test is over.
func closeLocker(t *testing.T, locks *pgxlock.Locker, err error) *pgxlock.Locker {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := locks.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return locks
}

// useLockSQL acquires, renews, fences and releases, which must all work.
func useLockSQL(t *testing.T, locks *pgxlock.Locker, handle *sql.DB) {
	t.Helper()
	lock := testkit.Acquire(t, locks, "k")
	tx, err := handle.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if err := errors.Join(lock.FenceSQL(t.Context(), tx), lock.Renew(t.Context()), tx.Commit(), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
}

// inWords is the connection string in its other form.
func inWords(c *pgconn.Config) string {
	quote := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	var words strings.Builder
	for word, value := range map[string]string{"host": c.Host, "user": c.User, "password": c.Password, "dbname": c.Database, "sslmode": "disable"} {
		words.WriteString(word + "='" + quote.Replace(value) + "' ")
	}
	return words.String() + "port=" + strconv.Itoa(int(c.Port))
}

func TestALockerIsMadeOfTheConnectionStringOfLibPQOrPgx(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	handle := openSQL(t, db)
	separator := "?"
	if strings.Contains(db.URL, "?") {
		separator = "&"
	}
	words := inWords(&db.Pool.Config().ConnConfig.Config)
	for connString, name := range map[string]string{
		db.URL: "pgxlock ", // and the owner
		words:  "pgxlock ",
		words + " pool_max_conns=3 default_query_exec_mode=exec statement_cache_capacity=0":                                                           "pgxlock ",
		words + " binary_parameters=yes disable_prepared_binary_result=1 load_balance_hosts=random fallback_application_name=shop connect_timeout=10": "shop",
		words + " application_name=billing fallback_application_name=shop tz=UTC sslinline='' hostaddr=''":                                            "billing",
		db.URL + separator + "binary_parameters=yes&application_name=url":                                                                             "url",
	} {
		locks, err := pgxlock.OpenLease(connString, &pgxlock.LeaseConfig{Owner: "me"})
		locks = closeLocker(t, locks, err)
		useLockSQL(t, locks, handle)
		if n := testkit.Query[int](t, db, `select count(*) from pg_stat_activity where datname = current_database()
			and application_name = $1 || case when $1 = 'pgxlock ' then 'me' else '' end`, name); n < 1 {
			t.Errorf("no connection is named %q: %s", name, connString)
		}
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestAConnectionStringThatCannotBeUsedIsRefusedWithoutRepeatingIt(t *testing.T) {
	t.Parallel()
	const key = "-----BEGIN PRIVATE KEY-----\ngeheim\n-----END PRIVATE KEY-----"
	for connString, test := range map[string]struct {
		says        string
		unsupported bool
	}{
		"postgres://me:ge:heim%zz@h/db":                                      {"percent-encoded", false},
		"postgres://me:geheim@h:port/db":                                     {"percent-encoded", false},
		"mysql://me:geheim@h/db":                                             {"is not a PostgreSQL connection string (failed to parse", false},
		"host=h password=my geheim":                                          {"failed to parse as keyword/value", false},
		"host=h password='geheim":                                            {"unterminated quoted string", false},
		"host=h password=geheim port=much":                                   {"invalid port", false},
		"host=h password=geheim sslmode=perhaps":                             {"sslmode is invalid", false},
		"host=h password=geheim sslmode=pqgo-mine":                           {"sslmode is invalid", false},
		"host=h password=geheim sslmode=verify-ca sslrootcert=/no/ca.pem":    {"/no/ca.pem", false},
		"host=h password=geheim sslmode=require sslinline=true sslcert=/no":  {"both", false},
		"host=h sslmode=require sslcert='" + key + "' sslkey='" + key + "'":  {"failed to configure TLS", false},
		"host=h password=geheim sslinline=true":                              {"sslinline, which pgx does not know", true},
		"host=h password=geheim hostaddr=10.0.0.1":                           {"hostaddr, which pgx does not know", true},
		"postgres://me:geheim@h/db?ssl_min_protocol_version=TLSv1.3":         {"ssl_min_protocol_version", true},
		"postgres://me:geheim@h/db?ssl_max_protocol_version=TLSv1.2&tz=UTC":  {"ssl_max_protocol_version", true},
		"postgres://me:geheim@h/db?pool_max_conns=`: geheim&connect_timeout": {"is not a PostgreSQL connection string", false},
	} {
		locks, err := pgxlock.OpenLease(connString, nil)
		wantRefused(t, err, "new", "the connection string ", test.says)
		if errors.Is(err, errors.ErrUnsupported) != test.unsupported {
			t.Errorf("%v is ErrUnsupported: %t", err, !test.unsupported)
		}
		if locks != nil || strings.Contains(err.Error(), "geheim") || strings.Contains(err.Error(), "heim%") {
			t.Errorf("%s: %v", connString, err)
		}
		if parse, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
			t.Errorf("the error holds the string: %s", parse.ConnString)
		}
	}
}

func TestOpeningSendsNothing(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	locks, err := pgxlock.OpenLease("postgres://me@"+l.Addr().String()+"/db?sslmode=disable", nil)
	closeLocker(t, locks, err)
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := l.(*net.TCPListener).SetDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if conn, err := l.Accept(); err == nil {
		conn.Close()
		t.Error("it connected")
	}
}

// wrapper is a driver around another one, as libraries for tracing have it.
type wrapper struct{ driver.Connector }

func (w wrapper) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := w.Connector.Connect(ctx)
	return wrapped{conn}, err
}

type wrapped struct{ driver.Conn }

func (w wrapped) Raw() driver.Conn { return w.Conn }

func TestALockerIsMadeOfADBOfPgxHoweverItWasOpened(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	for name, open := range map[string]func(*testing.T, pgx.ConnConfig) *sql.DB{
		"sql.Open": func(*testing.T, pgx.ConnConfig) *sql.DB {
			handle, err := sql.Open("pgx/v5", db.URL)
			if err != nil {
				t.Fatal(err)
			}
			return handle
		},
		"RegisterConnConfig": func(t *testing.T, c pgx.ConnConfig) *sql.DB {
			name := stdlib.RegisterConnConfig(&c)
			t.Cleanup(func() { stdlib.UnregisterConnConfig(name) })
			handle, err := sql.Open("pgx", name)
			if err != nil {
				t.Fatal(err)
			}
			return handle
		},
		"OpenDB": func(_ *testing.T, c pgx.ConnConfig) *sql.DB { return stdlib.OpenDB(c) },
		"OpenDB with hooks": func(_ *testing.T, c pgx.ConnConfig) *sql.DB {
			password := c.Password
			c.Password = "the hook gives the right one"
			return stdlib.OpenDB(c, stdlib.OptionBeforeConnect(func(_ context.Context, c *pgx.ConnConfig) error {
				c.Password = password
				return nil
			}), stdlib.OptionAfterConnect(func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "set search_path = nowhere; set statement_timeout = '7s'")
				return err
			}), stdlib.OptionResetSession(func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "set search_path = public")
				return err
			}))
		},
		"OpenDBFromPool": func(*testing.T, pgx.ConnConfig) *sql.DB { return stdlib.OpenDBFromPool(db.Pool) },
		"a wrapper": func(_ *testing.T, c pgx.ConnConfig) *sql.DB {
			return sql.OpenDB(wrapper{stdlib.GetConnector(c)})
		},
		"several hosts": func(_ *testing.T, c pgx.ConnConfig) *sql.DB {
			own := &pgconn.FallbackConfig{Host: c.Host, Port: c.Port, TLSConfig: c.TLSConfig}
			c.Host, c.Port, c.Fallbacks = "127.0.0.1", 1, []*pgconn.FallbackConfig{own}
			return stdlib.OpenDB(c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			handle := closing(t, open(t, *db.Pool.Config().ConnConfig))
			locks, err := pgxlock.NewLeaseSQL(t.Context(), handle, nil)
			locks = closeLocker(t, locks, err)
			lock := testkit.Acquire(t, locks, name)
			if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
				t.Error(err)
			}
			if n := handle.Stats().InUse; n != 0 {
				t.Errorf("%d connections were not given back", n)
			}
		})
	}
}

// dials notes how connections are made.
type dials struct {
	pgx.QueryTracer // never called: nil
	mu              sync.Mutex
	configs         []pgx.ConnConfig
	dialled         atomic.Int32
}

func (d *dials) TraceConnectStart(ctx context.Context, data pgx.TraceConnectStartData) context.Context {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.configs = append(d.configs, *data.ConnConfig)
	return ctx
}

func (d *dials) TraceConnectEnd(context.Context, pgx.TraceConnectEndData) {}

func (d *dials) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (d *dials) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestTheLockerConnectsAsTheDBDoes(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	seen := new(dials)
	c := *db.Pool.Config().ConnConfig
	dial := c.DialFunc
	c.Tracer, c.Password = seen, "geheim"
	c.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		seen.dialled.Add(1)
		return dial(ctx, network, addr)
	}
	c.RuntimeParams["application_name"] = "billing"
	handle := closing(t, stdlib.OpenDB(c))
	locks, err := pgxlock.NewLeaseSQL(t.Context(), handle, nil)
	locks = closeLocker(t, locks, err)
	if n := seen.dialled.Load(); n != 1 {
		t.Errorf("%d connections for a look at one", n)
	}
	useLockSQL(t, locks, handle)
	testkit.Until(t, "both of the Locker's connections are there", func() bool { return seen.dialled.Load() == 3 })
	seen.mu.Lock()
	defer seen.mu.Unlock()
	for i, got := range seen.configs {
		if got.Password != "geheim" || got.User != c.User || got.RuntimeParams["application_name"] != "billing" {
			t.Errorf("connection %d: %q %q", i, got.User, got.RuntimeParams)
		}
		if got.OnNotification != nil {
			t.Errorf("connection %d would hand its notifications to another one", i)
		}
	}
}

func TestAnExhaustedDBCostsNoLease(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	handle := openSQL(t, db)
	handle.SetMaxOpenConns(1)
	locks, err := pgxlock.NewLeaseSQL(t.Context(), handle, nil)
	locks = closeLocker(t, locks, err)
	tx, err := handle.BeginTx(t.Context(), nil) // the only connection
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	lock := testkit.Acquire(t, locks, "k")
	if err := errors.Join(lock.Renew(t.Context()), lock.FenceSQL(t.Context(), tx), tx.Commit(), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
	if n := handle.Stats().WaitCount; n != 0 {
		t.Errorf("%d waits for a connection of db", n)
	}
}

func TestTheLookAtAnExhaustedDBEndsWithTheContext(t *testing.T) {
	t.Parallel()
	handle := openSQL(t, pgtest.New(t))
	handle.SetMaxOpenConns(1)
	held, err := handle.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := pgxlock.NewLeaseSQL(ctx, handle, nil)
		failed <- err
	}()
	testkit.Until(t, "it waits", func() bool { return handle.Stats().WaitCount == 1 })
	cancel()
	err = <-failed
	wantRefused(t, err, "new", "all 1 that it may open are in use")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want Canceled", err)
	}
}

// notPostgres is a driver whose connections are of no use.
type notPostgres struct{ driver.Conn }

func (notPostgres) Connect(context.Context) (driver.Conn, error) { return notPostgres{}, nil }
func (notPostgres) Driver() driver.Driver                        { return nil }
func (notPostgres) Close() error                                 { return nil }

// A caller that holds all of db's connections and waits for one is not heard of
// otherwise.
func TestTheLookAtAnExhaustedDBEndsByItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		handle := closing(t, sql.OpenDB(notPostgres{}))
		handle.SetMaxOpenConns(1)
		held, err := handle.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer held.Close()
		_, err = pgxlock.NewLeaseSQL(context.Background(), handle, nil)
		wantRefused(t, err, "new", "in use")
	})
}

func TestADBThatDoesNotTellItsConfigurationIsRefused(t *testing.T) {
	t.Parallel()
	for name, connector := range map[string]driver.Connector{"another driver": notPostgres{}, "inside a wrapper": wrapper{notPostgres{}}} {
		handle := closing(t, sql.OpenDB(connector))
		locks, err := pgxlock.NewLeaseSQL(t.Context(), handle, nil)
		wantRefused(t, err, "new", "systemtest_test.notPostgres", "OpenLease")
		if locks != nil || !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v, want ErrUnsupported", name, err)
		}
		if n := handle.Stats().InUse; n != 0 {
			t.Errorf("%s: %d connections were not given back", name, n)
		}
	}
	_, err := pgxlock.NewLeaseSQL(t.Context(), nil, nil)
	wantRefused(t, err, "new", "the db is nil", "sql.Open")
}

func TestABadConfigurationIsRefusedBeforeTheDBIsAsked(t *testing.T) {
	t.Parallel()
	handle := closing(t, stdlib.OpenDB(*unconnected(t).Config().ConnConfig))
	_, err := pgxlock.NewLeaseSQL(t.Context(), handle, &pgxlock.LeaseConfig{TTL: 1})
	wantRefused(t, err, "new", "LeaseConfig.TTL")
	_, err = pgxlock.OpenLease("geheim", &pgxlock.LeaseConfig{TTL: 1})
	wantRefused(t, err, "new", "LeaseConfig.TTL")
}
