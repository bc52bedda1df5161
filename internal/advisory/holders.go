package advisory

import (
	"context"
	"strconv"
	"strings"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/sql"
)

// Holders implements [hold.Backend], as far as the server knows the holders.
func (a *Locks) Holders(ctx context.Context, keys []string) ([]hold.Holder, error) {
	var holders []hold.Holder
	for _, key := range keys {
		of, err := a.holdersOf(ctx, key)
		if err != nil {
			return nil, err
		}
		holders = append(holders, of...)
	}
	return holders, nil
}

func (a *Locks) holdersOf(ctx context.Context, key string) ([]hold.Holder, error) {
	id := lockkey.IdentifyIn(a.cfg.Namespace, key)
	text := strings.NewReplacer("/* key */", strconv.FormatInt(id.Number, 10), "/* space */", strconv.Itoa(id.Space())).Replace(statements.AdvisoryHolders.Text())
	c := &call{query: &query{text: text}, alone: true}
	if !a.mux.await(c, a.mux.submit(ctx, c)) {
		return nil, lockerr.ContextError(ctx)
	}
	if c.err != nil {
		return nil, c.err
	}
	var holders []hold.Holder
	for _, row := range c.query.rows {
		h := hold.Holder{Key: key, ID: row[2]}
		if pid, err := strconv.ParseInt(row[0], 10, 32); err == nil {
			h.PID = int32(pid)
		}
		if row[1] == "t" {
			h.Mode = hold.Shared
		}
		holders = append(holders, a.ours(id, h)...)
	}
	return holders, nil
}

// ours adds what this process knows about a holder that is its own session, which holds a lock
// once for all holds that share it.
func (a *Locks) ours(id lockkey.ID, h hold.Holder) []hold.Holder {
	a.mu.Lock()
	entry := a.held[id]
	var locks []*hold.Hold
	if entry != nil && h.PID == a.pid {
		locks = append(locks, entry.holds...)
	}
	a.mu.Unlock()
	if len(locks) == 0 {
		return []hold.Holder{h}
	}
	holders := make([]hold.Holder, 0, len(locks))
	for _, lock := range locks {
		h.ID, h.Token, h.Since = lock.Holder, lock.Token, lock.Since
		if until, bounded := lock.Deadline(); bounded {
			h.Expires = until.Add(a.margin)
		}
		holders = append(holders, h)
	}
	return holders
}
