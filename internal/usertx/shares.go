package usertx

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"weak"

	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// Shares are the keys that a transaction has locked shared, or one transaction after another
// on a connection: whichever owner is known to us. An upgrade is then refused each time, and
// not only when it meets another one. To ask the server each time would cost as much as the
// lock; what is remembered only says where it is worth to ask: a savepoint that was rolled
// back, or a transaction that has ended, may have released the locks.
type Shares struct {
	owner   any    // a weak pointer; nil: not known, and then the server is asked each time
	cleanUp func() // arranges that they are forgotten with their owner
}

var sharesByOwner sync.Map // of *sharedKeys

// sharesKnown is set with the first of them: most programs lock nothing shared, and
// to look for a transaction's costs more than the rest of what is done here.
var sharesKnown atomic.Bool

type sharedKeys struct {
	mu  sync.Mutex
	ids map[lockkey.ID]struct{}
}

// maxShares bounds what is remembered of a connection that lives long. Who locks
// more than that shared in one transaction is left to the server, which finds the
// deadlock when there is one.
const maxShares = 4096

func sharesOf[T any](owner *T) Shares {
	key := weak.Make(owner)
	return Shares{owner: key, cleanUp: func() {
		runtime.AddCleanup(owner, func(key weak.Pointer[T]) { sharesByOwner.Delete(key) }, key)
	}}
}

// Add remembers keys that the transaction has locked shared.
func (s Shares) Add(ids []lockkey.ID) {
	sharesKnown.Store(true)
	if s.owner == nil {
		return
	}
	found, known := sharesByOwner.LoadOrStore(s.owner, &sharedKeys{ids: make(map[lockkey.ID]struct{})})
	if !known {
		s.cleanUp()
	}
	keys := found.(*sharedKeys)
	keys.mu.Lock()
	defer keys.mu.Unlock()
	if len(keys.ids) >= maxShares {
		clear(keys.ids)
	}
	for _, id := range ids {
		keys.ids[id] = struct{}{}
	}
}

func (s Shares) remove(ids []lockkey.ID) {
	if found, known := sharesByOwner.Load(s.owner); known {
		keys := found.(*sharedKeys)
		keys.mu.Lock()
		defer keys.mu.Unlock()
		for _, id := range ids {
			delete(keys.ids, id)
		}
	}
}

// suspects returns those of the ids that may be locked shared.
func (s Shares) suspects(ids []lockkey.ID) []lockkey.ID {
	if s.owner == nil {
		return ids
	}
	found, known := sharesByOwner.Load(s.owner)
	if !known {
		return nil
	}
	keys := found.(*sharedKeys)
	keys.mu.Lock()
	defer keys.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(ids), func(id lockkey.ID) bool {
		_, shared := keys.ids[id]
		return !shared
	})
}

// HoldsShared reports whether the transaction has locked one of the keys shared,
// and not exclusively as well.
func HoldsShared(ctx context.Context, tx Tx, ids []lockkey.ID) (bool, error) {
	if !sharesKnown.Load() {
		return false, nil
	}
	suspects := tx.Shares().suspects(ids)
	if len(suspects) == 0 {
		return false, nil
	}
	numbers, whats := Columns(suspects, false)
	held, err := tx.Run(ctx, statements.TxShared.Text(), numbers, whats)
	if err == nil && held == 0 {
		tx.Shares().remove(suspects)
	}
	return held > 0, err
}

// Columns returns the locks as the statements take them: their numbers, and what
// to do with each.
func Columns(ids []lockkey.ID, shared bool) (numbers, whats []int64) {
	what := lockkey.AskTry
	if shared {
		what = lockkey.AskTryShared
	}
	for _, id := range ids {
		numbers, whats = append(numbers, id.Number), append(whats, int64(what.Of(id)))
	}
	return numbers, whats
}
