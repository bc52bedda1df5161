package advisory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A request is one caller's request for some locks.
type request struct {
	call
	locks *Locks
	turn  int64 // its ticket
	slots []slot
	got   []hold.Attempt // a copy for each slot
	mode  hold.Mode

	// The request was refused only because of another caller's request for the same lock, so
	// that a second try may succeed. outdated: that request may have been refused before this
	// call began, or its lock was released or lost before this call could share it. leftover:
	// it was granted in another mode, and its caller has left.
	outdated, leftover bool

	oneAsk  [1]ask // most requests are for one lock: no allocation
	oneSlot [1]slot
	oneGot  [1]hold.Attempt
	room    entry // for the first lock that has none
}

// A slot is one lock of a request.
type slot struct {
	id      lockkey.ID
	entry   *entry // nil if the request was refused without asking the server
	token   int64  // of the grant
	granted bool   // by the server
	asks    bool   // it sends a request; otherwise it waits for the answer to an earlier one
}

// Try implements [hold.Backend].
func (a *Locks) Try(ctx context.Context, o hold.Request, attempts []hold.Attempt) {
	var behind []bool // waiters that a try for a shared lock must not pass
	if o.Mode == hold.Shared && o.Turn.SkipQueue {
		behind = a.waitedFor(ctx, attempts)
	}
	began := time.Now()
	for first := true; ; first = false {
		r := a.request(ctx, attempts, behind, o)
		again := r.leftover || first && r.outdated // a request that the second try meets was made during this call
		late := o.Turn.SkipQueue && time.Since(began) >= dbconn.Timeout
		if !again || late || r.why(ctx) != nil {
			return
		}
	}
}

// request tries once. behind says which of the locks others wait for; nil: none.
func (a *Locks) request(ctx context.Context, attempts []hold.Attempt, behind []bool, o hold.Request) (r *request) {
	r = &request{locks: a, mode: o.Mode, turn: o.Turn.Ticket}
	r.asker, r.closing, r.brief = r, a.host.Closing.Done(), o.Turn.SkipQueue
	r.asks, r.slots, r.got = r.oneAsk[:0], r.oneSlot[:0], r.oneGot[:0]
	for _, attempt := range attempts {
		h := attempt.Hold
		h.TTL, h.Margin = a.ttl, a.margin
		r.slots = append(r.slots, slot{id: h.Queue.ID})
		r.got = append(r.got, hold.Attempt{Hold: h})
	}
	a.mu.Lock()
	asking := false
	for i := range r.slots {
		s := &r.slots[i]
		if behind != nil && behind[i] {
			r.got[i].Err = &hold.Busy{}
			continue
		}
		if s.entry, r.got[i].Err = a.reserveLocked(r, s.id, o); s.entry == nil {
			continue
		}
		asking = true
		if s.asks = s.entry.pending == 1 && !s.entry.granted; s.asks {
			r.asks = append(r.asks, s.entry.try())
		} else if s.entry.granted {
			r.bound = true
		}
	}
	answered := true
	if asking {
		leads := a.mux.submit(ctx, &r.call)
		a.mu.Unlock()
		answered = a.mux.await(&r.call, leads)
	} else {
		a.mu.Unlock()
	}
	for i := range attempts {
		switch {
		case answered:
			attempts[i].Err = r.got[i].Err
		case r.slots[i].entry == nil:
			attempts[i].Err = r.got[i].Err
		default:
			attempts[i].Err = a.attempts.Explain(r.why(ctx))
		}
	}
	if !answered {
		return &request{} // the leader still writes to r
	}
	return r
}

// reserveLocked enters a request for a lock, or returns why it is refused. The caller keeps
// a.mu until the request is in the mux's queue. So the release of a lock always comes before
// the next try for it, and a try before the calls that wait for its answer. Until that answer
// the key is not busy: no server has said so.
func (a *Locks) reserveLocked(r *request, id lockkey.ID, o hold.Request) (*entry, error) {
	e := a.held[id]
	switch {
	case e == nil && !o.Turn.Passes() && a.yielded.last(id):
		return nil, &hold.Busy{Left: true}
	case e == nil:
		if len(a.held) >= a.room {
			return nil, fmt.Errorf("%w: %d; release some, or raise AdvisoryConfig.MaxLocks within the server's max_locks_per_transaction", lockerr.ErrMaxLocks, a.room)
		}
		if e = &r.room; e.holds != nil {
			e = new(entry)
		}
		e.id, e.mode, e.holds = id, o.Mode, e.one[:0]
		a.held[id] = e
		a.known.Add(id) // before the server can grant it
	case e.granted && (len(e.holds) > 0 && !e.admits(o.Mode) || e.wanted && !o.Turn.Passes()): // an entry without holds is about to be released
		return nil, a.busyLocked(e) // waiters for a shared lock want it exclusively: later readers come after them
	}
	e.pending++
	return e, nil
}

// busyLocked is the error for a lock that this process has.
func (a *Locks) busyLocked(e *entry) error {
	return &hold.Busy{Holder: a.holder, Here: true, Wanted: e.wanted}
}

// answered processes the answer to a request.
func (r *request) answered(left bool, now instant) {
	a := r.locks
	answers, final := r.answers, false // final: a lock was granted, or refused here, so that a second try cannot help
	for i := range r.slots {
		s, got := &r.slots[i], &r.got[i]
		if s.asks && r.err == nil {
			s.granted, s.token = answers[0].granted, answers[0].token
			answers = answers[1:]
		}
		switch {
		case s.entry == nil:
			final = true
		case r.err != nil:
			got.Err = r.err
		case !got.Hold.Granted(0, r.sent, now.clock): // the token is the hold's
			got.Err = hold.ErrLateGrant
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range r.slots {
		s, got := &r.slots[i], &r.got[i]
		if s.entry == nil {
			continue
		}
		e := s.entry
		e.pending--
		if s.asks {
			e.granted, e.token = s.granted, s.token
		}
		if s.asks && !s.granted {
			a.dropLocked(e.id) // calls that wait for this answer see that it was not granted
			e.failed = r.err
		}
		switch {
		case got.Err != nil:
		case !e.granted:
			got.Err = cmp.Or(e.failed, error(&hold.Busy{}))
			r.outdated = r.outdated || !s.asks
		case !e.admits(r.mode):
			got.Err = a.busyLocked(e)
			r.leftover = r.leftover || len(e.holds) == 0
		case !left:
			got.Hold.Token, got.Hold.Holder, got.Hold.Since = e.token, a.holder, now.day
			e.holds = append(e.holds, got.Hold)
			final = true
			// Others compete for it. Until their notification arrives, callers here would acquire it again
			// and again: so it is wanted from the start. Readers without a ticket come with others.
			e.wanted = e.wanted || (r.turn > 0 || e.mode == hold.Exclusive) && a.host.Queue.Contended(lockkey.Name{ID: e.id})
		}
		if e.granted && e.unused() {
			a.mux.do(a.removeLocked(e))
		}
	}
	r.outdated = r.outdated || r.bound && errors.Is(r.err, lockerr.ErrSessionEnded)
	if final {
		r.outdated, r.leftover = false, false
	}
}
