// A relay is a network of connections, for users who may not make a namespace.

package cutnet

import (
	"fmt"
	"net"
	"strings"
	"sync"
)

// A Relay passes connections on to a server. While it is cut it passes nothing
// on, not even that an end has closed; what it holds back arrives after Heal. New
// connections are made and get no answer.
type Relay struct {
	listener net.Listener
	server   string
	serving  sync.WaitGroup

	mu     sync.Mutex
	open   chan struct{} // closed while all passes
	closed bool
	conns  map[net.Conn]struct{}
}

// NewRelay makes a relay to the server, a TCP address or the path of a Unix
// socket, on a free port of 127.0.0.1.
func NewRelay(server string) (*Relay, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("cutnet: relay: %w", err)
	}
	r := &Relay{listener: listener, server: server, open: make(chan struct{}), conns: make(map[net.Conn]struct{})}
	close(r.open)
	r.serving.Go(r.serve)
	return r, nil
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

// Close ends all connections.
func (r *Relay) Close() error {
	err := r.listener.Close()
	r.mu.Lock()
	r.closed = true
	for conn := range r.conns {
		_ = conn.Close()
	}
	r.mu.Unlock()
	_ = r.Heal() // never fails
	r.serving.Wait()
	if err != nil {
		return fmt.Errorf("cutnet: close: %w", err)
	}
	return nil
}

// pass waits until the relay is not cut.
func (r *Relay) pass() {
	r.mu.Lock()
	open := r.open
	r.mu.Unlock()
	<-open
}

func (r *Relay) serve() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.serving.Go(func() { r.connect(client) })
	}
}

func (r *Relay) connect(client net.Conn) {
	r.pass()
	network := "tcp"
	if strings.HasPrefix(r.server, "/") {
		network = "unix"
	}
	server, err := net.Dial(network, r.server)
	if err != nil {
		_ = client.Close()
		return
	}
	if !r.add(client, server) {
		return
	}
	r.serving.Go(func() { r.carry(server, client) })
	r.carry(client, server)
}

// add makes Close close the connections, at once if it has been called.
func (r *Relay) add(conns ...net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range conns {
		if r.closed {
			_ = conn.Close()
		} else {
			r.conns[conn] = struct{}{}
		}
	}
	return !r.closed
}

// carry takes what comes from one end to the other, the news of its end too.
func (r *Relay) carry(to, from net.Conn) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		r.pass()
		if n > 0 {
			if _, failed := to.Write(buffer[:n]); failed != nil {
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
