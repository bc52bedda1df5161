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

// DoTx acquires the lock as [Locker.Do] does, begins a transaction on the pool, fences it
// with [Lock.Fence], calls fn, commits and releases. If it returns nil, what fn wrote in tx
// is committed, and nobody else was granted the lock before the commit. If it returns an
// error, nothing in tx is committed, with one exception: if the connection breaks during
// the commit, the outcome is unknown, as with every commit. fn's context ends when the lock
// is lost and when ctx ends.
//
// fn must write only through tx: what it does elsewhere, for example through the pool, is
// neither fenced nor rolled back. fn must return the error of a failed statement, because
// that statement has aborted tx; after an error inside a savepoint (tx.Begin) fn can go on.
// fn must not commit or roll back tx, release the lock, or use tx after it has returned.
// The transaction is open while fn runs: do slow work before it, in [Locker.Do] with
// [Lock.Fence].
//
// With Retries(n) DoTx begins the transaction again, under the same lock, up to n times if
// it fails with SQLSTATE 40001, 40P01 or [ErrStaleSnapshot]. fn must then be safe to call
// again: what it did outside tx is not undone.
//
// DoTx returns fn's error unchanged, joined with [ErrLost] if the lock was lost. Other
// errors are an [*Error]. If fn panics, DoTx rolls back and releases the lock.
func (l *Locker) DoTx(ctx context.Context, pool *pgxpool.Pool, key string, fn func(context.Context, pgx.Tx, *Lock) error, opts ...DoTxOption) error {
	var o options
	forTx, forLock := splitTxOptions(opts)
	err := cmp.Or(missing(ctx, l), collect(&o, forTx))
	switch {
	case err != nil:
	case pool == nil:
		err = errors.New("the pool is nil; pass the pool of the database that fn writes to")
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
		return l.fail("begin", errors.New("TxOptions.BeginQuery began no transaction, so nothing can be fenced"))
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

// splitTxOptions separates the options for the transaction from those for its lock.
func splitTxOptions(opts []DoTxOption) (forTx []DoTxOption, forLock []AcquireOption) {
	for _, opt := range opts {
		if o, ok := opt.(AcquireOption); ok {
			forLock = append(forLock, o)
		} else {
			forTx = append(forTx, opt)
		}
	}
	return forTx, forLock
}
