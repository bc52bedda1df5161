package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
)

// peerTTL is what the peers' locks have. Nothing here lasts so long.
const peerTTL = 30 * time.Second

// redisServer keeps nothing on disk, as locks in Redis are mostly kept.
var redisServer = redisWith("without persistence", "--appendonly", "no")

// durableRedis waits for its disk before it answers, as PostgreSQL does for a lease.
// It never rewrites its file: PostgreSQL makes no checkpoint in a slice either.
var durableRedis = redisWith("appendonly yes, appendfsync always", "--appendonly", "yes", "--appendfsync", "always",
	"--auto-aof-rewrite-percentage", "0")

func redisWith(keeps string, flags ...string) *daemon {
	return &daemon{
		called: "Redis", keeps: keeps, script: "redis-tree", program: "redis-server",
		args: func(dir string) []string {
			return append([]string{"--port", "0", "--unixsocket", redisSocket(dir), "--dir", dir, "--save", ""}, flags...)
		},
		ready: func(ctx context.Context, dir string) error {
			client := goRedis(dir)
			return errors.Join(client.Ping(ctx).Err(), client.Close())
		},
	}
}

func redisSocket(dir string) string { return filepath.Join(dir, "redis") }

// goRedis returns a client with as many connections as it makes by itself, 10 for
// each processor: with one for each worker it was slower by up to a third.
func goRedis(dir string) *redis.Client {
	return redis.NewClient(&redis.Options{Network: "unix", Addr: redisSocket(dir)})
}

// goRedisClient starts Redis and returns a client of it, closed after the row.
func (s *stage) goRedisClient(ctx context.Context, server *daemon) (*redis.Client, error) {
	dir, err := s.daemon(ctx, server)
	if err != nil {
		return nil, err
	}
	client := goRedis(dir)
	s.cleanup(client.Close)
	return client, nil
}

func bsmRedislock(server *daemon) func(context.Context, *stage) (op, error) {
	return func(ctx context.Context, s *stage) (op, error) {
		client, err := s.goRedisClient(ctx, server)
		if err != nil {
			return nil, err
		}
		locks := redislock.New(client)
		key := keys("redislock")
		return whole(func(ctx context.Context, _ int) error {
			lock, err := locks.Obtain(ctx, key(), peerTTL, nil)
			if err != nil {
				return err
			}
			return lock.Release(ctx)
		}), nil
	}
}

func redsyncMutex(ctx context.Context, s *stage) (op, error) {
	client, err := s.goRedisClient(ctx, redisServer)
	if err != nil {
		return nil, err
	}
	locks := redsync.New(goredis.NewPool(client))
	key := keys("redsync")
	return whole(func(ctx context.Context, _ int) error {
		mutex := locks.NewMutex(key(), redsync.WithExpiry(peerTTL))
		if err := mutex.TryLockContext(ctx); err != nil {
			return err
		}
		return unlockRedsync(ctx, mutex)
	}), nil
}

func unlockRedsync(ctx context.Context, mutex *redsync.Mutex) error {
	ok, err := mutex.UnlockContext(ctx)
	if err == nil && !ok {
		err = fmt.Errorf("%s was not locked any more", mutex.Name())
	}
	return err
}

// compareAndDelete is what gives a lock in Redis back in the texts that most have
// copied.
var compareAndDelete = rueidis.NewLuaScript("if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0")

// pipelinedRedis is the fastest that a lock in Redis is had without a library for
// locks: what all workers ask for at a time shares a few connections.
func pipelinedRedis(server *daemon) func(context.Context, *stage) (op, error) {
	return func(ctx context.Context, s *stage) (op, error) {
		dir, err := s.daemon(ctx, server)
		if err != nil {
			return nil, err
		}
		client, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress:  []string{redisSocket(dir)},
			DisableCache: true,
			DialCtxFn: func(ctx context.Context, path string, dialer *net.Dialer, _ *tls.Config) (net.Conn, error) {
				return dialer.DialContext(ctx, "unix", path)
			},
		})
		if err != nil {
			return nil, err
		}
		s.cleanup(func() error { client.Close(); return nil })
		key := keys("rueidis")
		return whole(func(ctx context.Context, _ int) error {
			name, holder := key(), rand.Text()
			if err := client.Do(ctx, client.B().Set().Key(name).Value(holder).Nx().PxMilliseconds(peerTTL.Milliseconds()).Build()).Error(); err != nil {
				return err
			}
			deleted, err := compareAndDelete.Exec(ctx, client, []string{name}, []string{holder}).AsInt64()
			if err == nil && deleted != 1 {
				err = fmt.Errorf("%s was not locked any more", name)
			}
			return err
		}), nil
	}
}
