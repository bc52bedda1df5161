package stacks_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

// A proxy stands between a driver and the server, and counts round trips: the
// messages after which a client waits for the server to say that it is ready.
type proxy struct {
	listener net.Listener
	server   *pgconn.Config
	trips    atomic.Int64

	mu    sync.Mutex
	conns []net.Conn
}

// newProxy returns a proxy and the connection string of the database behind it.
func newProxy(t *testing.T) (p *proxy, connString string) {
	t.Helper()
	server, err := pgconn.ParseConfig(database.url)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p = &proxy{listener: listener, server: server}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			p.link(t, client, &serving)
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		p.mu.Lock()
		for _, conn := range p.conns {
			_ = conn.Close() // the other end may have done it
		}
		p.mu.Unlock()
		serving.Wait()
	})
	// Without TLS, so that we can read it.
	query := url.Values{"sslmode": {"disable"}, "search_path": {server.RuntimeParams["search_path"]}}
	through := url.URL{
		Scheme: "postgres", User: url.UserPassword(server.User, server.Password),
		Host: listener.Addr().String(), Path: "/" + server.Database, RawQuery: query.Encode(),
	}
	return p, through.String()
}

func (p *proxy) link(t *testing.T, client net.Conn, serving *sync.WaitGroup) {
	network, address := pgconn.NetworkAddress(p.server.Host, p.server.Port)
	server, err := net.Dial(network, address)
	if err != nil {
		t.Error(err)
		_ = client.Close()
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, client, server)
	serving.Go(func() {
		p.requests(client, server)
		_ = server.Close()
	})
	serving.Go(func() {
		_, _ = io.Copy(client, server)
		_ = client.Close()
	})
}

// requests passes on what the client says, and counts.
func (p *proxy) requests(client io.Reader, server io.Writer) {
	for typeLen := 0; ; typeLen = 1 { // the first message has no type
		m, err := readMessage(client, typeLen)
		if err != nil {
			return
		}
		if typeLen == 1 && (m[0] == 'Q' || m[0] == 'S') { // Query, or Sync after Parse, Bind, ...
			p.trips.Add(1)
		}
		if _, err := server.Write(m); err != nil {
			return
		}
	}
}

// during returns how many round trips f makes.
func (p *proxy) during(f func()) int {
	before := p.trips.Load()
	f()
	return int(p.trips.Load() - before)
}

// readMessage reads one message of the protocol, whole: a type of 0 or 1 bytes,
// then its length, which counts itself.
func readMessage(r io.Reader, typeLen int) ([]byte, error) {
	head := make([]byte, typeLen+4)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	m := make([]byte, typeLen+max(int(binary.BigEndian.Uint32(head[typeLen:])), 4))
	copy(m, head)
	_, err := io.ReadFull(r, m[len(head):])
	return m, err
}
