package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// A claimer says in a transaction whether it is the first one with this key.
type claimer func(ctx context.Context, tx pgx.Tx, key string) (first bool, err error)

// claimTx is what stands against insert, without options.
func claimTx(ctx context.Context, tx pgx.Tx, key string) (bool, error) {
	return pgxlock.ClaimTx(ctx, tx, key)
}

func insert(ctx context.Context, tx pgx.Tx, key string) (bool, error) {
	tag, err := tx.Exec(ctx, "INSERT INTO floor (key) VALUES ($1) ON CONFLICT DO NOTHING", key)
	return tag.RowsAffected() == 1, err
}

func claimNew(ctx context.Context, s *stage) (system, peer op, err error) {
	pool, err := claimPool(ctx, s)
	key := keys("claim")
	claim := func(c claimer) op {
		return inTx(pool, func(ctx context.Context, tx pgx.Tx, _ int) error { return c.expect(ctx, tx, key(), true) })
	}
	return claim(claimTx), claim(insert), err
}

func claimTaken(ctx context.Context, s *stage) (system, peer op, err error) {
	pool, err := claimPool(ctx, s)
	if err != nil {
		return nil, nil, err
	}
	taken := s.names("taken")
	claim := func(c claimer) (op, error) {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for _, key := range taken {
				if err := c.expect(ctx, tx, key, true); err != nil {
					return err
				}
			}
			return nil
		})
		return inTx(pool, func(ctx context.Context, tx pgx.Tx, worker int) error {
			return c.expect(ctx, tx, taken[worker], false)
		}), err
	}
	if system, err = claim(claimTx); err != nil {
		return nil, nil, err
	}
	peer, err = claim(insert)
	return system, peer, err
}

func claimPool(ctx context.Context, s *stage) (*pgxpool.Pool, error) {
	return s.installed(ctx, "CREATE TABLE floor (key text PRIMARY KEY)")
}

// expect claims, and wants this answer.
func (c claimer) expect(ctx context.Context, tx pgx.Tx, key string, want bool) error {
	first, err := c(ctx, tx, key)
	if err == nil && first != want {
		err = fmt.Errorf("the claim of %s is the first one: %t", key, first)
	}
	return err
}
