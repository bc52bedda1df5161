package serve

import (
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/monitor"
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
	waited := make(map[monitor.LockID]bool)
	for _, w := range before.shot.Waiters {
		waited[w.Lock()] = true
	}
	// Renewals keep two thirds of the TTL. One that had less left, and whose waiter got the lease
	// when it would have ended, was not renewed.
	late := func(h *pgxlock.Holder) bool {
		return len(waited) > 0 && waited[monitor.LockOf(h)] && !h.Expires.IsZero() && h.Expires.Sub(before.shot.At) < before.ttl(h)/3
	}
	missed := make(map[monitor.HoldID]*pgxlock.Holder) // what may be lost, unless it is found below
	locks := make(map[monitor.LockID]bool)
	var candidates []*pgxlock.Holder
	add := func(h *pgxlock.Holder) {
		candidates, missed[monitor.HoldOf(h)], locks[monitor.LockOf(h)] = append(candidates, h), h, true
	}
	for i := range before.shot.Expired {
		if h := &before.shot.Expired[i]; h.EvictedBy == "" {
			add(h)
		}
	}
	expired := len(candidates)
	if now.shot.At.Sub(before.shot.At) <= nearby {
		for i := range before.shot.Holders {
			if h := &before.shot.Holders[i]; h.EvictedBy == "" && late(h) {
				add(h)
			}
		}
	}
	if len(candidates) == 0 {
		return nil
	}
	holders := make(map[monitor.LockID][]*pgxlock.Holder)
	for _, list := range [][]pgxlock.Holder{now.shot.Holders, now.shot.Expired} {
		for i := range list {
			h := &list[i]
			if id := monitor.LockOf(h); locks[id] {
				delete(missed, monitor.HoldOf(h))
				if h.State == pgxlock.StateLive {
					holders[id] = append(holders[id], h)
				}
			}
		}
	}
	for i, h := range candidates {
		if missed[monitor.HoldOf(h)] == nil {
			continue
		}
		loss, taken := Loss{Holder: *h}, i < expired // one that was seen expired need not have been taken over
		for _, next := range holders[monitor.LockOf(h)] {
			since := next.Since.Sub(h.Expires)
			if i < expired && since >= 0 { // others may share it
				loss.Next = next.ID
			} else if i >= expired && since >= 0 && since < wakeDelay {
				loss.Next, taken = next.ID, true
				break
			}
		}
		if taken {
			found = append(found, loss)
		}
	}
	return found
}
