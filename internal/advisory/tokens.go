package advisory

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/usertx"
	"github.com/pgxlock/pgxlock/sql"
)

// Fence implements [hold.Backend]. With Tokens, rows in a table of the migrations record which
// session has which lock with which token. The row of the lock shows whether the hold still has it. A
// release does not wait for the transaction: a row that a fence pins stays until the
// transaction has ended, and until then no caller is granted the lock.
func (a *Locks) Fence(ctx context.Context, tx hold.Tx, lock *hold.Hold) error {
	if !a.cfg.Tokens {
		return fmt.Errorf("an advisory lock without a token cannot protect a transaction; set AdvisoryConfig.Tokens, use NewLeaseLocker, or call LockTx in the transaction itself: %w", errors.ErrUnsupported)
	}
	id := lock.Queue.ID
	a.mu.Lock()
	entry, _ := a.entryOfLocked(lock)
	session := a.session
	a.mu.Unlock()
	if entry == nil {
		return fmt.Errorf("%w: %w", lockerr.ErrLost, lockerr.ErrSessionEnded)
	}
	_, err := tx.Run(ctx, a.place.Statement(statements.AdvisoryFence), id.Space(), id.Number, session, lock.Token)
	return usertx.Elsewhere(lockerr.Typed(err), tx, &a.attempts.Config.ConnConfig.Config)
}

// reap removes rows of sessions that have ended.
func (a *Locks) reap() error {
	if !a.cfg.Tokens {
		return a.host.Queue.Reap()
	}
	c := &call{query: &query{text: a.place.Statement(statements.AdvisoryReapTokens)}, alone: true, bound: true}
	a.mux.await(c, a.mux.submit(context.Background(), c))
	return cmp.Or(c.err, a.host.Queue.Reap())
}
