package pgxlock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/sql"
)

// Locks inside the caller's transaction are PostgreSQL's transaction-level advisory locks.
// Nothing needs to be installed.

// LockTx locks the key until tx ends, however it ends: there is nothing to release, to renew or
// to lose. The lock is PostgreSQL's advisory lock with the number [AdvisoryID](key), by which
// callers in other languages lock the same thing.
//
// LockTx waits in the server's queue. [MaxWait] bounds the wait, [NoWait] tries once, and
// [Shared] allows other shared holders. MaxWait needs the right to use the language plpgsql.
// Locking a key again in the same transaction succeeds at once, but for an exclusive lock on a
// key that the transaction holds shared ([ErrDeadlock]). Rolling back to a savepoint frees the
// locks taken after it. If ctx ends during the wait, pgx closes the connection, which ends the
// transaction: use MaxWait if it must survive the wait.
//
// After [ErrNotAcquired], [ErrStaleSnapshot], [ErrReadOnly], a refused upgrade or an invalid
// argument the transaction can go on, with its settings unchanged; after ErrStaleSnapshot the
// key is locked. Any other error, such as SQLSTATE 40P01 (which also matches ErrDeadlock),
// 57014, 53200 (the server's lock table is full) or 55P03 (the session's own lock_timeout,
// without MaxWait), aborts the transaction, and its locks are free at once, before the
// rollback: they protect nothing more.
//
// A REPEATABLE READ or SERIALIZABLE transaction takes its snapshot before the wait. If any
// transaction commits between the snapshot and the grant, even one that never had the lock, tx
// may not see what the previous holder wrote, and LockTx returns ErrStaleSnapshot: begin the
// transaction again. The check needs one or two more round trips, and on a busy server many
// calls fail; [AllowStaleSnapshot] skips it.
//
// In each database the first lock of a process takes one more round trip, by which an engine
// that keeps no locks ([errors.ErrUnsupported]) and a worker of Citus (ErrReadOnly) are
// refused.
func LockTx(ctx context.Context, tx pgx.Tx, key string, opts ...LockTxOption) error {
	return fail("lock", key, KindAdvisory, lockTx(ctx, usertx.Pgx(tx), []string{key}, opts))
}

// LockSQLTx is [LockTx] for database/sql.
func LockSQLTx(ctx context.Context, tx SQLTx, key string, opts ...LockTxOption) error {
	return fail("lock", key, KindAdvisory, lockTx(ctx, usertx.SQL(tx), []string{key}, opts))
}

// LockAllTx is [LockTx] for many keys: it locks all of them or, with ErrNotAcquired, none. It
// locks them in the order of their numbers, so that calls of LockAllTx do not deadlock; two
// calls of LockTx still can. MaxWait bounds the wait for all keys together. Each key takes an
// entry in the server's lock table: instead of many hundreds lock one key that stands for all
// of them.
func LockAllTx(ctx context.Context, tx pgx.Tx, keys []string, opts ...LockTxOption) error {
	return fail("lock", "", KindAdvisory, lockTx(ctx, usertx.Pgx(tx), keys, opts))
}

// LockAllSQLTx is [LockAllTx] for database/sql.
func LockAllSQLTx(ctx context.Context, tx SQLTx, keys []string, opts ...LockTxOption) error {
	return fail("lock", "", KindAdvisory, lockTx(ctx, usertx.SQL(tx), keys, opts))
}

func lockTx(ctx context.Context, tx usertx.Tx, keys []string, opts []LockTxOption) error {
	if err := lockerr.MissingContext(ctx); err != nil {
		return err
	}
	if tx == nil {
		return errNilTx
	}
	var o options
	if err := collect(&o, opts); err != nil {
		return err
	}
	ids, err := advisoryIDs(o.namespace, keys)
	if err != nil || len(ids) == 0 {
		return err
	}
	e := Event{Op: EventTxLock, Kind: KindAdvisory, N: len(ids)}
	if len(keys) == 1 {
		e.Key = keys[0]
	}
	began := time.Now()
	if err = lockIDs(ctx, tx, ids, &o); err != nil {
		err = lockerr.NotPostgres(tx.Engine(), err) // no schema is needed
	}
	e.Err = fail("lock", e.Key, KindAdvisory, err)
	o.observeTx(ctx, e, began)
	return err
}

// lockIDs takes the locks, and checks what the transaction may do with them.
func lockIDs(ctx context.Context, tx usertx.Tx, ids []lockkey.ID, o *options) error {
	shared := Mode(o.Mode) == Shared
	if !shared {
		if upgrade, err := usertx.HoldsShared(ctx, tx, ids); err != nil {
			return err
		} else if upgrade {
			return fmt.Errorf("%w: this transaction holds the key shared, and two upgrades would wait for each other; lock it exclusively from the start", ErrDeadlock)
		}
	}

	got, err := askTx(ctx, tx, ids, o)
	switch {
	case err != nil:
		return err
	case got == usertx.Refused:
		return ErrNotAcquired
	case got == usertx.Standby:
		return fmt.Errorf("%w: the server is a standby, where a lock excludes no other session", ErrReadOnly)
	}
	if err := usertx.CheckKept(ctx, tx, ids[0], shared); err != nil {
		return err
	}
	if shared {
		tx.Shares().Add(ids)
	}
	if got != usertx.GrantedOnSnapshot || o.staleSnapshot {
		return nil
	}
	if got, err = tx.RunBlock(ctx, statements.TxVouch); err == nil && got == usertx.Refused {
		err = fmt.Errorf("%w: another transaction has committed between the two; roll back and begin again, or lock in a READ COMMITTED transaction", ErrStaleSnapshot)
	}
	return err
}

// askTx asks for the locks by the statement that costs least: for a single lock one that
// does nothing in a transaction that keeps its snapshot, where another one is asked then.
func askTx(ctx context.Context, tx usertx.Tx, ids []lockkey.ID, o *options) (usertx.Reply, error) {
	shared, waits := Mode(o.Mode) == Shared, !o.bounded
	if waits && len(ids) == 1 && !shared && !ids[0].Pair && !o.staleSnapshot {
		if got, err := tx.Run(ctx, statements.TxLock.Text(), ids[0].Number); err != nil || got == usertx.Granted {
			return got, err
		}
	}
	numbers, whats := usertx.Columns(ids, shared)
	switch {
	case waits:
		return tx.Run(ctx, statements.TxLockAll.Text(), numbers, whats)
	case len(ids) == 1: // most keys are free, and the block costs the server several times as much
		if got, err := tx.Run(ctx, statements.TxTryLock.Text(), numbers[0], whats[0]); err != nil || got != usertx.Refused || o.noWait() {
			return got, err
		}
	}
	return tx.RunBlock(ctx, statements.TxLockWithin, numbers, whats, milliseconds(o.maxWait))
}

// milliseconds rounds up, so that 0 is no wait.
func milliseconds(wait time.Duration) int64 {
	if wait <= 0 {
		return 0
	}
	return int64((wait-1)/time.Millisecond) + 1
}

// advisoryIDs returns the locks that the keys name, in order and without
// repetition.
func advisoryIDs(namespace string, keys []string) ([]lockkey.ID, error) {
	var ids []lockkey.ID
	for _, key := range keys {
		if err := lockkey.CheckAdvisory(lockkey.In(namespace, key)); err != nil {
			if len(keys) > 1 {
				err = fmt.Errorf("key %s: %w", lockkey.Shown(key), err)
			}
			return nil, err
		}
		ids = append(ids, lockkey.IdentifyIn(namespace, key))
	}
	slices.SortFunc(ids, lockkey.ID.Compare)
	return slices.Compact(ids), nil
}

var errNilTx = errors.New("tx is nil; pass the transaction that needs the lock")

// SQLTx is a transaction of database/sql: a [*sql.Tx], or what a library makes of one, such as
// bun.Tx, *sqlx.Tx, the Tx that ent generates with its feature sql/execquery, and GORM's
// ConnPool in a transaction. A *sql.DB or *sql.Conn is none: what is locked there would be free
// at once.
//
// The driver is that of pgx or lib/pq, or another one for PostgreSQL that sends several
// statements in one request and has errors with a method SQLState. Statements go to the *sql.Tx
// in the field Tx, if there is one, past hooks of the library. If ctx ends during a wait, pgx
// and lib/pq close the connection.
type SQLTx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	Commit() error
	Rollback() error
}
