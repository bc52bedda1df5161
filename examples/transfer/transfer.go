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

var errNotEnough = errors.New("not enough money in the account")

// inReadCommitted is said and not left to the default: what is read under the
// lock must show what its previous holder committed.
var inReadCommitted = pgx.TxOptions{IsoLevel: pgx.ReadCommitted}

// transfer moves money from one account to another, or fails and moves nothing.
func transfer(ctx context.Context, pool *pgxpool.Pool, from, to int, amount int64) error {
	return pgx.BeginTxFunc(ctx, pool, inReadCommitted, func(tx pgx.Tx) error {
		if err := lockAccounts(ctx, tx, from, to); err != nil {
			return err
		}
		return move(ctx, tx, from, to, amount)
	}) // committed or rolled back, the accounts are unlocked
}

// transferOrPostpone is transfer for those who cannot wait for long. If an
// account is busy for all of patience it writes down what is to be done instead,
// in the same transaction: that one is as good as before. moved tells which.
func transferOrPostpone(ctx context.Context, pool *pgxpool.Pool, from, to int, amount int64, patience time.Duration) (moved bool, err error) {
	err = pgx.BeginTxFunc(ctx, pool, inReadCommitted, func(tx pgx.Tx) error {
		err := lockAccounts(ctx, tx, from, to, pgxlock.MaxWait(patience))
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			_, err := tx.Exec(ctx, "INSERT INTO postponed (sender, receiver, amount) VALUES ($1, $2, $3)", from, to, amount)
			return err
		}
		if err != nil {
			return err
		}
		moved = true
		return move(ctx, tx, from, to, amount)
	})
	return moved && err == nil, err
}

// lockAccounts locks both accounts until tx ends. Asked for in one call, they
// are locked in the same order by everybody: two transfers in opposite directions
// do not deadlock.
func lockAccounts(ctx context.Context, tx pgx.Tx, from, to int, opts ...pgxlock.LockTxOption) error {
	return pgxlock.LockAllTx(ctx, tx, []string{accountKey(from), accountKey(to)}, opts...)
}

// accountKey is the name of an account's lock, for every program that writes
// entries of it.
func accountKey(id int) string { return fmt.Sprintf("account:%d", id) }

// move looks whether there is enough money, and then moves it. In between nobody
// else may take any: the caller has locked the accounts.
func move(ctx context.Context, tx pgx.Tx, from, to int, amount int64) error {
	var balance int64
	if err := tx.QueryRow(ctx, "SELECT coalesce(sum(amount), 0)::bigint FROM entries WHERE account = $1", from).Scan(&balance); err != nil {
		return err
	}
	if balance < amount {
		return fmt.Errorf("account %d holds %d, %d are asked for: %w", from, balance, amount, errNotEnough)
	}
	_, err := tx.Exec(ctx, "INSERT INTO entries (account, amount) VALUES ($1, -$3::bigint), ($2, $3)", from, to, amount)
	return err
}
