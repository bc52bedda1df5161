//go:build unix

package systemtest_test

import (
	"context"
	"crypto/tls"
	"net"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// relayed makes a pool reach its server through a relay that listens on such a network.
func relayed(t *testing.T, network string) func(*pgxpool.Config) {
	t.Helper()
	return func(c *pgxpool.Config) {
		var cfg cutnet.RelayConfig
		if network == "unix" {
			cfg.Listen = filepath.Join(t.TempDir(), "s")
		}
		_, cfg.Server = pgconn.NetworkAddress(c.ConnConfig.Host, c.ConnConfig.Port)
		relay := cutnet.NewRelay(t, cfg)
		c.ConnConfig.Fallbacks = nil
		c.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, relay.Address())
		}
	}
}

// A call of a function is no statement, so that the server shows the one before.
func TestAdvisoryLockIsAskedForByCallOnlyWhereNothingIsInBetween(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	db := testkit.On(t, "", server)
	roots := encrypt(t, server, db)
	unchanged := func(*pgxpool.Config) {}
	encrypted := func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig = &tls.Config{RootCAs: roots, ServerName: "pgxlock.test"}
	}
	look := func(t *testing.T, url string, byCall bool, cfg pgxlock.AdvisoryConfig, configure ...func(*pgxpool.Config)) {
		t.Helper()
		cfg.Owner = t.Name()[len(t.Name())-20:]
		locks := testkit.NewAdvisory(t, &pgtest.DB{Pool: pgtest.Pool(t, url, configure...)}, &cfg)
		lock := testkit.Acquire(t, locks, t.Name())
		last := testkit.Query[string](t, db, `select left(query, 7) from pg_stat_activity join pg_locks using (pid)
			where locktype = 'advisory' and classid::bigint << 32 | objid::bigint = $1`, pgxlock.AdvisoryID(t.Name()))
		if (last != "EXECUTE") != byCall {
			t.Errorf("asked by a call: %t, want %t (%s)", !byCall, byCall, last)
		}
		if err := lock.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	tcp, unix := server.TCPURL("postgres"), server.URL("postgres")
	for name, test := range map[string]struct {
		url       string
		configure func(*pgxpool.Config)
		byCall    bool
	}{
		"TCP":                    {tcp, unchanged, true},
		"TLS":                    {tcp, encrypted, true},
		"Unix":                   {unix, unchanged, runtime.GOOS == "linux"},
		"TCP, then TCP":          {tcp, relayed(t, "tcp"), false},
		"TLS, through TCP twice": {tcp, func(c *pgxpool.Config) { encrypted(c); relayed(t, "tcp")(c) }, false},
		"Unix, then TCP":         {tcp, relayed(t, "unix"), false},
		"TCP, then Unix":         {unix, relayed(t, "tcp"), false},
		"Unix, then Unix":        {unix, relayed(t, "unix"), false},
	} {
		t.Run(name, func(t *testing.T) { look(t, test.url, test.byCall, pgxlock.AdvisoryConfig{}, test.configure) })
	}
	pgtest.EachPooler(t, server, func(t *testing.T, mode string, pooler *pgserver.Pooler) {
		if mode == "session" {
			look(t, pooler.URL("postgres"), false, pgxlock.AdvisoryConfig{SessionPooler: true})
		}
	})
}
