package monitor

import (
	"time"

	"github.com/pgxlock/pgxlock"
)

// mostTerms is of how many leases a Renewals knows.
const mostTerms = 10_000

// Renewals is what successive snapshots show of how holders renew their leases, which the
// server does not record: a row of a lease says when it expires, and not how long it lasts.
// It never changes, so that goroutines may share it. Nil knows nothing yet.
type Renewals struct {
	at    time.Time
	terms map[HoldID]term
}

// A term is what was seen of a lease: how much of it remained at most, when it was to expire
// last, and whether that moved, as its holder renewed it.
type term struct {
	longest time.Duration
	expires time.Time
	renewed bool
}

// With returns what is known after another snapshot, of its first 10,000 leases, and sets
// [pgxlock.Holder].Late in it. [Monitor.Watch] does so.
func (r *Renewals) With(shot *Snapshot) *Renewals {
	if r == nil {
		r = new(Renewals)
	}
	next := &Renewals{shot.At, make(map[HoldID]term)}
	for i := range shot.Holders {
		if len(next.terms) == mostTerms {
			break
		}
		if h := &shot.Holders[i]; !h.Expires.IsZero() {
			id := HoldOf(h)
			last, known := r.terms[id]
			if h.Expires.Before(last.expires) {
				last.longest = 0 // its TTL has become shorter: a renewal never makes it expire sooner
			}
			seen := term{max(last.longest, h.Expires.Sub(shot.At)), h.Expires, last.renewed || known && h.Expires.After(last.expires)}
			next.terms[id] = seen
			// Lockers renew after a third of the TTL. Of a lease that was never renewed it is not
			// known whether it should be.
			h.Late = seen.renewed && h.State == pgxlock.StateLive && h.Expires.Sub(shot.At) < seen.longest/2
		}
	}
	return next
}

// Longest returns how much of the holder's lease was seen to remain at most.
func (r *Renewals) Longest(h *pgxlock.Holder) time.Duration {
	if r == nil {
		return 0
	}
	return max(r.terms[HoldOf(h)].longest, h.Expires.Sub(r.at))
}
