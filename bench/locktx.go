package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock"
)

// locksPerTx is how many keys a transaction locks, one after the other: few
// enough for the server's lock table, whose share of a connection is 64.
const locksPerTx = 32

func lockTx(ctx context.Context, s *stage) (system, peer op, err error) { return lockTxWith(ctx, s) }

func lockTxMaxWait(ctx context.Context, s *stage) (system, peer op, err error) {
	return lockTxWith(ctx, s, pgxlock.MaxWait(time.Second))
}

func lockTxWith(ctx context.Context, s *stage, opts ...pgxlock.LockTxOption) (system, peer op, err error) {
	pool, err := s.installed(ctx, "")
	// What the caller of the bare function has computed already.
	keys := make([][locksPerTx]string, s.workers)
	ids := make([][locksPerTx]int64, s.workers)
	for worker := range s.workers {
		for i := range locksPerTx {
			keys[worker][i] = fmt.Sprintf("order:%d:%d", worker, i)
			ids[worker][i] = pgxlock.AdvisoryID(keys[worker][i])
		}
	}
	system = calls(pool, locksPerTx, func(ctx context.Context, tx pgx.Tx, worker, i int) error {
		return pgxlock.LockTx(ctx, tx, keys[worker][i], opts...)
	})
	peer = calls(pool, locksPerTx, func(ctx context.Context, tx pgx.Tx, worker, i int) error {
		_, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", ids[worker][i])
		return err
	})
	return system, peer, err
}
