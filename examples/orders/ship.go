package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// ship ships the order, if it was not: the claim and the shipment become visible
// together, or not at all. The error is pgxlock.ErrNotAcquired while another
// worker is on the order. It is not known then whether that one will succeed, so
// that the delivery must not be acknowledged.
func (w worker) ship(ctx context.Context, pool *pgxpool.Pool, order int) (first bool, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var err error
		first, err = pgxlock.ClaimTx(ctx, tx, fmt.Sprintf("order:%d:ship", order), pgxlock.NoWait)
		if err != nil || !first {
			return err
		}
		if _, err := tx.Exec(ctx, "INSERT INTO shipments (order_id, worker) VALUES ($1, $2)", order, w.number); err != nil {
			return err
		}
		return w.mishap(tx, order)
	})
	return first && err == nil, err
}

// redelivered is for how long the bus may deliver an order once more. Claims are
// kept that long: without its claim an order would be shipped again.
const redelivered = 7 * 24 * time.Hour

// forget ends claims that nobody will ask for any more.
func forget(ctx context.Context, pool *pgxpool.Pool) (int64, error) {
	return pgxlock.PurgeClaims(ctx, pool, redelivered)
}

// settle puts all shipments that are on no settlement yet on a new one. It is
// called on every node each night; one of them does it, under a lease, and if
// that one freezes for so long that another takes the lease over, it commits
// nothing when it comes back.
func settle(ctx context.Context, locks *pgxlock.Locker, pool *pgxpool.Pool) (shipments int64, err error) {
	err = locks.DoTx(ctx, pool, "orders:settle", func(ctx context.Context, tx pgx.Tx, lock *pgxlock.Lock) error {
		err := tx.QueryRow(ctx, "SELECT count(*) FROM shipments WHERE settlement IS NULL").Scan(&shipments)
		if err != nil || shipments == 0 {
			return err
		}
		_, err = tx.Exec(ctx, `
			WITH new AS (INSERT INTO settlements (shipments, token) VALUES ($1, $2) RETURNING id)
			UPDATE shipments SET settlement = new.id FROM new WHERE settlement IS NULL`, shipments, lock.Token())
		return err
	}, pgxlock.NoWait)
	if errors.Is(err, pgxlock.ErrNotAcquired) {
		return 0, nil // another node is on it
	}
	return shipments, err
}
