package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// A guard makes a transaction safe from a late holder.
type guard func(ctx context.Context, tx pgx.Tx, worker int) error

// guards returns the fence and what does the same by hand. Each has leases of its
// own, because both leave traces on the rows.
func guards(ctx context.Context, s *stage, shared bool) (pool *pgxpool.Pool, fence, rowLock guard, err error) {
	pool, err = s.installed(ctx, "CREATE TABLE written (worker bigint)")
	if err != nil {
		return nil, nil, nil, err
	}
	// Renewals are not what is measured here.
	locks, err := s.locker(pool, &pgxlock.LeaseConfig{TTL: time.Hour})
	if err != nil {
		return nil, nil, nil, err
	}
	fenced, err := acquire(ctx, locks, s.names("fenced"), shared)
	if err != nil {
		return nil, nil, nil, err
	}
	locked, err := acquire(ctx, locks, s.names("locked"), shared)
	fence = func(ctx context.Context, tx pgx.Tx, worker int) error {
		return fenced[worker].Fence(ctx, tx)
	}
	rowLock = func(ctx context.Context, tx pgx.Tx, worker int) error {
		var token int64
		return tx.QueryRow(ctx, "SELECT fencing_token FROM distributed_locks WHERE lock_name = $1 FOR KEY SHARE", locked[worker].Key()).Scan(&token)
	}
	return pool, fence, rowLock, err
}

// acquire returns a lock for each name; if they are shared, always the first.
func acquire(ctx context.Context, locks *pgxlock.Locker, names []string, shared bool) ([]*pgxlock.Lock, error) {
	held := make([]*pgxlock.Lock, len(names))
	for i, name := range names {
		if shared && i > 0 {
			held[i] = held[0]
			continue
		}
		var err error
		if held[i], err = locks.TryAcquire(ctx, name); err != nil {
			return nil, err
		}
	}
	return held, nil
}

func fencedTx(ctx context.Context, s *stage) (system, peer op, err error) {
	return guardedTxs(ctx, s, false)
}

func fencedTxShared(ctx context.Context, s *stage) (system, peer op, err error) {
	return guardedTxs(ctx, s, true)
}

func fenceCall(ctx context.Context, s *stage) (system, peer op, err error) {
	return guardCalls(ctx, s, false)
}

func fenceCallShared(ctx context.Context, s *stage) (system, peer op, err error) {
	return guardCalls(ctx, s, true)
}

func guardedTxs(ctx context.Context, s *stage, shared bool) (system, peer op, err error) {
	pool, fence, rowLock, err := guards(ctx, s, shared)
	write := func(g guard) op {
		return inTx(pool, func(ctx context.Context, tx pgx.Tx, worker int) error {
			if err := g(ctx, tx, worker); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "INSERT INTO written (worker) VALUES ($1)", worker)
			return err
		})
	}
	return write(fence), write(rowLock), err
}

func guardCalls(ctx context.Context, s *stage, shared bool) (system, peer op, err error) {
	pool, fence, rowLock, err := guards(ctx, s, shared)
	call := func(g guard) op {
		return calls(pool, 1, func(ctx context.Context, tx pgx.Tx, worker, _ int) error { return g(ctx, tx, worker) })
	}
	return call(fence), call(rowLock), err
}
