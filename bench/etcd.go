package main

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

// etcdServer is one member; it waits for its disk as it does by default. What it
// advertises is for other members and needs no listener.
var etcdServer = &daemon{
	called: "etcd", keeps: "1 member, fsync on", script: "etcd-tree", program: "etcd",
	args: func(dir string) []string {
		return []string{
			"--name", "bench", "--data-dir", filepath.Join(dir, "data"), "--log-level", "error",
			"--listen-client-urls", etcdURL(dir, "client"), "--advertise-client-urls", "unix://localhost:0",
			"--listen-peer-urls", etcdURL(dir, "peer"), "--initial-advertise-peer-urls", "unix://localhost:0",
			"--initial-cluster", "bench=unix://localhost:0",
		}
	},
	ready: func(ctx context.Context, dir string) error {
		client, err := etcdClient(dir)
		if err != nil {
			return err
		}
		_, err = client.Get(ctx, "ready")
		return errors.Join(err, client.Close())
	},
}

// etcdURL names a socket. etcd wants something that looks like a port.
func etcdURL(dir, name string) string { return "unix://" + filepath.Join(dir, name) + ":0" }

func etcdClient(dir string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints: []string{etcdURL(dir, "client")}, DialTimeout: time.Second,
		Logger: zap.NewNop(), // what fails is returned
	})
}

// etcdMutex has all workers share a session, which is one lease of etcd's, as the
// locks of a Locker share its connections.
func etcdMutex(ctx context.Context, s *stage) (op, error) {
	dir, err := s.daemon(ctx, etcdServer)
	if err != nil {
		return nil, err
	}
	client, err := etcdClient(dir)
	if err != nil {
		return nil, err
	}
	s.cleanup(client.Close)
	session, err := concurrency.NewSession(client, concurrency.WithTTL(int(peerTTL.Seconds())))
	if err != nil {
		return nil, err
	}
	s.cleanup(session.Close)
	key := keys("etcd")
	return whole(func(ctx context.Context, _ int) error {
		mutex := concurrency.NewMutex(session, key())
		if err := mutex.TryLock(ctx); err != nil {
			return err
		}
		return mutex.Unlock(ctx)
	}), nil
}
