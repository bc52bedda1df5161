package dbconn

import (
	"net"
	"net/netip"
)

// An Endpoint is one end of a connection as the server sees it. It is empty if that is
// a Unix-domain socket.
type Endpoint struct {
	Host string
	Port uint16
}

// is reports whether addr is the endpoint. An address with a zone never is: the server
// reports none.
func (e Endpoint) is(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	host, err := netip.ParseAddr(e.Host)
	if !ok || err != nil {
		return false
	}
	ours := tcp.AddrPort()
	return netip.AddrPortFrom(ours.Addr().Unmap(), ours.Port()) == netip.AddrPortFrom(host.Unmap(), e.Port)
}

// EndsInBackend reports whether a connection is proven to end in that backend, so that
// no proxy can pass its messages to another one. client and server are its two ends as
// the backend sees them.
//
// Over TCP both sides must see the same two addresses: then it is one connection. The
// client's address alone is no proof, because a proxy on the same host may connect from
// a port of the same number. A network that translates addresses, as containers and load
// balancers do, looks like a proxy. Over a Unix-domain socket the process that listens
// must be the parent of the backend.
func EndsInBackend(conn net.Conn, backend int32, client, server Endpoint) bool {
	if client == (Endpoint{}) && server == (Endpoint{}) {
		return listensAsParent(conn, backend)
	}
	return client.is(conn.LocalAddr()) && server.is(conn.RemoteAddr())
}
