package systemtest_test

import (
	"context"
	"encoding/binary"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// A tap sees what an Advisory Locker asks its server and what it does to its
// connection: each message, the goroutine that writes and reads, each deadline. It
// can stop the answers for a while, so that callers gather.
type tap struct {
	// passing is called by the goroutine that writes or reads, before a message is
	// sent, after it, and when an answer is there that nobody has seen. May be nil.
	passing func(goroutine uint64)

	mu        sync.Mutex
	contexts  []context.Context // of each dial
	messages  []tapped
	readers   []uint64    // goroutines that took an answer in, in order
	deadlines []time.Time // in the order in which they were set
	split     int         // messages that were not sent whole, and alone
	held      chan struct{}
}

// tapped is one message to the server.
type tapped struct {
	asks   []tappedAsk
	writer uint64 // the goroutine that sent it
}

// tappedAsk is one thing that it asks for, as advisory/prepare.sql knows it.
type tappedAsk struct {
	what int
	key  int64
}

func (a tappedAsk) unlocks() bool { return a.what&2 != 0 }

// tappedPool returns a pool whose configuration goes through a tap.
func tappedPool(t *testing.T, db *pgtest.DB) (*tap, *pgxpool.Pool) {
	t.Helper()
	p := &tap{}
	t.Cleanup(p.letGo) // else a Locker could not be closed
	return p, db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.contexts = append(p.contexts, ctx)
			return &tapConn{conn, p}, nil
		}
	})
}

// hold makes answers wait until letGo.
func (p *tap) hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = make(chan struct{})
}

func (p *tap) letGo() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held != nil {
		close(p.held)
		p.held = nil
	}
}

// since returns the messages after the first n.
func (p *tap) since(n int) []tapped {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.messages[n:])
}

// count returns how many messages there were.
func (p *tap) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.messages)
}

// answers returns how many times something was read, and readersSince by whom after
// the first n.
func (p *tap) answers() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.readers)
}

func (p *tap) readersSince(n int) []uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.readers[n:])
}

func (p *tap) dials() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.contexts)
}

// lockFunctions are the numbers that PostgreSQL has for the functions of advisory
// locks, by the request.
var lockFunctions = [...]uint32{2882, 2883, 2884, 2885, 2888, 2889, 2890, 2891}

// wrote takes down what is written, if it is of the lock session's business.
func (p *tap) wrote(b []byte) (ours bool) {
	m := tapped{writer: goroutine()}
	rest := b
	for len(rest) >= 9 && strings.IndexByte("FQ", rest[0]) >= 0 {
		length := 1 + int(binary.BigEndian.Uint32(rest[1:]))
		one := rest[:min(length, len(rest))]
		rest = rest[len(one):]
		if len(one) < length {
			break
		}
		if one[0] == 'F' {
			ours = true
			m.call(one[5:])
		} else if m.statement(strings.TrimRight(string(one[5:]), "\x00")) {
			ours = true
		}
	}
	if !ours {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.messages = append(p.messages, m)
	if len(rest) > 0 {
		p.split++
	}
	return true
}

// call reads a FunctionCall whose arguments are binary.
func (m *tapped) call(body []byte) {
	what := slices.Index(lockFunctions[:], binary.BigEndian.Uint32(body))
	a := tappedAsk{what: what}
	for args := body[10:]; len(args) > 8; { // behind the formats and the number of arguments
		size := int(binary.BigEndian.Uint32(args))
		for _, b := range args[4 : 4+size] {
			a.key = a.key<<8 | int64(b)
		}
		args = args[4+size:]
	}
	m.asks = append(m.asks, a)
}

// statement reads the EXECUTE of a batch.
func (m *tapped) statement(text string) (ours bool) {
	text, ours = strings.CutPrefix(text, "EXECUTE \"pgxlock_batch")
	if !ours {
		return false
	}
	_, args, _ := strings.Cut(text, "(")
	whats, keys, _ := strings.Cut(args, ", ")
	split := func(list string) []string {
		return strings.FieldsFunc(list, func(r rune) bool { return strings.ContainsRune("'{},)", r) })
	}
	numbers := split(keys)
	for i, what := range split(whats) {
		var a tappedAsk
		a.what, _ = strconv.Atoi(what)
		a.key, _ = strconv.ParseInt(numbers[i], 10, 64)
		m.asks = append(m.asks, a)
	}
	return true
}

func (p *tap) pass(goroutine uint64) {
	if p.passing != nil {
		p.passing(goroutine)
	}
}

type tapConn struct {
	net.Conn
	tap *tap
}

func (c *tapConn) NetConn() net.Conn { return c.Conn }

func (c *tapConn) Write(b []byte) (int, error) {
	if !c.tap.wrote(b) {
		return c.Conn.Write(b)
	}
	c.tap.pass(goroutine())
	n, err := c.Conn.Write(b)
	c.tap.pass(goroutine())
	return n, err
}

func (c *tapConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n == 0 {
		return n, err
	}
	reader := goroutine()
	c.tap.mu.Lock()
	c.tap.readers = append(c.tap.readers, reader)
	held := c.tap.held
	c.tap.mu.Unlock()
	if held != nil {
		<-held
	}
	c.tap.pass(reader)
	return n, err
}

func (c *tapConn) SetDeadline(d time.Time) error {
	c.tap.deadline(d)
	return c.Conn.SetDeadline(d)
}

func (c *tapConn) SetReadDeadline(d time.Time) error {
	c.tap.deadline(d)
	return c.Conn.SetReadDeadline(d)
}

func (c *tapConn) SetWriteDeadline(d time.Time) error {
	c.tap.deadline(d)
	return c.Conn.SetWriteDeadline(d)
}

func (p *tap) deadline(d time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadlines = append(p.deadlines, d)
}

// goroutine returns the number of the one that calls it.
func goroutine() uint64 {
	var buf [32]byte
	head := buf[:runtime.Stack(buf[:], false)]
	number, _, _ := strings.Cut(strings.TrimPrefix(string(head), "goroutine "), " ")
	id, _ := strconv.ParseUint(number, 10, 64)
	return id
}
