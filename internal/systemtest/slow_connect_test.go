package systemtest_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// A door is a relay that accepts connections at once, and lets them in late.
type door struct {
	db       *pgtest.DB
	relay    *cutnet.Relay
	accepted atomic.Int32
}

// newDoor returns a door to the database; enter returns when the nth connection may enter. By default
// nothing enters.
func newDoor(t *testing.T, db *pgtest.DB, enter func(ctx context.Context, nth int)) *door {
	t.Helper()
	if enter == nil {
		enter = func(ctx context.Context, _ int) { <-ctx.Done() }
	}
	target := db.Pool.Config().ConnConfig
	_, address := pgconn.NetworkAddress(target.Host, target.Port)
	d := &door{db: db}
	d.relay = cutnet.NewRelay(t, cutnet.RelayConfig{Server: address, Enter: func(ctx context.Context, nth int) {
		d.accepted.Add(1)
		enter(ctx, nth)
	}})
	return d
}

func (d *door) address() (host string, port uint16) {
	address := netip.MustParseAddrPort(d.relay.Address())
	return address.Addr().String(), address.Port()
}

// oneByOne returns a function that lets one connection in, and the enter of a door that it opens.
func oneByOne() (letIn func(), enter func(context.Context, int)) {
	tokens := make(chan struct{}, 100)
	return func() { tokens <- struct{}{} }, func(ctx context.Context, _ int) {
		select {
		case <-tokens:
		case <-ctx.Done():
		}
	}
}

// pool returns a pool that comes through the door. tried says whether it tries TLS first, as
// with sslmode=prefer.
func (d *door) pool(t *testing.T, tried bool, configure ...func(*pgxpool.Config)) *pgtest.DB {
	t.Helper()
	through := func(c *pgxpool.Config) {
		c.ConnConfig.Host, c.ConnConfig.Port = d.address()
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		if tried {
			c.ConnConfig.TLSConfig = &tls.Config{InsecureSkipVerify: true}
			c.ConnConfig.Fallbacks = []*pgconn.FallbackConfig{{Host: c.ConnConfig.Host, Port: c.ConnConfig.Port}}
		}
	}
	return &pgtest.DB{Pool: d.db.NewPool(t, append([]func(*pgxpool.Config){through}, configure...)...), URL: d.db.URL, Name: d.db.Name}
}

// connecting are Lockers that make one connection for one lock.
var connecting = map[string]func(*testing.T, *pgtest.DB) *pgxlock.Locker{
	"lease": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
		t.Helper()
		return testkit.NewLocker(t, db, &pgxlock.LeaseConfig{OneConnection: true, TTL: time.Hour})
	},
	"advisory": func(t *testing.T, db *pgtest.DB) *pgxlock.Locker {
		t.Helper()
		return testkit.NewAdvisory(t, db, nil)
	},
}

// forEachKind runs a test for each kind of Locker, whose connections come through a door.
func forEachKind(t *testing.T, test func(t *testing.T, db *pgtest.DB, newLocker func(*testing.T, *pgtest.DB) *pgxlock.Locker)) {
	t.Helper()
	t.Parallel()
	for kind, newLocker := range connecting {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t) // where pgxlock is not installed, an advisory Locker has one connection
			if kind == "lease" {
				db = testkit.Migrated(t)
			}
			test(t, db, newLocker)
		})
	}
}

type outcomeOfAcquire struct {
	lock *pgxlock.Lock
	err  error
}

func acquiring(ctx context.Context, locks *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) <-chan outcomeOfAcquire {
	got := make(chan outcomeOfAcquire, 1)
	go func() {
		lock, err := locks.Acquire(ctx, key, opts...)
		got <- outcomeOfAcquire{lock, err}
	}()
	return got
}

func TestConnectingOutlivesTheCallerThatBeganIt(t *testing.T) {
	forEachKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(*testing.T, *pgtest.DB) *pgxlock.Locker) {
		letIn, enter := oneByOne()
		d := newDoor(t, db, enter)
		locks := newLocker(t, d.pool(t, false))
		ctx, leave := context.WithCancel(t.Context())
		first := acquiring(ctx, locks, "k")
		pgtest.Until(t, "it connects", func() bool { return d.accepted.Load() == 1 })
		leave()
		if got := <-first; !errors.Is(got.err, context.Canceled) || errors.Is(got.err, pgxlock.ErrUnavailable) {
			t.Errorf("the caller that left: %v", got.err)
		}
		short, err := locks.Acquire(t.Context(), "k", pgxlock.MaxWait(time.Millisecond))
		if short != nil || !errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, pgxlock.ErrNotAcquired) {
			t.Errorf("a caller whose MaxWait is over: %v", err)
		}
		last := acquiring(context.Background(), locks, "k", pgxlock.MaxWait(time.Hour)) // its context cannot end
		letIn()
		got := <-last
		if got.err != nil {
			t.Fatal(got.err)
		}
		testkit.Release(t, got.lock)
		if n := d.accepted.Load(); n != 1 {
			t.Errorf("%d connections were made, want 1", n)
		}
	})
}

// testDelays acquires through proxies that take so long to let a connection in, all at once: it
// is only time that passes.
func testDelays(t *testing.T, delays ...time.Duration) {
	t.Helper()
	forEachKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(*testing.T, *pgtest.DB) *pgxlock.Locker) {
		type attempt struct {
			what string
			door *door
			want int32 // connections
			got  <-chan outcomeOfAcquire
		}
		var all []attempt
		for _, delay := range delays {
			for tls, connections := range map[bool]int32{false: 1, true: 2} { // the server has no TLS
				d := newDoor(t, db, func(ctx context.Context, _ int) {
					select {
					case <-time.After(delay):
					case <-ctx.Done():
					}
				})
				locks := newLocker(t, d.pool(t, tls))
				what := fmt.Sprintf("%s, TLS first %t", delay, tls)
				all = append(all, attempt{what, d, connections, acquiring(t.Context(), locks, what)})
			}
		}
		for _, a := range all {
			got := <-a.got
			if got.err != nil {
				t.Errorf("%s: %v", a.what, got.err)
				continue
			}
			testkit.Release(t, got.lock)
			if n := a.door.accepted.Load(); n != a.want {
				t.Errorf("%s: %d connections were made, want %d", a.what, n, a.want)
			}
		}
	})
}

func TestLockIsAcquiredWhereConnectingTakesSeconds(t *testing.T) {
	testDelays(t, 500*time.Millisecond, 1800*time.Millisecond)
}

func TestLockIsAcquiredWhereConnectingTakesManySeconds(t *testing.T) {
	pgtest.Long(t)
	testDelays(t, 5*time.Second, 20*time.Second)
}

func TestTryAcquireAndMaxWaitEndWhereAServerAcceptsAndIsSilent(t *testing.T) {
	forEachKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(*testing.T, *pgtest.DB) *pgxlock.Locker) {
		d := newDoor(t, db, nil)
		locks := newLocker(t, d.pool(t, true))
		waits := acquiring(context.Background(), locks, "k")
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() {
				_, err := locks.TryAcquire(context.Background(), "k")
				if !errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, pgxlock.ErrNotAcquired) || !strings.Contains(err.Error(), "still connecting (tried once in ") {
					t.Errorf("TryAcquire: %v", err)
				}
			})
			calls.Go(func() {
				if _, err := locks.Acquire(t.Context(), "k", pgxlock.MaxWait(10*time.Millisecond)); !errors.Is(err, pgxlock.ErrUnavailable) {
					t.Errorf("MaxWait: %v", err)
				}
			})
		}
		calls.Wait()
		if err := locks.Close(t.Context()); err != nil {
			t.Errorf("Close: %v", err)
		}
		if got := <-waits; !errors.Is(got.err, pgxlock.ErrClosed) {
			t.Errorf("the caller whose context cannot end: %v", got.err)
		}
		if n := d.accepted.Load(); n != 1 {
			t.Errorf("%d connections were made, want 1", n)
		}
	})
}

func TestAttemptToConnectLastsAsLongAsConnectTimeoutSays(t *testing.T) {
	forEachKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(*testing.T, *pgtest.DB) *pgxlock.Locker) {
		d := newDoor(t, db, nil)
		locks := newLocker(t, d.pool(t, false, func(c *pgxpool.Config) { c.ConnConfig.ConnectTimeout = 50 * time.Millisecond }))
		pgtest.Until(t, "it was tried three times or more", func() bool { // a call may learn of the attempt that the one before it began
			_, err := locks.Acquire(t.Context(), "k")
			if !errors.Is(err, pgxlock.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("it is not unavailable: %v", err)
			}
			return regexp.MustCompile(`\(tried ([3-9]|\d\d+) times in `).MatchString(err.Error())
		})
	})
}

func TestAcquireAsksAgainWhereAServerIsTooSlowForAStatement(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `create sequence tries;
		create function be_slow() returns trigger language plpgsql as $$
		begin
		  if new.lock_name = 'tries' or nextval('tries') <= 3 then perform pg_sleep(3600); end if;
		  return new;
		end $$;
		create trigger slow before insert on distributed_locks for each row execute function be_slow()`)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour})
	testkit.Release(t, testkit.Acquire(t, locks, "waits"))
	if _, err := locks.TryAcquire(t.Context(), "tries"); !errors.Is(err, pgxlock.ErrUnavailable) {
		t.Errorf("a call that does not wait: %v", err)
	}
}

func TestHostsShareTheTimeForConnecting(t *testing.T) {
	pgtest.Long(t)
	forEachKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(*testing.T, *pgtest.DB) *pgxlock.Locker) {
		silent, opens := newDoor(t, db, nil), newDoor(t, db, func(context.Context, int) {})
		host, port := opens.address()
		locks := newLocker(t, silent.pool(t, false, func(c *pgxpool.Config) {
			c.ConnConfig.Fallbacks = []*pgconn.FallbackConfig{{Host: host, Port: port}}
		}))
		got := <-acquiring(context.Background(), locks, "k")
		if got.err != nil {
			t.Fatal(got.err)
		}
		testkit.Release(t, got.lock)
		if a, b := silent.accepted.Load(), opens.accepted.Load(); a != 1 || b != 1 {
			t.Errorf("%d connections to the silent host, %d to the other", a, b)
		}
	})
}

func TestCloseEndsAnAttemptToConnect(t *testing.T) {
	forEachKind(t, func(t *testing.T, db *pgtest.DB, newLocker func(*testing.T, *pgtest.DB) *pgxlock.Locker) {
		dialled, ended := make(chan struct{}, 1), make(chan struct{})
		through := db.NewPool(t, func(c *pgxpool.Config) {
			c.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
				dialled <- struct{}{}
				<-ctx.Done()
				close(ended)
				return nil, ctx.Err()
			}
			c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		})
		locks := newLocker(t, &pgtest.DB{Pool: through, URL: db.URL, Name: db.Name})
		waits := acquiring(t.Context(), locks, "k")
		<-dialled
		if err := locks.Close(t.Context()); err != nil {
			t.Error(err)
		}
		select {
		case <-ended:
		default:
			t.Error("Close has returned, and the attempt goes on")
		}
		if got := <-waits; !errors.Is(got.err, pgxlock.ErrClosed) {
			t.Error(got.err)
		}
	})
}

func TestRunnerAndLimiterWaitForASlowConnection(t *testing.T) {
	t.Parallel()
	letIn, enter := oneByOne()
	db := testkit.Migrated(t)
	d := newDoor(t, db, enter)
	through := d.pool(t, false)
	limiter, err := ratelimit.New(through.Pool, hourly, 3, nil)
	if err != nil {
		t.Fatal(err)
	}
	runner, err := once.New(through.Pool, time.Hour, nil)
	if err != nil {
		t.Fatal(err)
	}
	for what, call := range map[string]func(context.Context) error{
		"Wait": func(ctx context.Context) error { return limiter.Wait(ctx, "k") },
		"Do": func(ctx context.Context) error {
			_, err := runner.Do(ctx, "k", func(context.Context, once.Run) error { return nil })
			return err
		},
	} {
		before := d.accepted.Load()
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() { left <- call(ctx) }()
		pgtest.Until(t, "it connects", func() bool { return d.accepted.Load() == before+1 })
		leave()
		if err := <-left; !errors.Is(err, context.Canceled) || errors.Is(err, pgxlock.ErrUnavailable) {
			t.Errorf("%s of a caller that left: %v", what, err)
		}
		waits := make(chan error, 1)
		go func() { waits <- call(t.Context()) }()
		letIn()
		if err := <-waits; err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if n := d.accepted.Load(); n != before+1 {
			t.Errorf("%s: %d connections were made, want 1", what, n-before)
		}
	}
	if err := errors.Join(limiter.Close(t.Context()), runner.Close(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestAllowEndsAndLimiterClosesWhereAServerIsSilent(t *testing.T) {
	t.Parallel()
	d := newDoor(t, pgtest.New(t), nil)
	limiter, err := ratelimit.New(d.pool(t, false).Pool, hourly, 3, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := limiter.Allow(context.Background(), "k"); !errors.Is(err, pgxlock.ErrUnavailable) {
		t.Errorf("Allow: %v", err)
	}
	waits := make(chan error, 1)
	go func() { waits <- limiter.Wait(context.Background(), "k") }()
	if err := limiter.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-waits; !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("Wait: %v", err)
	}
}

// A countedConn counts the messages by which a server says that it is ready.
type countedConn struct {
	net.Conn
	ready *atomic.Int32
	rest  int    // of the message that is being read
	head  []byte // of the next one
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	for read := b[:n]; len(read) > 0; {
		if c.rest > 0 {
			skipped := min(c.rest, len(read))
			c.rest, read = c.rest-skipped, read[skipped:]
			continue
		}
		c.head, read = append(c.head, read[0]), read[1:]
		if len(c.head) == 5 {
			if c.head[0] == 'Z' {
				c.ready.Add(1)
			}
			c.rest = int(c.head[1])<<24 | int(c.head[2])<<16 | int(c.head[3])<<8 | int(c.head[4]) - 4
			c.head = c.head[:0]
		}
	}
	return n, err
}

func TestConnectionIsReadyAfterTwoRoundTrips(t *testing.T) {
	t.Parallel()
	const handshake, ready = 1, 2
	db := testkit.Migrated(t)
	for name, test := range map[string]struct {
		call func(*testing.T, *pgtest.DB)
		asks int32 // round trips of the call itself
	}{
		"a session": {func(t *testing.T, db *pgtest.DB) {
			t.Helper()
			s := dbconn.Session{Dialer: dbconn.Dialer{Name: "s", Config: db.Pool.Config()}, Place: &dbconn.Installation{}, Async: true}
			defer s.Close()
			if err := s.DoWithin(time.Hour, func(context.Context, dbconn.Querier, bool) error { return nil }); err != nil {
				t.Error(err)
			}
		}, 0},
		"a lock session": {func(t *testing.T, db *pgtest.DB) {
			t.Helper()
			_ = testkit.Acquire(t, testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Tokens: true}), "k")
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var round atomic.Int32
			var first sync.Once
			test.call(t, &pgtest.DB{URL: db.URL, Name: db.Name, Pool: db.NewPool(t, func(c *pgxpool.Config) {
				c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
				dial := c.ConnConfig.DialFunc
				c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
					conn, err := dial(ctx, network, address)
					first.Do(func() { conn = &countedConn{Conn: conn, ready: &round} }) // later ones are for the queue
					return conn, err
				}
			})})
			if n := round.Load(); n != handshake+ready+test.asks {
				t.Errorf("%d round trips, want %d", n-handshake-test.asks, ready)
			}
		})
	}
}
