package dbconn

import (
	"net"
	"net/netip"
	"os"
	"testing"
)

// seen is a connection with such ends.
type seen struct {
	net.Conn
	local, remote net.Addr
}

func (s seen) LocalAddr() net.Addr  { return s.local }
func (s seen) RemoteAddr() net.Addr { return s.remote }

func tcpAddr(t *testing.T, text string) net.Addr {
	t.Helper()
	address, err := netip.ParseAddrPort(text)
	if err != nil {
		t.Fatal(err)
	}
	return net.TCPAddrFromAddrPort(address)
}

func TestConnectionEndsInBackendOnlyIfBothSeeTheSameEnds(t *testing.T) {
	t.Parallel()
	unix := &net.UnixAddr{Name: "/run/postgresql/.s.PGSQL.5432", Net: "unix"}
	const client, server = "10.0.0.2:40000", "10.0.0.9:5432"
	for name, test := range map[string]struct {
		local, remote net.Addr
		client        Endpoint
		server        Endpoint
		want          bool
	}{
		"direct":                    {tcpAddr(t, client), tcpAddr(t, server), Endpoint{"10.0.0.2", 40000}, Endpoint{"10.0.0.9", 5432}, true},
		"IPv6":                      {tcpAddr(t, "[2001:db8::2]:40000"), tcpAddr(t, "[2001:db8::9]:5432"), Endpoint{"2001:db8::2", 40000}, Endpoint{"2001:db8::9", 5432}, true},
		"IPv4 in IPv6 here":         {tcpAddr(t, "[::ffff:10.0.0.2]:40000"), tcpAddr(t, "[::ffff:10.0.0.9]:5432"), Endpoint{"10.0.0.2", 40000}, Endpoint{"10.0.0.9", 5432}, true},
		"IPv4 in IPv6 there":        {tcpAddr(t, client), tcpAddr(t, server), Endpoint{"::ffff:10.0.0.2", 40000}, Endpoint{"::ffff:10.0.0.9", 5432}, true},
		"a zone":                    {tcpAddr(t, "[fe80::2%eth0]:40000"), tcpAddr(t, "[fe80::9%eth0]:5432"), Endpoint{"fe80::2", 40000}, Endpoint{"fe80::9", 5432}, false},
		"another port":              {tcpAddr(t, client), tcpAddr(t, server), Endpoint{"10.0.0.2", 40001}, Endpoint{"10.0.0.9", 5432}, false},
		"another client":            {tcpAddr(t, client), tcpAddr(t, server), Endpoint{"10.0.0.3", 40000}, Endpoint{"10.0.0.9", 5432}, false},
		"the same port of a proxy":  {tcpAddr(t, "127.0.0.1:40000"), tcpAddr(t, "127.0.0.1:6432"), Endpoint{"127.0.0.1", 40000}, Endpoint{"127.0.0.1", 5432}, false},
		"a translated server":       {tcpAddr(t, client), tcpAddr(t, "10.96.0.1:5432"), Endpoint{"10.0.0.2", 40000}, Endpoint{"10.0.0.9", 5432}, false},
		"a Unix socket there":       {tcpAddr(t, client), tcpAddr(t, server), Endpoint{}, Endpoint{}, false},
		"a Unix socket here":        {unix, unix, Endpoint{"10.0.0.2", 40000}, Endpoint{"10.0.0.9", 5432}, false},
		"a network of the caller's": {nil, nil, Endpoint{"10.0.0.2", 40000}, Endpoint{"10.0.0.9", 5432}, false},
		"nothing known of either":   {nil, nil, Endpoint{}, Endpoint{}, false},
		"no host, though a port":    {tcpAddr(t, "0.0.0.0:40000"), tcpAddr(t, server), Endpoint{"", 40000}, Endpoint{"10.0.0.9", 5432}, false},
	} {
		t.Run(name, func(t *testing.T) {
			conn := seen{local: test.local, remote: test.remote}
			if got := EndsInBackend(conn, int32(os.Getpid()), test.client, test.server); got != test.want {
				t.Errorf("it ends in the backend: %t", got)
			}
		})
	}
}
