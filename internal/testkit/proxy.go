package testkit

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A Proxy stands between a pool and its server, and breaks what passes. It
// follows the protocol just far enough to know which statement a message runs,
// so that a fault hits that one and no other.
type Proxy struct {
	listener net.Listener
	server   func() (net.Conn, error)

	mu      sync.Mutex
	faults  []*Fault
	links   map[*link]struct{}
	silent  bool // new connections get no answer
	refused bool // new connections are closed at once
	turned  int  // how many were
}

// A Fault is what happens to the next statement whose text contains sql.
type Fault struct {
	sql  string
	what FaultKind

	Hit     chan struct{} // closed when it has happened
	resumed chan struct{} // closed by resume
	once    sync.Once
}

// A FaultKind is what happens to a statement.
type FaultKind int

// What may happen to a statement.
const (
	LoseReply     FaultKind = iota // the server does it, then the connection is cut
	HoldReply                      // the server does it; its reply waits for resume
	DelayRequest                   // the connection is cut; the server gets the request at resume
	HalfRequest                    // the server gets half of the request, and the network swallows the rest
	AlmostRequest                  // it gets all but the last byte
)

// Happened waits until the fault has happened.
func (f *Fault) Happened(t *testing.T) {
	t.Helper()
	pgtest.Receive(t, fmt.Sprintf("a statement with %q", f.sql), f.Hit)
}

// Resume lets go what the fault held back.
func (f *Fault) Resume() { f.once.Do(func() { close(f.resumed) }) }

// Proxied returns a proxy and a pool that reaches the database through it.
func Proxied(t *testing.T, db *pgtest.DB, configure ...func(*pgxpool.Config)) (*Proxy, *pgtest.DB) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: listener, links: make(map[*link]struct{})}
	target := db.Pool.Config().ConnConfig
	network, address := pgconn.NetworkAddress(target.Host, target.Port)
	p.server = func() (net.Conn, error) { return net.Dial(network, address) }
	var serving sync.WaitGroup
	serving.Go(p.serve)
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
		p.Cut()
	})

	through := func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", listener.Addr().String())
			return &proxiedConn{conn, p}, err
		}
	}
	return p, &pgtest.DB{Pool: db.NewPool(t, append(configure, through)...), URL: db.URL, Name: db.Name}
}

// A proxiedConn is a connection through a proxy that is as invisible as a network: it has
// the ends of the connection to the server.
type proxiedConn struct {
	net.Conn
	proxy *Proxy
}

func (c *proxiedConn) NetConn() net.Conn { return c.proxy.serverOf(c.Conn) }

func (c *proxiedConn) LocalAddr() net.Addr { return c.NetConn().LocalAddr() }

func (c *proxiedConn) RemoteAddr() net.Addr { return c.NetConn().RemoteAddr() }

// serverOf returns the connection to the server that carries on a client's, or that one
// itself if there is none.
func (p *Proxy) serverOf(client net.Conn) net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		if l.client.RemoteAddr().String() == client.LocalAddr().String() {
			return l.server
		}
	}
	return client
}

// Arm makes the next statement that contains sql run into a fault.
func (p *Proxy) Arm(t *testing.T, what FaultKind, sql string) *Fault {
	t.Helper()
	f := &Fault{sql: sql, what: what, Hit: make(chan struct{}), resumed: make(chan struct{})}
	t.Cleanup(f.Resume) // else a link would wait for ever
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = append(p.faults, f)
	return f
}

// Disarm forgets the faults that have not happened.
func (p *Proxy) Disarm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults = nil
}

// BlackHole makes the network swallow everything, in both directions and without
// a word, on the connections there are and on those to come until heal.
func (p *Proxy) BlackHole() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = true
	for l := range p.links {
		l.swallow()
	}
}

// Refuse makes new connections fail at once until heal.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refused = true
}

// Refusals returns how many connections were refused.
func (p *Proxy) Refusals() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.turned
}

// Heal lets new connections through again. What was swallowed is lost.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent, p.refused = false, false
}

// Reset ends all connections as a firewall does that has forgotten them.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		if tcp, ok := l.client.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		l.close()
	}
}

// Cut ends all connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.close()
	}
}

func (p *Proxy) serve() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.link(client)
	}
}

func (p *Proxy) link(client net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refused {
		p.turned++
		_ = client.Close()
		return
	}
	server, err := p.server()
	if err != nil {
		p.turned++
		_ = client.Close()
		return
	}
	l := &link{proxy: p, client: client, server: server, statements: make(map[string]string)}
	if p.silent {
		l.swallow()
	}
	p.links[l] = struct{}{}
	go l.requests()
	go l.replies()
}

// next returns the fault that the statement runs into, and disarms it.
func (p *Proxy) next(sql string) *Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, f := range p.faults {
		if strings.Contains(sql, f.sql) {
			p.faults = append(p.faults[:i:i], p.faults[i+1:]...)
			return f
		}
	}
	return nil
}

// link is one connection through the proxy.
type link struct {
	proxy          *Proxy
	client, server net.Conn
	statements     map[string]string // prepared statements by name

	mu    sync.Mutex
	dead  bool   // swallow everything
	fault *Fault // what the replies up to the next ReadyForQuery run into
}

func (l *link) swallow() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dead = true
}

func (l *link) swallows() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dead
}

func (l *link) close() {
	_ = l.client.Close()
	_ = l.server.Close()
}

// requests carries what the client sends, in whole groups of messages.
func (l *link) requests() {
	startup, err := cutnet.ReadMessage(l.client, 0)
	if err != nil || l.send(startup) != nil {
		l.ended()
		return
	}
	var group []byte
	var hit *Fault
	for {
		m, err := cutnet.ReadMessage(l.client, 1)
		if err != nil {
			l.ended()
			return
		}
		group = append(group, m...)
		if f := l.look(m); f != nil {
			hit = f
		}
		if strings.IndexByte("PBDEC", m[0]) >= 0 {
			continue // more of the group follows
		}
		if hit != nil && hit.what == DelayRequest {
			l.delay(hit, group)
			return
		}
		switch {
		case hit == nil:
		case hit.what == HalfRequest || hit.what == AlmostRequest:
			l.truncate(hit, group)
		default:
			l.mu.Lock()
			l.fault = hit
			l.mu.Unlock()
		}
		if l.send(group) != nil {
			l.ended()
			return
		}
		group, hit = nil, nil
	}
}

// look follows which statement a message runs.
func (l *link) look(m []byte) *Fault {
	text := func(b []byte) (string, []byte) {
		s, rest, _ := bytes.Cut(b, []byte{0})
		return string(s), rest
	}
	switch body := m[5:]; m[0] {
	case 'P': // Parse: name, text
		name, rest := text(body)
		l.statements[name], _ = text(rest)
	case 'B': // Bind: portal, name
		_, rest := text(body)
		name, _ := text(rest)
		return l.proxy.next(l.statements[name])
	case 'F': // FunctionCall: number
		return l.proxy.next(fmt.Sprintf("call of function %d", binary.BigEndian.Uint32(body)))
	case 'Q': // Query: text
		sql, _ := text(body)
		return l.proxy.next(sql)
	}
	return nil
}

// delay is a network in which the request is still under way when the client
// has long given up.
func (l *link) delay(f *Fault, request []byte) {
	_ = l.client.Close()
	close(f.Hit)
	<-f.resumed
	_, _ = l.server.Write(request)
	// The server side stays open: the backend has no reason to stop.
}

// truncate is a network, or a client, that stops in the middle of a request. Both
// ends stay open.
func (l *link) truncate(f *Fault, request []byte) {
	n := len(request) - 1
	if f.what == HalfRequest {
		n = len(request) / 2
	}
	_, _ = l.server.Write(request[:n])
	l.swallow()
	close(f.Hit)
}

func (l *link) send(b []byte) error {
	if l.swallows() {
		return nil
	}
	_, err := l.server.Write(b)
	return err
}

// ended passes on that the client has gone, which a black hole would not.
func (l *link) ended() {
	if !l.swallows() {
		l.close()
	}
}

// replies carries what the server sends.
func (l *link) replies() {
	var held []byte
	for {
		m, err := cutnet.ReadMessage(l.server, 1)
		if err != nil {
			if !l.swallows() {
				l.close()
			}
			return
		}
		l.mu.Lock()
		f, dead := l.fault, l.dead
		l.mu.Unlock()
		if dead {
			continue
		}
		held = append(held, m...)
		if f != nil && m[0] != 'Z' {
			continue
		}
		if f != nil && !l.apply(f) {
			return
		}
		if _, err := l.client.Write(held); err != nil {
			l.ended()
			return
		}
		held = nil
	}
}

// apply lets the fault happen, and reports whether the reply is still wanted.
func (l *link) apply(f *Fault) bool {
	close(f.Hit)
	if f.what == LoseReply {
		l.close()
		return false
	}
	<-f.resumed
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = nil
	return !l.dead
}
