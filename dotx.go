package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// DoTx is the common case: one fenced transaction under a lock.

// DoTx acquires the lock as [Locker.Do] does, begins a transaction on the pool,
// fences it with [Lock.Fence], calls fn, commits and releases. If it returns nil,
// what fn wrote in tx is committed, and nobody else was granted the lock before;
// fn's context ends when the lock is lost or ctx ends. If it returns an error
// nothing of tx is committed, unless that error came from the commit itself and
// the connection died with it: then it is not known, as with every commit.
//
// fn writes through tx alone: what it does elsewhere, through the pool for one, is neither
// fenced nor rolled back. It returns the error of a statement that failed, for that has
// aborted tx; after one in a savepoint (tx.Begin) it can go on. It must not commit
// or roll back tx, release the lock, or use tx after it has returned. The transaction
// is open while fn runs: slow work belongs before it, in [Locker.Do] with [Lock.Fence].
//
// Options are those of Acquire, and [TxOptions] and [Retries]: with Retries(n)
// the transaction is begun anew, under the same lock, up to n times if it fails
// with SQLSTATE 40001, 40P01 or [ErrStaleSnapshot]. fn must then bear to be
// called again; what it does outside tx is not undone.
//
// fn's error is returned as it is, joined with [ErrLost] if the lock was lost;
// others are an [*Error]. When fn panics, the transaction is rolled back and the
// lock released.
func (l *Locker) DoTx(ctx context.Context, pool *pgxpool.Pool, key string, fn func(context.Context, pgx.Tx, *Lock) error, opts ...Option) error {
	var o options
	forTx, forLock := splitTxOptions(opts)
	err := cmp.Or(missing(ctx, l), o.collect(forTx, takenByDoTx))
	switch {
	case err != nil:
	case pool == nil:
		err = errors.New("the pool is nil; pass the one whose database is written")
	case fn == nil:
		err = errors.New("fn is nil")
	}
	if err != nil {
		return l.fail("do", key, err)
	}
	committed := false
	err = l.Do(ctx, key, func(work context.Context, lock *Lock) error {
		var err error
		for attempt := 0; ; attempt++ {
			err = lock.commitFenced(ctx, work, pool, o.tx, fn)
			if attempt == o.retries || !serializationFailure(err) || !clock.Sleep(work, l.backoff(attempt)) {
				break
			}
		}
		committed = err == nil
		return err
	}, forLock...)
	if committed {
		return nil // should the lock have lapsed since, the fence made sure that it did not matter
	}
	return err
}

// commitFenced runs fn in a fenced transaction. work ends with the lock; ctx
// does not, and a commit may outlast the lock because of the fence.
func (l *Lock) commitFenced(ctx, work context.Context, pool *pgxpool.Pool, o pgx.TxOptions, fn func(context.Context, pgx.Tx, *Lock) error) error {
	tx, err := pool.BeginTx(work, o)
	if err != nil && work.Err() != nil && ctx.Err() == nil {
		err = lockerr.ContextError(work) // it was the lock that ended it
	}
	if err != nil {
		return l.fail("begin", err)
	}
	defer func() {
		// Deferred, so that a panic rolls back as well. After a commit it does
		// nothing. Not stopped by ctx, or the connection would be lost with it.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dbconn.Timeout)
		defer cancel()
		_ = tx.Rollback(ctx)
	}()
	if tx.Conn().PgConn().TxStatus() != 'T' {
		return l.fail("begin", errors.New("TxOptions.BeginQuery began no transaction, so that nothing can be fenced"))
	}
	if err := l.Fence(work, tx); err != nil {
		return err
	}
	if err := fn(work, tx, l); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return l.fail("commit", lockerr.ContextError(ctx))
	}
	return l.fail("commit", tx.Commit(ctx))
}

// serializationFailure reports whether the transaction can succeed if it is begun
// again, because all that was wrong was when it ran. See
// https://www.postgresql.org/docs/current/mvcc-serialization-failure-handling.html.
func serializationFailure(err error) bool {
	return slices.Contains([]string{lockerr.StateSerialization, lockerr.StateDeadlock, lockerr.StateStaleSnapshot}, lockerr.SQLState(err)) || errors.Is(err, ErrStaleSnapshot)
}

// takenByDoTx tells which options are for the transaction, and not for its lock.
func takenByDoTx(opt Option) bool {
	switch opt.(type) {
	case TxOptions, Retries:
		return true
	}
	return false
}

func splitTxOptions(opts []Option) (forTx, forLock []Option) {
	for _, opt := range opts {
		if takenByDoTx(opt) {
			forTx = append(forTx, opt)
		} else {
			forLock = append(forLock, opt)
		}
	}
	return forTx, forLock
}
