package lease

import (
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/sql"
)

// Shared leases have statements of their own. They may refuse a request while other callers
// are just joining or leaving.

// SharedHolder is the holder in the row of a shared lease.
const SharedHolder = "*shared"

// byMode returns the statement for locks of that mode.
func byMode(mode hold.Mode, exclusive, shared statements.Name) statements.Name {
	if mode == hold.Shared {
		return shared
	}
	return exclusive
}

// inModes runs a batch by mode, exclusive entries first. As in a batcher, an error means that
// the server cannot be reached.
func inModes[E any](batch []E, mode func(E) hold.Mode, run func(hold.Mode, []E) error, fail func([]E, error)) error {
	isShared := func(e E) bool { return mode(e) == hold.Shared }
	if !slices.ContainsFunc(batch, isShared) {
		return run(hold.Exclusive, batch)
	}
	shared := slices.DeleteFunc(slices.Clone(batch), func(e E) bool { return !isShared(e) })
	if exclusive := slices.DeleteFunc(slices.Clone(batch), isShared); len(exclusive) > 0 {
		if err := run(hold.Exclusive, exclusive); err != nil {
			fail(shared, err)
			return err
		}
	}
	return run(hold.Shared, shared)
}

// maxUnsettled is how often a request is sent again while other callers are just joining or
// leaving: for about half a second, because their transactions are short. After that the
// caller waits as for any holder.
const maxUnsettled = 12

// askSoon sends a request again a moment later, at most maxUnsettled times.
func (t *Table) askSoon(r *request) bool {
	if r.unsettled == maxUnsettled {
		return false
	}
	time.AfterFunc(clock.Jitter(2*time.Millisecond<<min(r.unsettled, 5)), func() { t.flow.ask(false, r) })
	r.unsettled++
	return true
}
