package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
)

// leasePair is a pair of leases.
func leasePair(s *stage, pool *pgxpool.Pool) (op, error) {
	locks, err := s.locker(pool, nil)
	return pair(locks), err
}

// keys returns a function that returns a new key each time.
func keys(prefix string) func() string {
	var n atomic.Int64
	return func() string { // one allocation, which counts as the way's
		var room [32]byte
		return string(strconv.AppendInt(append(append(room[:0], prefix...), ':'), n.Add(1), 10))
	}
}

func leaseAndUpserts(ctx context.Context, s *stage) (system, peer op, err error) {
	pool, err := s.installed(ctx, "CREATE TABLE floor (key text PRIMARY KEY, value bigint)")
	if err != nil {
		return nil, nil, err
	}
	system, err = leasePair(s, pool)
	names := s.names("row")
	peer = whole(func(ctx context.Context, worker int) error {
		for value := range 2 {
			_, err := pool.Exec(ctx, "INSERT INTO floor (key, value) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value", names[worker], value)
			if err != nil {
				return err
			}
		}
		return nil
	})
	return system, peer, err
}

func leaseInCrowd(ctx context.Context, s *stage) (system, peer op, err error) {
	ops := make([]op, 2)
	for i, others := range []int{1_000_000, 1_000} {
		var err error
		if ops[i], err = leaseBeside(ctx, s, others); err != nil {
			return nil, nil, err
		}
	}
	return ops[0], ops[1], nil
}

// leaseBeside is a pair of leases in a database that has so many others.
func leaseBeside(ctx context.Context, s *stage, others int) (op, error) {
	pool, err := s.installed(ctx, "")
	if err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, `INSERT INTO distributed_locks (lock_name, holder_id, acquired_at, expires_at, fencing_token)
		SELECT 'other:' || n, 'bench', now(), now() + interval '1 day', 1 FROM generate_series(1, $1::int) n`, others)
	if err != nil {
		return nil, err
	}
	return leasePair(s, pool)
}

func leaseAndSeed(ctx context.Context, s *stage) (system, peer op, err error) {
	pool, err := s.installed(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	if system, err = leasePair(s, pool); err != nil {
		return nil, nil, err
	}
	seed, err := seedDatabase(ctx, s)
	key := keys("seed")
	peer = whole(func(ctx context.Context, worker int) error {
		name, holder := key(), fmt.Sprintf("worker:%d", worker)
		for _, sql := range []string{"SELECT acquire_lock($1, $2, 30)", "SELECT release_lock($1, $2)"} {
			var ok bool
			if err := seed.QueryRow(ctx, sql, name, holder).Scan(&ok); err != nil {
				return err
			}
			if !ok {
				return fmt.Errorf("%s is false for %s", sql, name)
			}
		}
		return nil
	})
	return system, peer, err
}

// seedDatabase has the seed, whose functions are named as ours.
func seedDatabase(ctx context.Context, s *stage) (*pgxpool.Pool, error) {
	path, err := inProject("testdata", "seed.sql")
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool, err := s.database(ctx)
	if err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, string(text))
	return pool, err
}
