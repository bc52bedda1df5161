// A relay is a network of connections, for users who may not make a namespace.

package cutnet

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
)

// A RelayConfig says between what a Relay is. An address is that of TCP, or the path of a Unix socket.
type RelayConfig struct {
	Server string
	Listen string // "": a free port of 127.0.0.1

	// Enter returns when the nth connection may go on to the server, or when its context ends, as it
	// does with the Relay. If it is nil, connections go on at once.
	Enter func(ctx context.Context, nth int)

	// Request, if set, is called with each message of PostgreSQL's protocol that a client sends after
	// the first, which has no type.
	Request func(message []byte)
}

// A Relay passes connections on to a server. While it is cut it passes nothing
// on, not even that an end has closed; what it holds back arrives after Heal. New
// connections are made and get no answer.
type Relay struct {
	RelayConfig
	listener net.Listener
	ctx      context.Context // ends with the relay
	serving  sync.WaitGroup

	mu    sync.Mutex
	open  chan struct{} // closed while all passes
	conns map[net.Conn]struct{}
}

// NewRelay makes a relay that ends with the test.
func NewRelay(tb testing.TB, cfg RelayConfig) *Relay {
	tb.Helper()
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	listener, err := net.Listen(network(cfg.Listen), cfg.Listen)
	if err != nil {
		tb.Fatalf("cutnet: relay: %v", err)
	}
	ctx, end := context.WithCancel(context.Background())
	r := &Relay{RelayConfig: cfg, listener: listener, ctx: ctx, open: make(chan struct{}), conns: make(map[net.Conn]struct{})}
	close(r.open)
	r.serving.Go(r.serve)
	tb.Cleanup(func() { r.close(end) })
	return r
}

// network returns the network of an address.
func network(address string) string {
	if strings.HasPrefix(address, "/") {
		return "unix"
	}
	return "tcp"
}

// Address returns where the relay listens: host and port.
func (r *Relay) Address() string { return r.listener.Addr().String() }

// Cut stops what is sent from now on, in both directions.
func (r *Relay) Cut() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.cut() {
		r.open = make(chan struct{})
	}
	return nil
}

// Heal lets everything through again, what was held back first.
func (r *Relay) Heal() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cut() {
		close(r.open)
	}
	return nil
}

// cut says whether the relay is cut. mu is held.
func (r *Relay) cut() bool {
	select {
	case <-r.open:
		return false
	default:
		return true
	}
}

// close ends all connections.
func (r *Relay) close(end context.CancelFunc) {
	_ = r.listener.Close()
	r.mu.Lock()
	end()
	for conn := range r.conns {
		_ = conn.Close()
	}
	r.mu.Unlock()
	_ = r.Heal() // never fails
	r.serving.Wait()
}

// pass waits until the relay is not cut.
func (r *Relay) pass() {
	r.mu.Lock()
	open := r.open
	r.mu.Unlock()
	<-open
}

func (r *Relay) serve() {
	for nth := 1; ; nth++ {
		client, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.serving.Go(func() { r.connect(nth, client) })
	}
}

func (r *Relay) connect(nth int, client net.Conn) {
	r.pass()
	if r.Enter != nil {
		r.Enter(r.ctx, nth)
	}
	server, err := net.Dial(network(r.Server), r.Server)
	if err != nil {
		_ = client.Close()
		return
	}
	if !r.add(client, server) {
		return
	}
	r.serving.Go(func() { r.carry(server, client, r.requests(client)) })
	r.carry(client, server, stream(server))
}

// add makes close close the connections, at once if it has been called.
func (r *Relay) add(conns ...net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range conns {
		if r.ctx.Err() != nil {
			_ = conn.Close()
		} else {
			r.conns[conn] = struct{}{}
		}
	}
	return r.ctx.Err() == nil
}

// carry takes what comes from one end to the other, the news of its end too.
func (r *Relay) carry(to, from net.Conn, next func() ([]byte, error)) {
	for {
		sent, err := next()
		r.pass()
		if len(sent) > 0 {
			if _, failed := to.Write(sent); failed != nil {
				err = failed
			}
		}
		if err != nil {
			_ = to.Close()
			_ = from.Close()
			return
		}
	}
}

// stream returns a function that returns what comes next.
func stream(from io.Reader) (next func() ([]byte, error)) {
	buffer := make([]byte, 32<<10)
	return func() ([]byte, error) {
		n, err := from.Read(buffer)
		return buffer[:n], err
	}
}

// requests is stream for what Request has to see.
func (r *Relay) requests(from io.Reader) (next func() ([]byte, error)) {
	if r.Request == nil {
		return stream(from)
	}
	typeLen := 0
	return func() ([]byte, error) {
		m, err := ReadMessage(from, typeLen)
		if err != nil {
			return nil, err
		}
		if typeLen == 1 {
			r.Request(m)
		}
		typeLen = 1
		return m, nil
	}
}

// ReadMessage reads one message of the protocol, whole: a type of 0 or 1 bytes,
// then its length, which counts itself.
func ReadMessage(r io.Reader, typeLen int) ([]byte, error) {
	head := make([]byte, typeLen+4)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	m := make([]byte, typeLen+max(int(binary.BigEndian.Uint32(head[typeLen:])), 4))
	copy(m, head)
	_, err := io.ReadFull(r, m[len(head):])
	return m, err
}
