package main

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// pairsOf prepares a way of a Locker's, in a database of its own.
func pairsOf(newLocker func(*pgxpool.Pool) (*pgxlock.Locker, error)) func(context.Context, *stage) (op, error) {
	return func(ctx context.Context, s *stage) (op, error) {
		pool, err := s.installed(ctx, "")
		if err != nil {
			return nil, err
		}
		locks, err := newLocker(pool)
		if err != nil {
			return nil, err
		}
		return pair(s.closing(locks)), nil
	}
}

func newLease(pool *pgxpool.Pool) (*pgxlock.Locker, error) { return pgxlock.NewLeaseLocker(pool, nil) }

// newSession has room for one lock of each of the most workers.
func newSession(pool *pgxpool.Pool) (*pgxlock.Locker, error) {
	return pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{MaxLocks: 1100})
}

func newTokens(pool *pgxpool.Pool) (*pgxlock.Locker, error) {
	return pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{MaxLocks: 1100, Tokens: true})
}

// pair is an op that takes a lock and gives it back, under another key each time.
func pair(locks *pgxlock.Locker) op {
	key := keys("pair")
	return whole(func(ctx context.Context, _ int) error {
		lock, err := locks.TryAcquire(ctx, key())
		if err != nil {
			return err
		}
		return lock.Release(ctx)
	})
}

// twoSelects is the floor of a pair that PostgreSQL is asked for in two round
// trips.
func twoSelects(ctx context.Context, s *stage) (op, error) {
	pool, err := s.database(ctx)
	if err != nil {
		return nil, err
	}
	return whole(func(ctx context.Context, _ int) error {
		for range 2 {
			var one int
			if err := pool.QueryRow(ctx, "SELECT 1").Scan(&one); err != nil {
				return err
			}
		}
		return nil
	}), nil
}
