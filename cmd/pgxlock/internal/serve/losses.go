package serve

import (
	"slices"
	"time"

	"github.com/pgxlock/pgxlock"
)

// A Loss is a lease that expired while it was held, and that somebody else has now, or that
// was removed. The server records none, so they are found by comparing one state with the
// next.
type Loss struct {
	Holder pgxlock.Holder // as it was seen last, with the time at which it expired
	Next   string         // who took it over; "": nobody has
}

const (
	// mostLosses is how many losses are remembered, of the last hour.
	mostLosses = 100

	// nearby is how far apart two states may be for a take-over between them to be
	// found without the lease having been seen expired.
	nearby = 5 * time.Second

	// wakeDelay is how soon after the end of a lease a waiter has it.
	wakeDelay = 2 * time.Second
)

// lost returns the losses between a state and this one, the latest first.
func (now *state) lost(before *state) (found []Loss) {
	here := make(map[holdID]bool)
	holders := make(map[lockID][]pgxlock.Holder)
	for _, h := range slices.Concat(now.shot.Holders, now.shot.Expired) {
		here[idOf(h)] = true
		if h.State == pgxlock.StateLive {
			holders[lockID{h.Kind, h.Key}] = append(holders[lockID{h.Kind, h.Key}], h)
		}
	}
	for _, h := range before.shot.Expired {
		if !here[idOf(h)] && h.EvictedBy == "" {
			l := Loss{Holder: h}
			for _, next := range holders[lockID{h.Kind, h.Key}] {
				if !next.Since.Before(h.Expires) { // others may share it
					l.Next = next.ID
				}
			}
			found = append(found, l)
		}
	}
	if now.shot.At.Sub(before.shot.At) > nearby {
		return found
	}
	waited := make(map[lockID]bool)
	for _, w := range before.shot.Waiters {
		waited[lockID{w.Kind, w.Key}] = true
	}
	for _, h := range before.shot.Holders {
		id := lockID{h.Kind, h.Key}
		// Renewals keep two thirds of the TTL. One that had less left, and whose waiter got
		// the lease when it would have ended, was not renewed.
		if here[idOf(h)] || !waited[id] || h.Expires.IsZero() || h.EvictedBy != "" || h.Expires.Sub(before.shot.At) >= before.ttl(h)/3 {
			continue
		}
		for _, next := range holders[id] {
			if late := next.Since.Sub(h.Expires); late >= 0 && late < wakeDelay {
				found = append(found, Loss{h, next.ID})
				break
			}
		}
	}
	return found
}
