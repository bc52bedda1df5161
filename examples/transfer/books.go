package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// schema is the example's own; the pool's search_path is set to it.
const schema = "transfer_example"

//go:embed tables.sql
var tables string

// openAccounts makes new tables, with accounts from 0 to n-1 that all hold the
// same.
func openAccounts(ctx context.Context, pool *pgxpool.Pool, n int, opening int64) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE; CREATE SCHEMA "+schema+"; "+tables)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `
			WITH opened AS (INSERT INTO accounts SELECT generate_series(0, $1 - 1) RETURNING id)
			INSERT INTO entries (account, amount) SELECT id, $2 FROM opened`, n, opening)
		return err
	})
}

// books are the sums that must be right.
type books struct {
	total     int64 // in all accounts together
	lowest    int64 // in the poorest one
	made      int   // transfers, each of which took money from one account
	postponed int
}

func readBooks(ctx context.Context, pool *pgxpool.Pool) (b books, err error) {
	err = pool.QueryRow(ctx, `
		SELECT sum(balance)::bigint, min(balance)::bigint, sum(taken), (SELECT count(*) FROM postponed)
		  FROM (SELECT sum(amount) AS balance, count(*) FILTER (WHERE amount < 0) AS taken FROM entries GROUP BY account) a`).
		Scan(&b.total, &b.lowest, &b.made, &b.postponed)
	return b, err
}

// check compares the books with what the workers say they did.
func (l load) check(b books, done tally) error {
	var errs []error
	if want := int64(l.accounts) * l.opening; b.total != want {
		errs = append(errs, fmt.Errorf("the accounts hold %d together, and held %d", b.total, want))
	}
	if b.lowest < 0 {
		errs = append(errs, fmt.Errorf("an account is overdrawn: it holds %d", b.lowest))
	}
	if b.made != done.made || b.postponed != done.postponed {
		errs = append(errs, fmt.Errorf("%d transfers are entered and %d postponed, the workers made %d and postponed %d",
			b.made, b.postponed, done.made, done.postponed))
	}
	return errors.Join(errs...)
}
