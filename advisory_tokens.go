package pgxlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/sql"
)

// With Tokens, advisory locks have fencing tokens: rows in a table of the migrations record
// which holder has which lock with which token.

// fence: the row of the lock says whether it is ours. Releases do not wait for it:
// a row that a fence pins stays until the transaction has ended, and until then
// nobody is granted the lock.
func (a *advisoryLocks) fence(ctx context.Context, tx usertx.Tx, lock *Lock) error {
	if !a.cfg.Tokens {
		return fmt.Errorf("an advisory lock without a token cannot protect a transaction; set AdvisoryConfig.Tokens, take a Lease, or use LockTx in the transaction itself: %w", errors.ErrUnsupported)
	}
	id := lockkey.Identify(lock.key)
	a.mu.Lock()
	held, session := a.has(lock), a.session
	a.mu.Unlock()
	if !held {
		return fmt.Errorf("%w: %w", ErrLost, lockerr.ErrSessionEnded)
	}
	var token int64
	err := lockerr.Typed(tx.Row(ctx, a.place.Statement(statements.AdvisoryFence), &token, id.Space(), id.Number, session, lock.token))
	return elsewhere(err, tx, &a.Config.ConnConfig.Config)
}

// reap removes rows that sessions left which are no more.
func (a *advisoryLocks) reap() error {
	if !a.cfg.Tokens {
		return a.locker.queue.reap()
	}
	c := &lockCall{query: a.place.Statement(statements.AdvisoryReapTokens), alone: true, bound: true}
	a.wire.await(c, a.wire.submit(context.Background(), c))
	return cmp.Or(c.err, a.locker.queue.reap())
}
