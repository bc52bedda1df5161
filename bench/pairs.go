package main

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// lockerOf makes a Locker on a pool.
type lockerOf func(*pgxpool.Pool) (*pgxlock.Locker, error)

// pairsOf prepares a way of a Locker's, in a database of its own.
func pairsOf(newLocker lockerOf) func(context.Context, *stage) (op, error) {
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

// leaseWith makes Lockers of leases that are configured so.
func leaseWith(cfg *pgxlock.LeaseConfig) lockerOf {
	return func(pool *pgxpool.Pool) (*pgxlock.Locker, error) { return pgxlock.NewLeaseLocker(pool, cfg) }
}

// newSession has room for one lock of each of the most workers.
func newSession(pool *pgxpool.Pool) (*pgxlock.Locker, error) {
	return pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{MaxLocks: 1100})
}

func newTokens(pool *pgxpool.Pool) (*pgxlock.Locker, error) {
	return pgxlock.NewAdvisoryLocker(pool, &pgxlock.AdvisoryConfig{MaxLocks: 1100, Tokens: true})
}

// pair is an op that takes a lock and gives it back, under another key each time.
func pair(locks *pgxlock.Locker) op { return pairUnder(locks, "pair") }

// pairUnder is as pair, with keys that begin with a prefix.
func pairUnder(locks *pgxlock.Locker, prefix string) op {
	key := keys(prefix)
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
	return selectTwice(pool), nil
}

func selectTwice(pool *pgxpool.Pool) op {
	return whole(func(ctx context.Context, _ int) error {
		for range 2 {
			var one int
			if err := pool.QueryRow(ctx, "SELECT 1").Scan(&one); err != nil {
				return err
			}
		}
		return nil
	})
}

func advisoryOverTCP(ctx context.Context, s *stage) (system, peer op, err error) {
	pool, err := s.databaseAt(ctx, s.server.TCPURL)
	if err != nil {
		return nil, nil, err
	}
	locks, err := newSession(pool)
	if err != nil {
		return nil, nil, err
	}
	return pair(s.closing(locks)), selectTwice(pool), nil
}
