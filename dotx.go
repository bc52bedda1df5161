package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/usertx"
)

// DoTx is the common case: one fenced transaction under a lock.

// DoTx acquires the lock as [Locker.Do] does, begins a transaction on the pool, fences it with
// [Lock.Fence], calls fn, commits and releases. If it returns nil, what fn wrote in tx is
// committed, and nobody else was granted the lock before the commit. If it returns an error,
// nothing in tx is committed, unless the connection broke during the commit: then the outcome
// is unknown, as with every commit. fn's context ends when the lock is lost and when ctx ends.
//
// fn must write only through tx: what it does elsewhere is neither fenced nor rolled back. It
// must return the error of a failed statement, because that has aborted tx, unless it rolled
// back to a savepoint. It must not commit or roll back tx, release the lock, or use tx after it
// has returned. The transaction is open while fn runs: do slow work before it, in [Locker.Do]
// with [Lock.Fence]. If fn panics, DoTx rolls back and releases the lock.
//
// With Retries(n) DoTx begins the transaction again, under the same lock, up to n times if it
// fails with SQLSTATE 40001, 40P01 or [ErrStaleSnapshot]. fn must then be safe to call again:
// what it did outside tx is not undone.
func (l *Locker) DoTx(ctx context.Context, pool *pgxpool.Pool, key string, fn func(context.Context, pgx.Tx, *Lock) error, opts ...DoTxOption) error {
	var wrong error
	switch {
	case pool == nil:
		wrong = errors.New("the pool is nil; pass the pool of the database that fn writes to")
	case fn == nil:
		wrong = errNilFn
	}
	return doTx(ctx, l, key, wrong, opts, func(work context.Context, lock *Lock, o pgx.TxOptions) error {
		return lock.commitFenced(ctx, work, pool, o, fn)
	})
}

// DoSQLTx is [Locker.DoTx] for the transactions of database/sql and of libraries on top of it:
// begin begins one, with what isolation level it wants, and T is what fn writes through. With
// ent, begin is client.Tx; with database/sql
//
//	func(ctx context.Context) (*sql.Tx, error) { return db.BeginTx(ctx, nil) }
func DoSQLTx[T SQLTx](ctx context.Context, l *Locker, key string, begin func(context.Context) (T, error), fn func(context.Context, T, *Lock) error, opts ...DoSQLTxOption) error {
	var wrong error
	switch {
	case begin == nil:
		wrong = errors.New("begin is nil; pass a function that begins a transaction")
	case fn == nil:
		wrong = errNilFn
	}
	return doTx(ctx, l, key, wrong, opts, func(work context.Context, lock *Lock, _ pgx.TxOptions) error {
		return commitFencedSQL(ctx, work, lock, begin, fn)
	})
}

var errNilFn = errors.New("fn is nil")

// doTx calls commit under the lock, and again as long as it may have been the moment that failed,
// unless an argument is wrong.
func doTx[O DoTxOption](ctx context.Context, l *Locker, key string, wrong error, opts []O, commit func(work context.Context, lock *Lock, o pgx.TxOptions) error) error {
	var o options
	forTx, forLock := splitTxOptions(opts)
	if err := cmp.Or(missing(ctx, l), collect(&o, forTx), wrong); err != nil {
		return l.fail("do", key, err)
	}
	committed := false
	err := l.Do(ctx, key, func(work context.Context, lock *Lock) error {
		var err error
		for attempt := 0; ; attempt++ {
			err = commit(work, lock, o.tx)
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
	if err != nil {
		return l.failBegin(ctx, work, err)
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

// commitFencedSQL is commitFenced for a transaction that ends with the context with which it was begun.
func commitFencedSQL[T SQLTx](ctx, work context.Context, l *Lock, begin func(context.Context) (T, error), fn func(context.Context, T, *Lock) error) error {
	begun, end := context.WithCancel(ctx)
	defer end()
	stop := context.AfterFunc(work, end) // while it waits for a connection
	tx, err := begin(begun)
	held := stop()
	switch {
	case err != nil:
		return l.failBegin(ctx, work, err)
	case usertx.SQL(tx) == nil:
		return l.fail("begin", errors.New("begin returned neither a transaction nor an error"))
	}
	defer func() {
		defer time.AfterFunc(dbconn.Timeout, end).Stop()
		_ = tx.Rollback()
	}()
	if !held {
		return l.failBegin(ctx, work, context.Cause(begun)) // which has ended tx
	}
	if err := l.FenceSQL(work, tx); err != nil {
		return err
	}
	if err := fn(work, tx, l); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return l.fail("commit", lockerr.ContextError(ctx))
	}
	return l.fail("commit", tx.Commit())
}

// failBegin says so if it was the lock that ended the wait for a connection.
func (l *Lock) failBegin(ctx, work context.Context, err error) error {
	if work.Err() != nil && ctx.Err() == nil {
		err = lockerr.ContextError(work)
	}
	return l.fail("begin", err)
}

// serializationFailure reports whether the transaction can succeed if it is begun
// again, because all that was wrong was when it ran. See
// https://www.postgresql.org/docs/current/mvcc-serialization-failure-handling.html.
func serializationFailure(err error) bool {
	return slices.Contains([]string{lockerr.StateSerialization, lockerr.StateDeadlock, lockerr.StateStaleSnapshot}, lockerr.SQLState(err)) || errors.Is(err, ErrStaleSnapshot)
}

// splitTxOptions separates the options for the transaction from those for its lock.
func splitTxOptions[O DoTxOption](opts []O) (forTx []O, forLock []AcquireOption) {
	for _, opt := range opts {
		if o, ok := any(opt).(AcquireOption); ok {
			forLock = append(forLock, o)
		} else {
			forTx = append(forTx, opt)
		}
	}
	return forTx, forLock
}
