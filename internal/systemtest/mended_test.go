package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// far returns the database as it looks from the other end of a long link: what
// is sent arrives half a round trip later, in either direction.
func far(t *testing.T, db *pgtest.DB, roundTrip time.Duration, configure ...func(*pgxpool.Config)) *pgtest.DB {
	t.Helper()
	target := db.Pool.Config().ConnConfig
	network, address := pgconn.NetworkAddress(target.Host, target.Port)
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		handshake := time.NewTimer(roundTrip)
		defer handshake.Stop()
		select {
		case <-handshake.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		server, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		near, end := net.Pipe()
		go carry(server, end, roundTrip/2)
		go carry(end, server, roundTrip/2)
		return near, nil
	}
	through := func(c *pgxpool.Config) {
		c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
		c.ConnConfig.DialFunc = dial
	}
	return &pgtest.DB{Pool: db.NewPool(t, append(configure, through)...), URL: db.URL, Name: db.Name}
}

// carry passes on what from says, each piece when it has travelled for delay.
func carry(to io.WriteCloser, from io.ReadCloser, delay time.Duration) {
	type piece struct {
		arrives time.Time
		bytes   []byte
	}
	travelling := make(chan piece, 1024)
	go func() {
		defer close(travelling)
		for {
			buf := make([]byte, 32<<10)
			n, err := from.Read(buf)
			if n > 0 {
				travelling <- piece{time.Now().Add(delay), buf[:n]}
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range travelling {
		time.Sleep(time.Until(p.arrives))
		if _, err := to.Write(p.bytes); err != nil {
			_ = from.Close() // ends the reader; what still travels is dropped
		}
	}
	_ = to.Close()
}

func TestATableThatIsLockedFailsAllThatWaitForItTogether(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	asked := &testkit.Counter{Sql: testkit.AcquireSQL}
	p, through := testkit.Proxied(t, db, func(c *pgxpool.Config) { c.ConnConfig.Tracer = asked })
	locks := testkit.NewLocker(t, through, nil)
	blocker := db.Connect(t)

	// While the first request is under way the others gather.
	held := p.Arm(t, testkit.HoldReply, testkit.AcquireSQL)
	var first *pgxlock.Lock
	var calls sync.WaitGroup
	calls.Go(func() { first, _ = locks.Acquire(t.Context(), "first") })
	held.Happened(t)
	const n = 12
	for i := range n {
		calls.Go(func() {
			_, err := locks.Acquire(t.Context(), fmt.Sprint("key:", i), pgxlock.MaxWait(20*time.Second))
			if err == nil || errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("key:%d: %v, want an error that is not ErrNotAcquired", i, err)
			}
		})
	}
	testkit.Until(t, "all requests stand in the queue", func() bool { return gathered(t.Name()) == n+1 })
	if _, err := blocker.Exec(t.Context(), "begin; lock table distributed_locks in access exclusive mode"); err != nil {
		t.Fatal(err)
	}
	before, _, _ := asked.Counts()
	held.Resume()
	calls.Wait()
	if first == nil {
		t.Fatal("the first request, which was done before the table was locked, failed")
	}
	if after, _, _ := asked.Counts(); after-before > n/2 { // a busy machine may be so late that some ask once more
		t.Errorf("%d statements ran into the table's lock one after the other, for one batch", after-before)
	}
	if _, err := blocker.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	untilOnlyHeld(t, db, first)
	useLock(t, locks, db.Pool, "afterwards")
}

func TestALeaseIsAcquiredOverASlowLink(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	lock := testkit.Acquire(t, testkit.NewLocker(t, far(t, db, 150*time.Millisecond), nil), "k")
	untilOnlyHeld(t, db, lock)
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	untilOnlyHeld(t, db)
}

// expiry returns when the table says that the lease of a key ends.
func expiry(t *testing.T, db *pgtest.DB, key string) time.Time {
	t.Helper()
	return testkit.Query[time.Time](t, db, "select expires_at from distributed_locks where lock_name = $1", key)
}

// untilRenewed waits for renewals of a lease that must not be lost meanwhile.
func untilRenewed(t *testing.T, db *pgtest.DB, lock *pgxlock.Lock, times int) {
	t.Helper()
	for i := range times {
		before := expiry(t, db, lock.Key())
		testkit.Until(t, fmt.Sprintf("renewal %d", i+1), func() bool {
			if err := lock.Err(); err != nil {
				t.Fatalf("before renewal %d: %v", i+1, err)
			}
			return expiry(t, db, lock.Key()).After(before)
		})
	}
}

func TestAShortLeaseIsKeptOverASlowLink(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, far(t, db, 100*time.Millisecond), nil)
	if err := testkit.Acquire(t, locks, "first").Renew(t.Context()); err != nil { // now there is a connection for it
		t.Fatal(err)
	}
	lock := testkit.Acquire(t, locks, "k", pgxlock.TTL(8*time.Second)) // there is time to connect again, on a busy machine
	untilRenewed(t, db, lock, 2)
	if err := errors.Join(lock.Err(), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestShortLeasesCostALongOneNoRenewalOverASlowLink(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, far(t, db, 70*time.Millisecond), &pgxlock.LeaseConfig{TTL: 20 * time.Second, Renew: 500 * time.Millisecond})
	long := testkit.Acquire(t, locks, "long")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var short sync.WaitGroup
	defer short.Wait()
	defer stop()
	var rounds atomic.Int32
	short.Go(func() {
		var last *pgxlock.Lock
		for i := 0; ctx.Err() == nil; i++ { // there is always one
			lock, err := locks.Acquire(t.Context(), fmt.Sprint("short:", i%2), pgxlock.TTL(time.Second))
			if err == nil {
				rounds.Add(1)
			}
			if err == nil && last != nil {
				err = last.Release(t.Context())
			}
			if err != nil {
				t.Logf("the short lease, which a busy machine may lose: %v", err)
			}
			last = lock
		}
	})
	testkit.Until(t, "there are short leases", func() bool { return rounds.Load() >= 3 })
	untilRenewed(t, db, long, 3)
	if err := long.Err(); err != nil {
		t.Error(err)
	}
}

func TestCloseWhoseContextEndsMeanwhileReleasesAllTheSame(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var ended atomic.Pointer[time.Time]
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.Tracer = testkit.OnStatement(releaseSQL, func() {
			now := time.Now()
			ended.CompareAndSwap(nil, &now)
			cancel()
		})
	})
	locks, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{TTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	testkit.AcquireMany(t, locks, 300)
	if got := testkit.Rows(t, db); len(got) != 300 {
		t.Fatalf("%d leases are held, want 300", len(got))
	}
	err = locks.Close(ctx)
	if ctx.Err() == nil {
		t.Fatal("the context did not end while leases were being released: nothing was tested")
	}
	if errors.Is(err, context.Canceled) && time.Since(*ended.Load()) >= time.Second {
		return // it has tried for as long as it does: on a busy machine that may not be enough
	}
	if err != nil {
		t.Errorf("Close: %v", err)
	}
	untilOnlyHeld(t, db)
}

func TestLostLocksMayBeReleasedWhileTheLockerCloses(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	for range 3 {
		locks, err := pgxlock.NewLeaseLocker(db.Pool, nil)
		if err != nil {
			t.Fatal(err)
		}
		held := testkit.AcquireMany(t, locks, 100)
		db.Exec(t, "delete from distributed_locks")
		var calls sync.WaitGroup
		for _, lock := range held {
			calls.Go(func() {
				if err := lock.Renew(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
					t.Errorf("Renew: %v, want ErrLost", err)
				}
			})
		}
		calls.Wait()

		start := make(chan struct{})
		calls.Go(func() {
			<-start
			if err := locks.Close(t.Context()); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		for _, lock := range held {
			for range 2 {
				calls.Go(func() {
					<-start
					if err := lock.Release(t.Context()); !errors.Is(err, pgxlock.ErrLost) {
						t.Errorf("Release: %v, want ErrLost", err)
					}
				})
			}
		}
		close(start)
		calls.Wait()
	}
}

func TestAWarningOfAUsersTriggerFailsNoCall(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `create function warn() returns trigger language plpgsql as $$ begin
		raise warning 'somebody touches %', tg_table_name;
		return coalesce(new, old);
	end $$`)
	db.Exec(t, "create trigger warn before insert or update or delete on distributed_locks for each row execute function warn()")
	var mu sync.Mutex
	warnings := 0
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, notice *pgconn.Notice) {
			mu.Lock()
			defer mu.Unlock()
			if notice.Code == "01000" {
				warnings++
			}
		}
	})
	locks := testkit.NewLocker(t, &pgtest.DB{Pool: pool, URL: db.URL, Name: db.Name}, nil)
	lock := testkit.Acquire(t, locks, "k")
	if err := errors.Join(lock.Renew(t.Context()), lock.Release(t.Context())); err != nil {
		t.Error(err)
	}
	untilOnlyHeld(t, db)
	mu.Lock()
	defer mu.Unlock()
	if warnings < 3 {
		t.Errorf("%d warnings came, want one for each call", warnings)
	}
}

// wantOneLine checks that the text fits into one line of a log.
func wantOneLine(t *testing.T, err error, words ...string) {
	t.Helper()
	e, ok := errors.AsType[*pgxlock.Error](err)
	if !ok {
		t.Errorf("%v is no *Error", err)
		return
	}
	text := e.Error()
	if strings.ContainsAny(text, "\n\r\v\f\u0085\u2028\u2029") {
		t.Errorf("more than one line: %q", text)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%q does not say %q", text, word)
		}
	}
}

func TestTheTextOfAnErrorIsOneLine(t *testing.T) {
	t.Parallel()
	const breaks = "one\ntwo\r\nthree\vfour\ffive\u0085six\u2028seven\u2029eight"
	for _, err := range []error{
		&pgxlock.Error{Op: "acquire", Kind: pgxlock.KindLease, Key: breaks, Err: pgxlock.ErrNotAcquired},
		&pgxlock.Error{Op: "acquire", Kind: pgxlock.KindLease, Key: "k", Holder: breaks, RetryAfter: time.Second, Err: pgxlock.ErrNotAcquired},
		&pgxlock.Error{Op: "acquire", Kind: pgxlock.KindLease, Key: "k", Err: &pgconn.PgError{Severity: "ERROR", Code: "P0001", Message: breaks}},
		&pgxlock.Error{Op: "renew", Kind: pgxlock.KindLease, Err: errors.Join(errors.New(breaks), errors.New(breaks))},
		&pgxlock.Error{Op: "renew", Kind: pgxlock.KindLease, Err: &pgxlock.Error{Op: "hold", Key: breaks, Holder: breaks, Err: errors.New(breaks)}},
	} {
		wantOneLine(t, err)
	}

	db := testkit.Migrated(t)
	const owner, key = "first line\nsecond line", "upper\nlower"
	testkit.Acquire(t, testkit.NewLocker(t, db, &pgxlock.LeaseConfig{Owner: owner}), key)
	others := testkit.NewLocker(t, db, nil)
	_, err := others.TryAcquire(t.Context(), key)
	wantOneLine(t, err, "first line second line", `"upper\nlower"`)
	if !errors.Is(err, pgxlock.ErrNotAcquired) {
		t.Errorf("a held lease: %v", err)
	}
	db.Exec(t, `create function refuse() returns trigger language plpgsql as $$ begin
		raise exception E'not\nhere';
	end $$`)
	db.Exec(t, "create trigger refuse before insert on distributed_locks for each row execute function refuse()")
	_, err = others.TryAcquire(t.Context(), "other")
	wantOneLine(t, err, "not here")
}
