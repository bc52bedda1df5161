package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
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

func TestLeaseIsAcquiredOverASlowLink(t *testing.T) {
	pgtest.Long(t)
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
		pgtest.Until(t, fmt.Sprintf("renewal %d", i+1), func() bool {
			if err := lock.Err(); err != nil {
				t.Fatalf("before renewal %d: %v", i+1, err)
			}
			return expiry(t, db, lock.Key()).After(before)
		})
	}
}

func TestShortLeaseIsKeptOverASlowLink(t *testing.T) {
	pgtest.Long(t)
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
	pgtest.Long(t)
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
	pgtest.Until(t, "there are short leases", func() bool { return rounds.Load() >= 3 })
	untilRenewed(t, db, long, 3)
	if err := long.Err(); err != nil {
		t.Error(err)
	}
}
