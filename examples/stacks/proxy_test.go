package stacks_test

import (
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/cutnet"
)

// A proxy stands between a driver and the server, and counts round trips: the
// messages after which a client waits for the server to say that it is ready.
type proxy struct{ trips atomic.Int64 }

// newProxy returns a proxy and the connection string of the database behind it.
func newProxy(t *testing.T) (p *proxy, connString string) {
	t.Helper()
	server, err := pgconn.ParseConfig(database.url)
	if err != nil {
		t.Fatal(err)
	}
	p = new(proxy)
	_, address := pgconn.NetworkAddress(server.Host, server.Port)
	relay := cutnet.NewRelay(t, cutnet.RelayConfig{Server: address, Request: func(m []byte) {
		if m[0] == 'Q' || m[0] == 'S' { // Query, or Sync after Parse, Bind, ...
			p.trips.Add(1)
		}
	}})
	// Without TLS, so that we can read it.
	query := url.Values{"sslmode": {"disable"}, "search_path": {server.RuntimeParams["search_path"]}}
	through := url.URL{
		Scheme: "postgres", User: url.UserPassword(server.User, server.Password),
		Host: relay.Address(), Path: "/" + server.Database, RawQuery: query.Encode(),
	}
	return p, through.String()
}

// during returns how many round trips f makes.
func (p *proxy) during(f func()) int {
	before := p.trips.Load()
	f()
	return int(p.trips.Load() - before)
}
