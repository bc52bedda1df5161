// A network between a test and its server that the test can cut.

package pgtest

import (
	"net/url"
	"testing"

	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// RemoteServer is a private server behind a network. URL leads past the network,
// through the socket; TCPURL leads through it.
type RemoteServer struct {
	*pgserver.Server

	// Packets says that the network loses packets, so that what is configured of
	// TCP is tested; else it holds data back, and only other timeouts are.
	Packets bool

	network interface {
		Cut() error
		Heal() error
	}
	address string // of the relay, "" if there is none
}

// Remote starts a server behind a network that can be cut without a word. Where
// a network of packets cannot be made, as without root, it says so and takes one
// of connections. Nothing is left of either when the test is over.
func Remote(tb testing.TB, cfg pgserver.Config) *RemoteServer {
	tb.Helper()
	network, err := cutnet.NewNamespace()
	if err != nil {
		tb.Logf("pgtest: the server is behind a relay, which tests its idle timeouts, but not those of TCP: %v", err)
		return relayed(tb, cfg)
	}
	tb.Cleanup(func() {
		if err := network.Close(); err != nil {
			tb.Errorf("pgtest: %v", err)
		}
	})
	cfg.Network = &pgserver.Network{Address: network.Address(), Enter: network.Enter}
	return &RemoteServer{Server: Private(tb, cfg), Packets: true, network: network}
}

func relayed(tb testing.TB, cfg pgserver.Config) *RemoteServer {
	tb.Helper()
	cfg.TCP = true
	server := Private(tb, cfg)
	u, err := url.Parse(server.TCPURL("postgres"))
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	relay := cutnet.NewRelay(tb, cutnet.RelayConfig{Server: u.Host})
	return &RemoteServer{Server: server, network: relay, address: relay.Address()}
}

// TCPURL returns a connection string for a database of the server, for the
// superuser, through the network.
func (s *RemoteServer) TCPURL(database string) string {
	direct := s.Server.TCPURL(database)
	if s.address == "" {
		return direct
	}
	u, err := url.Parse(direct)
	if err != nil {
		panic("pgtest: " + err.Error()) // it has just been made
	}
	u.Host = s.address
	return u.String()
}

// Cut cuts the network: until Heal nothing arrives at either end, and neither is
// told. It is healed before what the test has opened so far is closed.
func (s *RemoteServer) Cut(tb testing.TB) {
	tb.Helper()
	if err := s.network.Cut(); err != nil {
		tb.Fatalf("pgtest: cut: %v", err)
	}
	tb.Cleanup(func() { s.Heal(tb) })
}

// Heal makes the network work again. What TCP repeats in time arrives late.
func (s *RemoteServer) Heal(tb testing.TB) {
	tb.Helper()
	if err := s.network.Heal(); err != nil {
		tb.Fatalf("pgtest: heal: %v", err)
	}
}
