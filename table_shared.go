package pgxlock

import (
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/sql"
)

// Shared leases have statements of their own, and a caller may meet others who are just
// joining or leaving.

// sharedHolder is whom a lease belongs to that is shared.
const sharedHolder = "*shared"

// byMode returns the statement for locks of that mode.
func byMode(mode Mode, exclusive, shared statements.Name) statements.Name {
	if mode == Shared {
		return shared
	}
	return exclusive
}

// inModes runs a batch, those that are exclusive first. An error means, as in a
// combiner, that the server cannot be reached.
func inModes[E any](batch []E, mode func(E) Mode, run func(Mode, []E) error, fail func([]E, error)) error {
	isShared := func(e E) bool { return mode(e) == Shared }
	if !slices.ContainsFunc(batch, isShared) {
		return run(Exclusive, batch)
	}
	shared := slices.DeleteFunc(slices.Clone(batch), func(e E) bool { return !isShared(e) })
	if exclusive := slices.DeleteFunc(slices.Clone(batch), isShared); len(exclusive) > 0 {
		if err := run(Exclusive, exclusive); err != nil {
			fail(shared, err)
			return err
		}
	}
	return run(Shared, shared)
}

// maxUnsettled is how often a request asks again that meets others who are just
// joining or leaving: for about half a second, because their transactions are short. A
// longer one is waited for as other holders are.
const maxUnsettled = 12

// askSoon asks again a moment later, unless that was enough.
func (t *leaseTable) askSoon(r *leaseRequest) bool {
	if r.unsettled == maxUnsettled {
		return false
	}
	time.AfterFunc(clock.Jitter(2*time.Millisecond<<min(r.unsettled, 5)), func() { t.acquiring.Add(r) })
	r.unsettled++
	return true
}
