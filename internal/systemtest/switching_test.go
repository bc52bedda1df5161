package systemtest_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// A switcher is a pooler that looks like the server: it relays the pid of the first
// backend, and answers some messages from another one, which belongs to another of
// its clients.
type switcher struct {
	dial     func() (net.Conn, error) // the server
	other    net.Conn
	otherPID uint32

	mu       sync.Mutex
	switches func(n int, m []byte) bool // the n-th message after the startup of the first client
	clients  int
	switched int // messages that the other backend has answered
	last     net.Conn
}

// switching returns a switcher that listens on such a network, and a pool that reaches
// the server through it.
func switching(t *testing.T, network string, server *pgserver.Server, switches func(n int, m []byte) bool) (*switcher, *pgxpool.Pool) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "s")
	}
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	url := server.URL("postgres")
	if network == "tcp" {
		url = server.TCPURL("postgres")
	}
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	s := &switcher{switches: switches}
	s.other, s.otherPID = rawSession(t, server)
	s.dial = func() (net.Conn, error) { return dialAs(config) }
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { s.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		_ = s.other.Close()
		s.cut()
		serving.Wait()
	})
	return s, pgtest.Pool(t, url, func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, listener.Addr().String())
		}
	})
}

// cut ends the last connection.
func (s *switcher) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last != nil {
		_ = s.last.Close()
	}
}

// answered returns how many messages the other backend has answered.
func (s *switcher) answered() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.switched
}

// serve relays one client's messages, each to the backend that is to answer it.
func (s *switcher) serve(client net.Conn) {
	defer client.Close()
	own, err := s.dial()
	if err != nil {
		return
	}
	defer own.Close()
	s.mu.Lock()
	s.clients++
	first := s.clients == 1
	s.last = client
	s.mu.Unlock()
	if startUp(client, own) != nil {
		return
	}
	half := map[net.Conn]bool{} // who got a part of a group of messages, and nothing behind it
	finish := func(server net.Conn) error {
		half[server] = false
		if _, err := server.Write([]byte{'S', 0, 0, 0, 4}); err != nil {
			return err
		}
		return relayReply(io.Discard, server)
	}
	from := own
	for n := 0; ; n++ {
		m, err := cutnet.ReadMessage(client, 1)
		if err != nil || m[0] == 'X' {
			return
		}
		to := own
		s.mu.Lock()
		if first && s.switches(n, m) {
			to = s.other
			s.switched++
		}
		s.mu.Unlock()
		// It would wait for the other half, in a transaction that holds what it has locked, and hear nothing else.
		if to != from && half[from] && finish(from) != nil {
			return
		}
		from = to
		switch {
		case strings.IndexByte("QFS", m[0]) < 0:
			half[to] = true
		case m[0] != 'S' && half[to] && finish(to) != nil:
			return
		default:
			half[to] = false
		}
		if _, err := to.Write(m); err != nil {
			return
		}
		if strings.IndexByte("QFS", m[0]) >= 0 && relayReply(client, to) != nil {
			return
		}
	}
}

// relayReply relays what a backend says until it is ready again.
func relayReply(client io.Writer, server net.Conn) error {
	for {
		m, err := cutnet.ReadMessage(server, 1)
		if err == nil {
			_, err = client.Write(m)
		}
		if err != nil || m[0] == 'Z' {
			return err
		}
	}
}

// startUp relays the messages that open a session.
func startUp(client, server net.Conn) error {
	m, err := cutnet.ReadMessage(client, 0)
	for err == nil {
		if _, err = server.Write(m); err != nil {
			break
		}
		for asks := false; err == nil && !asks; {
			if m, err = cutnet.ReadMessage(server, 1); err != nil {
				break
			}
			if _, err = client.Write(m); err == nil && m[0] == 'Z' {
				return nil
			}
			if m[0] == 'R' { // what kind of answer it wants, if any
				kind := binary.BigEndian.Uint32(m[5:])
				asks = kind != 0 && kind != 12
			}
		}
		if err == nil {
			m, err = cutnet.ReadMessage(client, 1)
		}
	}
	return err
}

// dialAs connects to the host that a configuration names.
func dialAs(config *pgconn.Config) (net.Conn, error) {
	network, address := pgconn.NetworkAddress(config.Host, config.Port)
	return net.Dial(network, address)
}

// rawSession opens a session, and returns its connection, which nothing reads.
func rawSession(t *testing.T, server *pgserver.Server) (conn net.Conn, pid uint32) {
	t.Helper()
	config, err := pgconn.ParseConfig(server.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	if conn, err = dialAs(config); err != nil {
		t.Fatal(err)
	}
	frontend := pgproto3.NewFrontend(conn, conn)
	frontend.Send(&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersion30, Parameters: map[string]string{"user": config.User, "database": config.Database}})
	if err := frontend.Flush(); err != nil {
		t.Fatal(err)
	}
	for {
		received, err := frontend.Receive()
		if err != nil {
			t.Fatal(err)
		}
		switch received := received.(type) {
		case *pgproto3.BackendKeyData:
			pid = received.ProcessID
		case *pgproto3.ReadyForQuery:
			return conn, pid
		case *pgproto3.ErrorResponse:
			t.Fatal(received.Message)
		}
	}
}

// asksForLock reports whether a message asks for the lock of that key.
func asksForLock(m []byte, key string) bool {
	number := pgxlock.AdvisoryID(key)
	switch m[0] {
	case 'Q':
		return strings.Contains(string(m), fmt.Sprint(number))
	case 'F':
		return strings.Contains(string(m), string(binary.BigEndian.AppendUint64(nil, uint64(number))))
	}
	return false
}

// heldIn returns in which backends an advisory lock is held.
func heldIn(t *testing.T, db *pgtest.DB, key string) []uint32 {
	t.Helper()
	return testkit.Query[[]uint32](t, db, `select coalesce(array_agg(pid), '{}') from pg_locks where locktype = 'advisory' and granted
		and classid::bigint << 32 | objid::bigint = $1`, pgxlock.AdvisoryID(key))
}

func heldBySwitched(t *testing.T, db *pgtest.DB, s *switcher) int {
	t.Helper()
	return testkit.Query[int](t, db, "select count(*) from pg_locks where locktype = 'advisory' and pid = $1", s.otherPID)
}

func TestAdvisoryLockIsNotTakenInAnotherBackend(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	db := testkit.On(t, "", server)
	for _, network := range []string{"tcp", "unix"} {
		for name, test := range map[string]struct{ once, prepares bool }{
			"for one message":              {once: true},
			"for good":                     {},
			"for good when it is prepared": {prepares: true},
		} {
			t.Run(network+", "+name, func(t *testing.T) {
				t.Parallel()
				key, began := t.Name(), false
				s, pool := switching(t, network, server, func(_ int, m []byte) bool {
					now := asksForLock(m, key) || test.prepares && strings.Contains(string(m), "-- What the lock session is asked")
					began = began || now
					return now || began && !test.once
				})
				locks := testkit.NewAdvisory(t, &pgtest.DB{Pool: pool}, nil)
				var before *pgxlock.Lock
				if !test.prepares {
					before = testkit.Acquire(t, locks, "before "+key)
				} else if lock, err := locks.Acquire(t.Context(), key); err == nil {
					t.Errorf("%v is of a session that was set up in two backends", lock)
				}
				lock := testkit.Acquire(t, locks, key, testkit.LongWait) // it is of the next session
				if s.answered() == 0 {
					t.Fatal("the pooler has not switched")
				}
				if n := heldBySwitched(t, db, s); n != 0 {
					t.Errorf("%d locks are held in the backend of another client", n)
				}
				if before != nil {
					wantLost(t, before)
					if err := before.Err(); !errors.Is(err, pgxlock.ErrPooler) {
						t.Errorf("a lock of the session whose backend was switched: %v, want ErrPooler", err)
					}
				}
				if pids := heldIn(t, db, key); len(pids) != 1 || pids[0] == s.otherPID {
					t.Errorf("a lock is believed in that is held by %v", pids)
				}
				if err := lock.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// A switched use of a Locker: it does what callers do, and looks whether what they
// believe is so.
type switchedUse struct {
	t  *testing.T
	db *pgtest.DB
	s  *switcher
}

// believes looks whether a lock that a caller believes in is held, and by the
// session's own backend.
func (u *switchedUse) believes(when string, locks ...*pgxlock.Lock) {
	u.t.Helper()
	for _, lock := range locks {
		if lock == nil || lock.Err() != nil {
			continue
		}
		pids := heldIn(u.t, u.db, lock.Key())
		if lock.Err() == nil && (len(pids) != 1 || pids[0] == u.s.otherPID) {
			u.t.Errorf("%s, %q is believed in and held by %v", when, lock.Key(), pids)
		}
	}
	if n := heldBySwitched(u.t, u.db, u.s); n != 0 {
		u.t.Errorf("%s, %d locks are held in the backend of another client", when, n)
	}
}

// try acquires a lock, which may fail only for what a pooler does.
func (u *switchedUse) try(locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) *pgxlock.Lock {
	u.t.Helper()
	lock, err := locks.TryAcquire(u.t.Context(), key, opts...)
	if errors.Is(err, pgxlock.ErrNotAcquired) {
		u.t.Errorf("%q is said to be busy: %v", key, err)
	}
	u.believes("after a try of "+key, lock)
	return lock
}

func (u *switchedUse) run(locks *pgxlock.Locker, prefix string) {
	t := u.t
	first := u.try(locks, prefix+"first")
	shared := u.try(locks, prefix+"shared", pgxlock.Shared)
	many := make([]*pgxlock.Lock, 3)
	if all, err := locks.AcquireAll(t.Context(), []string{prefix + "a", prefix + "b", prefix + "c"}, pgxlock.NoWait); err == nil {
		copy(many, all)
	}
	held := append(many, first, shared)
	u.believes("with many", held...)
	for _, lock := range held {
		if lock == nil {
			continue
		}
		renewed := lock.Renew(t.Context())
		u.believes("after a renewal", held...)
		if lock != many[0] {
			continue
		}
		if err := lock.Release(t.Context()); err == nil && renewed == nil && len(heldIn(t, u.db, lock.Key())) != 0 {
			t.Error("a lock that was released is held")
		}
		u.believes("after a release", held...)
	}
	for _, lock := range held {
		if lock != nil {
			_ = lock.Release(t.Context())
		}
		u.believes("while all is released", held...)
	}
}

// Whatever message a pooler switches the backend at, and for how long.
func TestSoakAdvisoryLocksAreNeverBelievedInAnotherBackend(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	db := testkit.On(t, "", server)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	step := pgtest.Soak(t, 16, 1)
	for _, network := range []string{"tcp", "unix"} {
		for _, tokens := range []bool{false, true} {
			for name, until := range map[string]func(from int) int{
				"for one message": func(from int) int { return from + 1 },
				"for a few":       func(from int) int { return from + 2 + rand.IntN(6) },
				"for good":        func(int) int { return 1 << 30 },
			} {
				t.Run(fmt.Sprintf("%s, %s, tokens: %t", network, name, tokens), func(t *testing.T) {
					t.Parallel()
					for from, more := rand.IntN(step), true; more; from += step {
						to := until(from)
						s, pool := switching(t, network, server, func(n int, _ []byte) bool { return n >= from && n < to })
						u := &switchedUse{t, db, s}
						locks := testkit.Advisory(t, pool, &pgxlock.AdvisoryConfig{Tokens: tokens})
						prefix := fmt.Sprintf("%s %d ", t.Name(), from)
						u.run(locks, prefix)
						if err := locks.Close(t.Context()); err != nil {
							t.Error(err)
						}
						u.believes("in the end")
						more = s.answered() > 0
						if t.Failed() {
							t.Fatalf("switched from message %d to %d", from, to)
						}
					}
				})
			}
		}
	}
}

// What pgx reads then has no end that it knows, and it no longer looks at the context.
func TestAttemptToConnectEndsWhereAProxyAnswersOutOfOrder(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	for from, more := 0, true; more; from++ {
		s, pool := switching(t, "tcp", server, func(n int, _ []byte) bool { return n == from })
		config := pool.Config()
		config.ConnConfig.ConnectTimeout = time.Second
		impatient, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(impatient.Close)
		locks := testkit.Advisory(t, impatient, nil)
		_, _ = locks.TryAcquire(t.Context(), "k")
		most, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := locks.Close(most); err != nil {
			t.Errorf("message %d comes from another backend: %v", from, err)
		}
		cancel()
		more = s.answered() > 0 && from < 20
	}
}

func TestLeaseLockerTakesAProxyThatSwitchesForAPooler(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t, pgserver.Config{TCP: true})
	db := testkit.On(t, "", server)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	setting := false // once a connection asks for its first setting, another backend answers
	s, pool := switching(t, "tcp", server, func(_ int, m []byte) bool {
		setting = setting || m[0] == 'P' && strings.Contains(string(m), "by a division by zero")
		return setting
	})
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: pool}, &pgxlock.LeaseConfig{OneConnection: true})
	lock := testkit.Acquire(t, locks, "k")
	if s.answered() == 0 {
		t.Fatal("the pooler has not switched")
	}
	testkit.Release(t, lock)
}
