package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/pgxlock/pgxlock"
)

// A kind is a way whose callers are in several processes. Each process has connections
// of its own.
type kind struct {
	needs *daemon // nil: PostgreSQL, which is there
	join  func(ctx context.Context, s *stage, m *member) error
}

// kinds are all of them, by the names of their ways. The pairs of advisory, lease and
// bare are measured, and the waits of all but bare.
var kinds = map[string]kind{
	"advisory":    {join: joinLocker(func(pool *pgxpool.Pool) (*pgxlock.Locker, error) { return pgxlock.NewAdvisoryLocker(pool, nil) })},
	"lease":       {join: joinLocker(leaseWith(nil))},
	"lease-async": {join: joinLocker(leaseWith(&pgxlock.LeaseConfig{Durability: pgxlock.Async}))},
	"locktx":      {join: joinLockTx},
	"raw":         {join: joinRaw},
	"row":         {join: joinRow},
	"bare":        {join: joinBare},
	"redislock":   {needs: redisServer, join: joinRedislock},
	"redsync":     {needs: redisServer, join: joinRedsync},
	"etcd":        {needs: etcdServer, join: joinEtcd},
}

// place makes ready what the processes of a kind connect to.
func (k kind) place(ctx context.Context, s *stage) (at string, server int, err error) {
	if k.needs != nil {
		at, err = s.daemon(ctx, k.needs)
		return at, s.pids[k.needs], err
	}
	pool, err := s.installed(ctx, "CREATE TABLE floor (key text PRIMARY KEY, value bigint)")
	if err != nil {
		return "", 0, err
	}
	return pool.Config().ConnString(), s.server.PID(), nil
}

// available leaves out the ways whose servers are not on this machine.
func available(ways []string) []string {
	return slices.DeleteFunc(slices.Clone(ways), func(way string) bool {
		needs := kinds[way].needs
		if needs == nil || needs.path != "" {
			return false
		}
		fmt.Printf("  %s is left out: there is no %s\n", way, needs.called)
		return true
	})
}

func joinLocker(newLocker lockerOf) func(context.Context, *stage, *member) error {
	return func(ctx context.Context, s *stage, m *member) error {
		pool, err := pgxpool.New(ctx, m.At)
		if err != nil {
			return err
		}
		s.cleanup(func() error { pool.Close(); return nil })
		locks, err := newLocker(pool)
		if err != nil {
			return err
		}
		m.pair = pairUnder(s.closing(locks), m.Name)
		m.acquire = func(ctx context.Context, _ int, key string) (releaser, error) {
			lock, err := locks.Acquire(ctx, key)
			if err != nil {
				return nil, err
			}
			return lock.Release, nil
		}
		return nil
	}
}

// connections opens one for each caller.
func (m *member) connections(ctx context.Context, s *stage) ([]*pgx.Conn, error) {
	conns := make([]*pgx.Conn, m.Callers)
	for caller := range conns {
		var err error
		if conns[caller], err = pgx.Connect(ctx, m.At); err != nil {
			return nil, err
		}
		s.cleanup(func() error { return conns[caller].Close(context.Background()) })
	}
	return conns, nil
}

// acquireInTx has take acquire a lock that the end of the transaction releases.
func acquireInTx(conns []*pgx.Conn, take func(ctx context.Context, tx pgx.Tx, key string) error) acquirer {
	return func(ctx context.Context, caller int, key string) (releaser, error) {
		tx, err := conns[caller].Begin(ctx)
		if err != nil {
			return nil, err
		}
		return tx.Commit, take(ctx, tx, key)
	}
}

func joinLockTx(ctx context.Context, s *stage, m *member) error {
	conns, err := m.connections(ctx, s)
	m.acquire = acquireInTx(conns, func(ctx context.Context, tx pgx.Tx, key string) error { return pgxlock.LockTx(ctx, tx, key) })
	return err
}

// joinRow is how a durable lock is had from PostgreSQL without a library: a row that a
// transaction updates and keeps until it commits.
func joinRow(ctx context.Context, s *stage, m *member) error {
	conns, err := m.connections(ctx, s)
	if err != nil {
		return err
	}
	m.acquire = acquireInTx(conns, func(ctx context.Context, tx pgx.Tx, key string) error {
		tag, err := tx.Exec(ctx, "UPDATE floor SET value = value + 1 WHERE key = $1", key)
		if err == nil && tag.RowsAffected() != 1 {
			err = fmt.Errorf("there is no row of %s", key)
		}
		return err
	})
	_, err = conns[0].Exec(ctx, "INSERT INTO floor (key, value) VALUES ($1, 0), ($2, 0) ON CONFLICT DO NOTHING", m.Key, m.Name)
	return err
}

func joinRaw(ctx context.Context, s *stage, m *member) error {
	conns, err := m.connections(ctx, s)
	m.acquire = func(ctx context.Context, caller int, key string) (releaser, error) {
		id := pgxlock.AdvisoryID(key)
		_, err := conns[caller].Exec(ctx, "SELECT pg_advisory_lock($1)", id)
		return func(ctx context.Context) error {
			return expectTrue(ctx, conns[caller], "SELECT pg_advisory_unlock($1)", id)
		}, err
	}
	return err
}

// expectTrue sends a statement, and wants true.
func expectTrue(ctx context.Context, conn *pgx.Conn, sql string, id int64) error {
	var ok bool
	err := conn.QueryRow(ctx, sql, id).Scan(&ok)
	if err == nil && !ok {
		err = fmt.Errorf("%s is false for %d", sql, id)
	}
	return err
}

// joinBare is the least that a program writes for pairs of advisory locks: its callers
// take turns with one connection.
func joinBare(ctx context.Context, s *stage, m *member) error {
	conn, err := pgx.Connect(ctx, m.At)
	if err != nil {
		return err
	}
	s.cleanup(func() error { return conn.Close(context.Background()) })
	key := keys(m.Name)
	var mu sync.Mutex
	ask := func(ctx context.Context, sql string, id int64) error {
		mu.Lock()
		defer mu.Unlock()
		return expectTrue(ctx, conn, sql, id)
	}
	m.pair = whole(func(ctx context.Context, _ int) error {
		id := pgxlock.AdvisoryID(key())
		if err := ask(ctx, "SELECT pg_try_advisory_lock($1)", id); err != nil {
			return err
		}
		return ask(ctx, "SELECT pg_advisory_unlock($1)", id)
	})
	return nil
}

// retryRedislock is how long redislock pauses between its attempts; it has no default.
const retryRedislock = 10 * time.Millisecond

func joinRedislock(_ context.Context, s *stage, m *member) error {
	client := goRedis(m.At)
	s.cleanup(client.Close)
	locks := redislock.New(client)
	m.acquire = func(ctx context.Context, _ int, key string) (releaser, error) {
		lock, err := locks.Obtain(ctx, "redislock:"+key, peerTTL, &redislock.Options{RetryStrategy: redislock.LinearBackoff(retryRedislock)})
		if err != nil {
			return nil, err
		}
		return lock.Release, nil
	}
	return nil
}

// redsyncTries is more than a caller ever needs: redsync gives up after 32 by itself.
const redsyncTries = 1_000_000

func joinRedsync(_ context.Context, s *stage, m *member) error {
	client := goRedis(m.At)
	s.cleanup(client.Close)
	locks := redsync.New(goredis.NewPool(client))
	m.acquire = func(ctx context.Context, _ int, key string) (releaser, error) {
		mutex := locks.NewMutex(key, redsync.WithExpiry(peerTTL), redsync.WithTries(redsyncTries))
		return func(ctx context.Context) error { return unlockRedsync(ctx, mutex) }, mutex.LockContext(ctx)
	}
	return nil
}

// joinEtcd gives each caller a session: all callers of one would share the lock.
func joinEtcd(_ context.Context, s *stage, m *member) error {
	client, err := etcdClient(m.At)
	if err != nil {
		return err
	}
	s.cleanup(client.Close)
	sessions := make([]*concurrency.Session, m.Callers)
	for caller := range sessions {
		if sessions[caller], err = concurrency.NewSession(client, concurrency.WithTTL(int(peerTTL.Seconds()))); err != nil {
			return err
		}
		s.cleanup(sessions[caller].Close)
	}
	m.acquire = func(ctx context.Context, caller int, key string) (releaser, error) {
		mutex := concurrency.NewMutex(sessions[caller], key)
		return mutex.Unlock, mutex.Lock(ctx)
	}
	return nil
}

// startCrews starts a crew of each way. All processes must connect.
func startCrews(ctx context.Context, s *stage, ways []string, n, callers int) ([]*crew, error) {
	var crews []*crew
	for _, way := range ways {
		c, err := startCrew(ctx, s, way, n, callers)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", way, err)
		}
		if len(c.lost) > 0 {
			return nil, errors.Join(c.lost...)
		}
		crews = append(crews, c)
	}
	return crews, nil
}
