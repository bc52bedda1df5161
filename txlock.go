package pgxlock

import (
	"cmp"
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

// LockTx locks the key until tx ends: what the transaction writes and the lock
// that protects it are given up together, by the server, however the
// transaction ends. There is nothing to release, to renew or to lose. It takes
// the advisory lock number [AdvisoryID](key), so that callers in other languages
// lock the same thing with pg_advisory_xact_lock(advisory_lock_key('...')); the
// numbers of [RawKey] and [RawKey2] are taken as they are.
//
// A statement that fails aborts the transaction, and with that its locks are free
// at once, before the rollback: nothing that is not written in tx is protected by
// them after an error.
//
// It waits its turn in the server's queue; [MaxWait] bounds the wait, [NoWait]
// makes it a try, [Shared] lets other shared holders in. Locking a key again in
// the same transaction is granted at once, except for an exclusive lock over a
// shared one ([ErrDeadlock]): two such upgrades would wait for each other. A lock
// that is taken inside a savepoint ends when that savepoint is rolled back.
//
// With [ErrNotAcquired], [ErrStaleSnapshot], [ErrReadOnly], an upgrade or a bad
// argument the transaction stands as it was before the call, settings included,
// and can go on; but after ErrStaleSnapshot the key is locked. Other errors abort
// it, as errors of statements do, so that it is to be rolled back, at once if
// others wait for it: SQLSTATE 40P01 (a deadlock, which also matches ErrDeadlock),
// 57014 (cancelled), 53200 (no room in the server's lock table),
// 55P03 (the session's own lock_timeout, which applies where there is no
// MaxWait).
//
// When ctx ends during the wait, what becomes of the transaction is up to the
// driver: pgx closes the connection, which the transaction does not survive. Use
// MaxWait for a wait that the transaction shall survive.
//
// In a REPEATABLE READ or SERIALIZABLE transaction the snapshot is taken by its
// first statement, and that is at the latest this call, before it waits. Where
// anything was committed between the snapshot and the grant the transaction may
// not see what the lock's previous holder did: that is ErrStaleSnapshot, and the
// transaction is to be begun again. To find out takes one or two more round
// trips, until the last of which any commit on the server counts, also of who
// never had the lock, so that on a busy server many calls fail;
// [AllowStaleSnapshot] saves them. READ COMMITTED, the default, has no such
// trap: each of its statements sees all that was committed before.
//
// See https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
func LockTx(ctx context.Context, tx pgx.Tx, key string, opts ...Option) error {
	return fail("lock", key, KindAdvisory, lockTx(ctx, usertx.Pgx(tx), []string{key}, opts))
}

// LockSQLTx is [LockTx] for database/sql, with the drivers of pgx and lib/pq;
// with another one a wait that is over aborts the transaction unless its errors
// have a method SQLState. When ctx ends during the wait both close the connection.
func LockSQLTx(ctx context.Context, tx *sql.Tx, key string, opts ...Option) error {
	return fail("lock", key, KindAdvisory, lockTx(ctx, usertx.SQL(tx), []string{key}, opts))
}

// LockAllTx is [LockTx] for many keys: all of them or, with ErrNotAcquired, none.
// It takes them in one global order, that of their numbers, so that callers who
// lock the same keys in different orders do not deadlock; those who lock one
// after the other by LockTx still can. MaxWait bounds the wait for all together.
// Each key has a place in the server's lock table, which holds at least 6,400 with
// default settings: lock what is above a few hundred keys by one key.
func LockAllTx(ctx context.Context, tx pgx.Tx, keys []string, opts ...Option) error {
	return fail("lock", "", KindAdvisory, lockTx(ctx, usertx.Pgx(tx), keys, opts))
}

func lockTx(ctx context.Context, tx usertx.Tx, keys []string, opts []Option) error {
	if err := lockerr.MissingContext(ctx); err != nil {
		return err
	}
	if tx == nil {
		return errNilTx
	}
	var o options
	ids, err := advisoryIDs(keys)
	if err := cmp.Or(o.collect(opts, takenInTx), err); err != nil || len(ids) == 0 {
		return err
	}
	shared := o.mode == Shared
	if !shared {
		if upgrade, err := usertx.HoldsShared(ctx, tx, ids); err != nil {
			return err
		} else if upgrade {
			return fmt.Errorf("%w: this transaction holds the key shared, and two that upgrade wait for each other; lock it exclusively from the start", ErrDeadlock)
		}
	}

	got, err := askTx(ctx, tx, ids, &o)
	switch {
	case err != nil:
		return err
	case got == usertx.Refused:
		return ErrNotAcquired
	case got == usertx.Standby:
		return fmt.Errorf("%w: the server is a standby, where a lock excludes nobody", ErrReadOnly)
	}
	if shared {
		tx.Shares().Add(ids)
	}
	if got == usertx.GrantedOnSnapshot && !o.staleSnapshot {
		_, err = usertx.Tentatively(ctx, tx, usertx.Refusal{State: lockerr.StateStaleSnapshot, Means: errCommittedSince}, statements.TxVouch)
	}
	return err
}

var errCommittedSince = fmt.Errorf("%w: something was committed between the two; roll back and begin again, or lock in a READ COMMITTED transaction", ErrStaleSnapshot)

// askTx asks for the locks by the statement that costs least: for a single lock one that
// does nothing in a transaction that keeps its snapshot, where another one is asked then.
func askTx(ctx context.Context, tx usertx.Tx, ids []lockkey.ID, o *options) (usertx.Reply, error) {
	shared, waits := o.mode == Shared, o.wait == nil
	if waits && len(ids) == 1 && !shared && !ids[0].Pair && !o.staleSnapshot {
		if got, err := tx.Run(ctx, statements.TxLock, ids[0].Number); err != nil || got == usertx.Granted {
			return got, err
		}
	}
	numbers, whats := usertx.Columns(ids, shared)
	switch {
	case waits:
		return tx.Run(ctx, statements.TxLockAll, numbers, whats)
	case !o.noWait():
		return usertx.Tentatively(ctx, tx, usertx.Refusal{State: lockerr.StateLockNotAvailable, Means: ErrNotAcquired}, statements.TxWaitLock, numbers, whats, milliseconds(*o.wait))
	case len(ids) == 1:
		return tx.Run(ctx, statements.TxTryLock, numbers[0], whats[0])
	}
	return tryAll(ctx, tx, numbers, whats)
}

// tryAll takes all the locks or none. What it got when it was refused others is
// given back by the savepoint, in a second round trip.
func tryAll(ctx context.Context, tx usertx.Tx, numbers, whats []int64) (usertx.Reply, error) {
	got, err := tx.TryIn(ctx, false, statements.TxTryAll, numbers, whats)
	if err != nil {
		return got, err
	}
	end := statements.TxReleaseSavepoint
	if got == usertx.Refused {
		end = statements.TxRollbackSavepoint
	}
	return got, usertx.Finish(ctx, tx, end)
}

// milliseconds rounds a wait up: 0 would be no bound.
func milliseconds(wait time.Duration) int64 {
	return int64((wait-1)/time.Millisecond) + 1
}

// takenInTx tells which options locks in a transaction take.
func takenInTx(opt Option) bool {
	switch opt.(type) {
	case MaxWait, Mode, AllowStaleSnapshot:
		return true
	}
	return false
}

// advisoryIDs returns the locks that the keys name, in order and without
// repetition.
func advisoryIDs(keys []string) ([]lockkey.ID, error) {
	var ids []lockkey.ID
	for _, key := range keys {
		if err := lockkey.CheckAdvisory(key); err != nil {
			if len(keys) > 1 {
				err = fmt.Errorf("key %s: %w", lockkey.Shown(key), err)
			}
			return nil, err
		}
		ids = append(ids, lockkey.Identify(key))
	}
	slices.SortFunc(ids, lockkey.ID.Compare)
	return slices.Compact(ids), nil
}

var errNilTx = errors.New("tx is nil; pass the transaction that the lock is for")
