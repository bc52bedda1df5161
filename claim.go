package pgxlock

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/sql"
)

// A claim is a key that exactly one committed transaction has, together with all else that the
// transaction wrote: for work that must be done once.

// ClaimTx reports whether tx is the one transaction that may do what the key
// names, such as an order that must be processed once. It returns true to
// exactly one transaction that commits, until the claim is purged or its
// [Retention] is over; the claim and what that transaction writes become
// visible together, or not at all. False means that another one's claim has
// committed: the work is done. Asked again, the same transaction gets true again.
//
// While another transaction has claimed the key and not ended, ClaimTx waits for
// what becomes of it; [MaxWait] bounds that, and with [NoWait] it hardly waits.
// When the wait is over (or somebody has the table locked for as long) the error
// is [ErrNotAcquired], and it is not known whether the work will be done: try
// again later. tx can go on then. After other errors it is aborted: above READ
// COMMITTED 40001, if the key was claimed since the snapshot, in SERIALIZABLE also
// because of other keys; 40P01, which matches [ErrDeadlock], if transactions
// claim, without MaxWait, the same keys in different orders; [ErrReadOnly];
// [ErrSchema], without the migrations. A wait that ends with
// ctx ends tx, as in [LockTx].
//
// Claims have names of their own: a lock on the same key is another thing. They
// are rows of the table pgxlock_claims, which no housekeeping touches: have
// [PurgeClaims] called now and then, or give a Retention. A claim in a savepoint
// that is rolled back is undone with it. A call with MaxWait begins a
// subtransaction, and one more for each turn of its wait; PostgreSQL handles a few
// dozen per transaction well.
//
// In other languages it is SELECT claim_once('key'). Without [Schema] the
// transaction's search_path says where that is.
func ClaimTx(ctx context.Context, tx pgx.Tx, key string, opts ...Option) (first bool, err error) {
	first, err = claimTx(ctx, usertx.Pgx(tx), key, opts)
	return first, failClaim("claim", key, err)
}

// ClaimSQLTx is [ClaimTx] for database/sql, with any driver of PostgreSQL; what
// went wrong is told apart if its errors have a method SQLState, as those of pgx
// and lib/pq do. When ctx ends during the wait both close the connection.
func ClaimSQLTx(ctx context.Context, tx *sql.Tx, key string, opts ...Option) (first bool, err error) {
	first, err = claimTx(ctx, usertx.SQL(tx), key, opts)
	return first, failClaim("claim", key, err)
}

func claimTx(ctx context.Context, tx usertx.Tx, key string, opts []Option) (bool, error) {
	if err := lockerr.MissingContext(ctx); err != nil {
		return false, err
	}
	if tx == nil {
		return false, errNilTx
	}
	var o options
	if err := cmp.Or(o.collect(opts, takenByClaim), lockkey.Check(key)); err != nil {
		return false, err
	}
	var claimed *bool
	err := tx.Row(ctx, statements.TxClaim.In(o.schema), &claimed, key, seconds(o.wait), seconds(o.retention))
	switch {
	case err != nil:
		return false, err
	case claimed == nil:
		return false, fmt.Errorf("%w: another transaction has claimed it and not ended, or has the table locked", ErrNotAcquired)
	}
	return *claimed, nil
}

// takenByClaim tells which options a claim takes.
func takenByClaim(opt Option) bool {
	switch opt.(type) {
	case MaxWait, Retention, Schema:
		return true
	}
	return false
}

// purgeBatch is how many claims one transaction ends.
const purgeBatch = 10_000

// PurgeClaims ends claims without a [Retention] that were made more than
// olderThan ago, and those whose Retention is over. What they stood for can be
// claimed, and so be done, again: choose olderThan longer than anything can be
// delivered late. It works in transactions of 10,000 claims, skips claims that
// another purge has locked, and returns how many it ended, also with an error.
// Of the options it takes [Schema].
func PurgeClaims(ctx context.Context, pool *pgxpool.Pool, olderThan time.Duration, opts ...Option) (int64, error) {
	ended, err := purgeClaims(ctx, pool, olderThan, opts)
	return ended, failClaim("purge claims", "", err)
}

func purgeClaims(ctx context.Context, pool *pgxpool.Pool, olderThan time.Duration, opts []Option) (ended int64, err error) {
	if err := lockerr.MissingContext(ctx); err != nil {
		return 0, err
	}
	if pool == nil {
		return 0, errors.New("the pool is nil; make one with pgxpool.New")
	}
	if olderThan < 0 {
		return 0, fmt.Errorf("olderThan is %s, it must be 0 or more", olderThan)
	}
	var o options
	err = o.collect(opts, func(opt Option) bool { _, ok := opt.(Schema); return ok })
	for batch := int64(purgeBatch); err == nil && batch == purgeBatch; ended += batch {
		batch = 0
		err = pool.QueryRow(ctx, statements.TxPurgeClaims.In(o.schema), olderThan.Seconds(), purgeBatch).Scan(&batch)
	}
	return ended, err
}

// failClaim is [fail] for claims, whose functions are found as the caller's are.
func failClaim(op, key string, err error) error {
	if errors.Is(lockerr.Typed(err), ErrSchema) {
		err = fmt.Errorf("%w; claims need the migrations, on the search_path or in the schema that is named", err)
	}
	return fail(op, key, 0, err)
}

// seconds is what the statements take; NULL for nil.
func seconds(d *time.Duration) *float64 {
	if d == nil {
		return nil
	}
	s := d.Seconds()
	return &s
}
