package main

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
)

// rivals take the lock of a key as another program would, by the name of the way.
var rivals = map[string]func(t *testing.T, s *stage, key string) error{
	"lease":           ofLocker(leaseWith(nil)),
	"lease-async":     ofLocker(leaseWith(&pgxlock.LeaseConfig{Durability: pgxlock.Async})),
	"advisory":        ofLocker(newSession),
	"advisory+tokens": ofLocker(newTokens),
	"redislock":       inRedis(redisServer),
	"redsync":         inRedis(redisServer),
	"rueidis":         inRedis(redisServer),
	"redislock-aof":   inRedis(durableRedis),
	"rueidis-aof":     inRedis(durableRedis),
	"etcd":            inEtcd,
}

var errTaken = errors.New("it is taken")

func ofLocker(newLocker lockerOf) func(*testing.T, *stage, string) error {
	return func(t *testing.T, s *stage, key string) error {
		locks, err := newLocker(s.pools[0])
		if err != nil {
			t.Fatal(err)
		}
		_, err = s.closing(locks).TryAcquire(t.Context(), key)
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			return errTaken
		}
		return err
	}
}

func inRedis(server *daemon) func(*testing.T, *stage, string) error {
	return func(t *testing.T, s *stage, key string) error {
		client := goRedis(s.daemons[server])
		defer client.Close()
		set, err := client.SetNX(t.Context(), key, "a rival", peerTTL).Result()
		if err == nil && !set {
			err = errTaken
		}
		return err
	}
}

func inEtcd(t *testing.T, s *stage, key string) error {
	client, err := etcdClient(s.daemons[etcdServer])
	if err != nil {
		t.Fatal(err)
	}
	s.cleanup(client.Close)
	session, err := concurrency.NewSession(client)
	if err != nil {
		t.Fatal(err)
	}
	err = concurrency.NewMutex(session, key).TryLock(t.Context())
	if errors.Is(err, concurrency.ErrLocked) {
		err = errTaken
	}
	return err
}

// prefixes are what keys of a way begin with, if not with its name.
var prefixes = map[string]string{
	"lease": "pair", "lease-async": "pair", "advisory": "pair", "advisory+tokens": "pair", "redislock-aof": "redislock", "rueidis-aof": "rueidis",
}

func TestEachWayTakesAndReleasesLocks(t *testing.T) {
	rows := rowsMatching(matchAll)
	if _, err := findDaemons(t.Context(), rows, nil); err != nil {
		t.Fatal(err)
	}
	err := withServer(t.Context(), pgserver.Config{TCP: true}, 0, func(server *pgserver.Server) error {
		for _, table := range tables {
			for _, c := range table.contestants {
				if c.name == "floor" {
					continue // it takes no locks
				}
				t.Run(c.name, func(t *testing.T) { takesAndReleases(t, server, c) })
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func takesAndReleases(t *testing.T, server *pgserver.Server, c contestant) {
	if c.needs != nil && c.needs.path == "" {
		t.Skip(c.needs.missing)
	}
	s := newStage(server, 2)
	defer func() {
		if err := s.clear(); err != nil {
			t.Error(err)
		}
	}()
	do, err := c.prepare(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	rival := rivals[c.name]
	if rival == nil {
		t.Fatalf("there is no rival of %s", c.name)
	}
	prefix := prefixes[c.name]
	if prefix == "" {
		prefix = c.name
	}
	taken, free := prefix+":1", prefix+":2"
	if err := rival(t, s, taken); err != nil {
		t.Fatalf("the rival of %s: %v", taken, err)
	}
	if err := rival(t, s, taken); !errors.Is(err, errTaken) {
		t.Fatalf("a second rival of %s: %v", taken, err)
	}
	if n, _, err := do(t.Context(), 0); err == nil {
		t.Errorf("%d locks of %s are taken twice", n, taken)
	}
	if n, _, err := do(t.Context(), 0); n != 1 || err != nil {
		t.Errorf("%d locks of %s: %v", n, free, err)
	}
	if err := rival(t, s, free); err != nil {
		t.Errorf("%s was not released: %v", free, err)
	}
}

// A way's server is busy while its op runs: the row measures the right process.
func TestEachWayKeepsItsOwnServerBusy(t *testing.T) {
	if !canCountServers {
		t.Skip("no server can be counted here")
	}
	if _, err := findDaemons(t.Context(), rowsMatching(matchAll), nil); err != nil {
		t.Fatal(err)
	}
	err := withServer(t.Context(), pgserver.Config{TCP: true}, 0, func(server *pgserver.Server) error {
		for _, table := range tables {
			s := newStage(server, 4)
			var names []string
			for _, c := range table.contestants {
				names = append(names, c.name)
			}
			ways, err := table.prepare(t.Context(), s, names)
			if err != nil {
				return err
			}
			pids := make(map[int]bool)
			for _, w := range ways {
				pids[w.server] = true
				used, all := usage{}, 0
				for used.server == 0 || used.client == 0 {
					did, err := w.run(t.Context(), 4, 10*time.Millisecond)
					if err != nil {
						return errors.Join(fmt.Errorf("%s: %w", w.name, err), s.clear())
					}
					used, all = used.plus(did.used), all+did.all
				}
				t.Logf("%s: %d operations, client %s, server %s", w.name, all, used.client, used.server)
			}
			if len(pids) != 1+len(s.pids) {
				t.Errorf("%d processes are counted for PostgreSQL and %d others", len(pids), len(s.pids))
			}
			if err := s.clear(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestDurableRedisSyncsEachWrite(t *testing.T) {
	if err := durableRedis.find(t.Context()); err != nil {
		t.Fatal(err)
	}
	if durableRedis.path == "" {
		t.Skip(durableRedis.missing)
	}
	err := withServer(t.Context(), pgserver.Config{TCP: true}, 0, func(server *pgserver.Server) error {
		s := newStage(server, 1)
		client, err := s.goRedisClient(t.Context(), durableRedis)
		if err != nil {
			return err
		}
		for name, want := range map[string]string{"appendonly": "yes", "appendfsync": "always"} {
			if got, err := client.ConfigGet(context.Background(), name).Result(); err != nil || got[name] != want {
				t.Errorf("%s is %q: %v", name, got[name], err)
			}
		}
		return s.clear()
	})
	if err != nil {
		t.Error(err)
	}
}
