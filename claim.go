package pgxlock

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/sql"
)

// A claim is a key that exactly one committed transaction has, together with all else that the
// transaction wrote: for work that must be done once. It may keep the answer to a request.

// ClaimTx lets exactly one transaction commit the claim of a key, for work that must be done
// once, such as an order that may be delivered twice. It returns true if tx has the claim: do
// the work in tx and commit. The claim and what tx writes become visible together, or not at
// all. It returns false if another transaction has committed its claim: the work is done. A
// second call in the same transaction returns true again. The claim is a row that lasts until
// its [Retention] is over or [PurgeClaims] removes it: call that now and then, or give a
// Retention. It does not conflict with locks on the key.
//
// While another transaction has claimed the key and has not ended, ClaimTx waits for its end.
// [MaxWait] bounds this wait, and with [NoWait] the call hardly waits. If the wait ends first,
// or if somebody has the table locked for that long, the error is [ErrNotAcquired], and tx can
// go on: whether the work will be done is not known yet, try again later. Any other error
// aborts tx:
//
//   - SQLSTATE 40001 above READ COMMITTED, if the key was claimed since the snapshot; in
//     SERIALIZABLE also because of other keys
//   - SQLSTATE 40P01, which matches [ErrDeadlock], if transactions claim the same keys in
//     different orders without MaxWait
//   - [ErrReadOnly], and [ErrSchema] without the migrations
//   - the end of ctx during a wait, as in [LockTx]
//
// Rolling back to a savepoint undoes the claims made after it. A call with MaxWait begins
// subtransactions, of which PostgreSQL handles a few dozen per transaction well.
func ClaimTx(ctx context.Context, tx pgx.Tx, key string, opts ...ClaimTxOption) (first bool, err error) {
	return claimTx(ctx, usertx.Pgx(tx), key, opts)
}

// ClaimSQLTx is [ClaimTx] for database/sql.
func ClaimSQLTx(ctx context.Context, tx SQLTx, key string, opts ...ClaimTxOption) (first bool, err error) {
	return claimTx(ctx, usertx.SQL(tx), key, opts)
}

func claimTx(ctx context.Context, tx usertx.Tx, key string, opts []ClaimTxOption) (first bool, err error) {
	return claim(ctx, tx, "claim", key, opts, func(o *options) (usertx.Reply, error) {
		return tx.Run(ctx, statements.TxClaim.In(o.schema), key, seconds(o.bound()), seconds(o.retention))
	})
}

// AnswerTx answers a request once, such as a POST that clients repeat when they got no
// response. It claims the key as [ClaimTx] does, with the same waits and errors. If tx has the
// claim, AnswerTx calls fn, which does the work in tx and must not end it, stores what fn
// returns, and returns it: commit, or roll back after an error, and nothing is left. Otherwise
// it returns the stored answer, of a transaction that has committed or of tx itself.
//
// If the key was claimed by ClaimTx, or for another request, which AnswerTx knows by its
// SHA-256, the error is [ErrOtherRequest], and tx can go on. An answer has at most 1 MiB, and
// lasts until its Retention is over, however old: [PurgeClaims] does not remove one that has
// none.
func AnswerTx(ctx context.Context, tx pgx.Tx, key string, request []byte, fn func() ([]byte, error), opts ...ClaimTxOption) ([]byte, error) {
	return answerTx(ctx, usertx.Pgx(tx), key, request, fn, opts)
}

// AnswerSQLTx is [AnswerTx] for database/sql.
func AnswerSQLTx(ctx context.Context, tx SQLTx, key string, request []byte, fn func() ([]byte, error), opts ...ClaimTxOption) ([]byte, error) {
	return answerTx(ctx, usertx.SQL(tx), key, request, fn, opts)
}

const maxAnswer = 1 << 20

func answerTx(ctx context.Context, tx usertx.Tx, key string, request []byte, fn func() ([]byte, error), opts []ClaimTxOption) (answer []byte, err error) {
	if fn == nil {
		return nil, failClaim("answer", key, errNilFn)
	}
	fingerprint := fmt.Sprintf("%x", sha256.Sum256(request))
	var schema string
	first, err := claim(ctx, tx, "answer", key, opts, func(o *options) (usertx.Reply, error) {
		schema = o.schema
		args := []any{key, fingerprint, seconds(o.bound()), seconds(o.retention)}
		for {
			got, err := tx.Run(ctx, statements.TxClaimRequest.In(schema), args...)
			if err != nil || got != answered {
				return got, err
			}
			err = tx.Row(ctx, statements.TxReadAnswer.In(schema), &answer, args...)
			if err != nil || answer != nil { // nil: the claim has ended in between
				return got, err
			}
		}
	})
	if err != nil || !first {
		return answer, err
	}
	if answer, err = fn(); err != nil {
		return nil, err
	}
	if len(answer) > maxAnswer {
		err = fmt.Errorf("the answer has %d bytes, %d are allowed; store it elsewhere, and answer with where it is", len(answer), maxAnswer)
	} else {
		_, err = tx.Run(ctx, statements.TxAnswerRequest.In(schema), key, fingerprint, answer)
	}
	if err != nil {
		return nil, failClaim("answer", key, err)
	}
	return answer, nil
}

// The replies about claims beside usertx.Refused and usertx.Granted.
const (
	answered usertx.Reply = iota + 2 // or only claimed, by another transaction
	otherRequest
)

// claim checks the arguments, asks, and returns whether tx has the claim.
func claim(ctx context.Context, tx usertx.Tx, op, key string, opts []ClaimTxOption, ask func(*options) (usertx.Reply, error)) (first bool, err error) {
	if err = lockerr.MissingContext(ctx); err == nil && tx == nil {
		err = errNilTx
	}
	var o options
	if err = cmp.Or(err, collect(&o, opts), lockkey.Check(key)); err != nil {
		return false, failClaim(op, key, err)
	}
	began := time.Now()
	got, err := ask(&o)
	switch {
	case err != nil:
	case got == usertx.Refused:
		err = fmt.Errorf("%w: another open transaction has claimed it, or has the table locked", ErrNotAcquired)
	case got == otherRequest:
		err = fmt.Errorf("%w, or by a transaction that stored no answer", ErrOtherRequest)
	}
	err = failClaim(op, key, err)
	first = err == nil && got == usertx.Granted
	o.observeTx(ctx, Event{Op: EventClaim, Key: key, Granted: first, Err: err}, began)
	return first, err
}

// purgeBatch is how many claims one transaction ends.
const purgeBatch = 10_000

// PurgeClaims removes claims without a [Retention] that were made more than olderThan ago, and
// claims whose Retention is over. Then the work can be done again: choose olderThan longer than
// the latest possible repetition of a request. PurgeClaims works in transactions of 10,000
// claims, skips claims that another purge has locked, and returns the number of removed claims,
// also with an error.
func PurgeClaims(ctx context.Context, pool *pgxpool.Pool, olderThan time.Duration, opts ...Schema) (int64, error) {
	ended, err := purgeClaims(ctx, pool, olderThan, opts)
	return ended, failClaim("purge claims", "", err)
}

// PurgeClaimsSQLTx removes, as PurgeClaims does, up to 10,000 claims in tx, and returns how
// many. If that is 10,000, call it again in another transaction.
func PurgeClaimsSQLTx(ctx context.Context, tx SQLTx, olderThan time.Duration, opts ...Schema) (int64, error) {
	ended, err := purgeClaimsTx(ctx, usertx.SQL(tx), olderThan, opts)
	return ended, failClaim("purge claims", "", err)
}

func purgeClaimsTx(ctx context.Context, tx usertx.Tx, olderThan time.Duration, opts []Schema) (ended int64, err error) {
	if err := lockerr.MissingContext(ctx); err != nil {
		return 0, err
	}
	if tx == nil {
		return 0, errNilTx
	}
	var o options
	if err := cmp.Or(checkAge(olderThan), collect(&o, opts)); err != nil {
		return 0, err
	}
	err = tx.Row(ctx, statements.TxPurgeClaims.In(o.schema), &ended, olderThan.Seconds(), purgeBatch)
	return ended, lockerr.OnStandby(err)
}

func checkAge(olderThan time.Duration) error {
	if olderThan < 0 {
		return fmt.Errorf("olderThan is %s, it must be 0 or more", olderThan)
	}
	return nil
}

func purgeClaims(ctx context.Context, pool *pgxpool.Pool, olderThan time.Duration, opts []Schema) (ended int64, err error) {
	if err := lockerr.MissingContext(ctx); err != nil {
		return 0, err
	}
	if pool == nil {
		return 0, errors.New("the pool is nil; make one with pgxpool.New")
	}
	var o options
	if err := cmp.Or(checkAge(olderThan), collect(&o, opts)); err != nil {
		return 0, err
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Release()
	in := dbconn.Installation{Asked: o.schema, Config: "pgxlock"}
	if err := in.Find(ctx, dbconn.Querier{Conn: conn.Conn()}); err != nil {
		return 0, err
	}
	for batch := int64(purgeBatch); err == nil && batch == purgeBatch; ended += batch {
		// Whatever the transactions of the role default to.
		err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, in.Statement(statements.TxPurgeClaims), olderThan.Seconds(), purgeBatch).Scan(&batch)
		})
		if err != nil {
			err, batch = lockerr.OnStandby(err), 0
		}
	}
	return ended, err
}

// failClaim is [fail] for claims, whose functions are found as the caller's are.
func failClaim(op, key string, err error) error {
	if errors.Is(lockerr.Typed(err), ErrSchema) {
		err = fmt.Errorf("%w; claims need the migrations, on the search_path or in the option Schema", err)
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
