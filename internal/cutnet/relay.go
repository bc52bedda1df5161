// A relay is a network of connections, for users who may not make a namespace.

package cutnet

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
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

	// Answer, if set, is called with each message of the server. If it returns false, the connection
	// ends instead of passing the message on.
	Answer func(message []byte) bool
}

// A Relay passes connections on to a server. While it is cut it passes nothing
// on, not even that an end has closed; what it holds back arrives after Heal. New
// connections are made and get no answer.
type Relay struct {
	RelayConfig
	listener net.Listener
	ctx      context.Context // ends with the relay
	end      context.CancelFunc
	serving  sync.WaitGroup

	mu    sync.Mutex
	to    map[direction]gate
	conns map[net.Conn]struct{}
}

// A direction is what a message goes to.
type direction string

const (
	server direction = "server"
	client direction = "client"
)

// A gate is closed while all passes.
type gate chan struct{}

// NewRelay makes a relay that ends with the test.
func NewRelay(tb testing.TB, cfg RelayConfig) *Relay {
	tb.Helper()
	r, err := OpenRelay(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(r.Close)
	return r
}

// OpenRelay makes a relay that ends with Close.
func OpenRelay(cfg RelayConfig) (*Relay, error) {
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	listener, err := net.Listen(network(cfg.Listen), cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("cutnet: relay: %w", err)
	}
	ctx, end := context.WithCancel(context.Background())
	r := &Relay{RelayConfig: cfg, listener: listener, ctx: ctx, end: end, to: make(map[direction]gate), conns: make(map[net.Conn]struct{})}
	for _, to := range []direction{server, client} {
		r.to[to] = make(gate)
		close(r.to[to])
	}
	r.serving.Go(r.serve)
	return r, nil
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
func (r *Relay) Cut() error { return r.cut(server, client) }

// CutRequests stops what clients send from now on. What the server sends arrives.
func (r *Relay) CutRequests() error { return r.cut(server) }

// CutAnswers stops what the server sends from now on. What clients send arrives.
func (r *Relay) CutAnswers() error { return r.cut(client) }

func (r *Relay) cut(directions ...direction) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, to := range directions {
		if r.to[to].opened() {
			r.to[to] = make(gate)
		}
	}
	return nil
}

// Heal lets everything through again, what was held back first.
func (r *Relay) Heal() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.to {
		if !g.opened() {
			close(g)
		}
	}
	return nil
}

func (g gate) opened() bool {
	select {
	case <-g:
		return true
	default:
		return false
	}
}

// Reset ends the connections there are. What was held back on them is lost.
func (r *Relay) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for conn := range r.conns {
		_ = conn.Close()
	}
}

// Close ends all connections and waits until nothing of the relay runs.
func (r *Relay) Close() {
	_ = r.listener.Close()
	r.end()
	r.Reset()
	_ = r.Heal() // never fails
	r.serving.Wait()
}

// pass waits until the relay is not cut.
func (r *Relay) pass(to direction) {
	r.mu.Lock()
	g := r.to[to]
	r.mu.Unlock()
	<-g
}

func (r *Relay) serve() {
	for nth := 1; ; nth++ {
		downstream, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.serving.Go(func() { r.connect(nth, downstream) })
	}
}

func (r *Relay) connect(nth int, downstream net.Conn) {
	r.pass(server)
	if r.Enter != nil {
		r.Enter(r.ctx, nth)
	}
	upstream, err := net.Dial(network(r.Server), r.Server)
	if err != nil {
		_ = downstream.Close()
		return
	}
	if !r.add(downstream, upstream) {
		return
	}
	r.serving.Go(func() { r.carry(server, upstream, downstream, r.requests(downstream)) })
	r.carry(client, downstream, upstream, r.answers(upstream))
	r.forget(downstream, upstream)
}

// add makes Close close the connections, at once if it has been called.
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

// forget ends what add added.
func (r *Relay) forget(conns ...net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range conns {
		delete(r.conns, conn)
	}
}

// carry takes what comes from one end to the other, the news of its end too.
func (r *Relay) carry(toward direction, to, from net.Conn, next func() ([]byte, error)) {
	for {
		sent, err := next()
		r.pass(toward)
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

// errLost ends a connection instead of a message that Answer refuses.
var errLost = errors.New("the message is lost")

// answers is stream for what Answer has to see.
func (r *Relay) answers(from io.Reader) (next func() ([]byte, error)) {
	if r.Answer == nil {
		return stream(from)
	}
	return func() ([]byte, error) {
		m, err := ReadMessage(from, 1)
		if err == nil && !r.Answer(m) {
			return nil, errLost
		}
		return m, err
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
