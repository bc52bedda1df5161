package lease

import (
	"fmt"
	"slices"
	"time"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// The server's answer to a request for a lease, or for a permit, is settled here.

// grant is the answer.
type grant struct {
	acquired    bool
	token       int64
	heldBy      string // of a refusal; "": not known
	remainingMS int64  // until the holder's lease expires; negative: not known
	ahead       bool   // other waiters come first
	permit      int    // of a semaphore: the granted permit, or 0
	others      int    // of a semaphore: how many permits other callers use, if it is another number; else 0
}

// readGrants reads the answer of acquire.sql, or of a variant, to n requests: an array for each
// column, of which all but the tokens may be NULL; single: an element for each.
func readGrants(values [][]byte, n int, single bool) ([]grant, error) {
	var columns [6]dbconn.Array
	if single && len(values) != 4 {
		return nil, fmt.Errorf("%w: the answer to a request", dbconn.ErrForeign)
	}
	for i, value := range values {
		if single {
			columns[i] = dbconn.SingleElement(value)
			continue
		}
		elements, length, err := dbconn.ReadArray(value)
		if err != nil || i == len(columns) || length != n && (i == 0 || value != nil) {
			return nil, fmt.Errorf("%w: the arrays of the answer to %d requests", dbconn.ErrForeign, n)
		}
		columns[i] = elements
	}
	grants := make([]grant, n)
	for i := range grants {
		g := &grants[i]
		g.token, g.acquired = dbconn.Integer(columns[0].Next())
		if heldBy := columns[1].Next(); !g.acquired {
			g.heldBy = string(heldBy)
		}
		if ms, known := dbconn.Integer(columns[2].Next()); known {
			g.remainingMS = ms
		} else {
			g.remainingMS = -1
		}
		ahead, _ := dbconn.Integer(columns[3].Next())
		permit, _ := dbconn.Integer(columns[4].Next())
		others, _ := dbconn.Integer(columns[5].Next())
		g.ahead, g.permit, g.others = ahead == 1, int(permit), int(others)
	}
	return grants, nil
}

// settle answers the request, or sends it again. There is a grant for each of its holds: all of them
// are acquired, or none.
func (t *Table) settle(r *request, grants []grant, sent time.Duration) {
	g := grants[0]
	if g.others != 0 {
		t.notAsMany(r, g.others)
	}
	if g.permit != 0 {
		for i, lock := range r.holds() {
			lock.Key = lockkey.Permit(lock.Queue.Key, grants[i].permit)
		}
		if r.unknown {
			t.discardPermits(r, grants) // an earlier attempt may have been granted others
		}
	}
	switch {
	case !g.acquired:
		busy := t.busy(r, g)
		if busy.Soon && !g.ahead && t.askSoon(r) || t.retryBehindLeftover(r, busy.Holder) {
			return
		}
		if r.unknown {
			t.discardRequest(r) // an earlier grant to this request may block it
		}
		r.Answer(busy)
	case !t.granted(r, grants, sent):
		t.discardGranted(r)
		r.Answer(hold.ErrLateGrant)
	case !r.Answer(nil):
		t.discardGranted(r)
	}
}

// granted records the grants, and returns false if one of them came too late.
func (t *Table) granted(r *request, grants []grant, sent time.Duration) bool {
	now, all := t.host.Clock(), true
	for i, lock := range r.holds() {
		all = lock.Granted(grants[i].token, sent, now) && all
	}
	return all
}

// discardGranted releases what was granted to a request.
func (t *Table) discardGranted(r *request) {
	for _, lock := range r.holds() {
		t.Discard(lock)
	}
}

// busy is the error for a request that was refused.
func (t *Table) busy(r *request, g grant) *hold.Busy {
	busy := &hold.Busy{}
	if g.heldBy != r.lock.Holder {
		busy.Holder = g.heldBy
		busy.Here = r.permits == 0 && t.has(g.heldBy) // other processes may release other permits
	}
	if g.remainingMS >= 0 {
		busy.Remaining = time.Duration(g.remainingMS+1) * time.Millisecond // the answer is in whole milliseconds
	}
	// No holder excludes this request: waiters come first, or another caller is just joining or
	// leaving the group.
	busy.Soon = r.lock.Mode == hold.Shared && (busy.Holder == "" || busy.Holder == SharedHolder)
	return busy
}

// discardRequest releases what may have been granted to a request.
func (t *Table) discardRequest(r *request) {
	if r.permits == 0 {
		t.Discard(r.lock)
	}
	t.discardPermits(r, nil)
}

// discardPermits releases the permits that may have been granted to a request, except some. It
// is not known which of them were.
func (t *Table) discardPermits(r *request, but []grant) {
	for n := 1; n <= r.permits; n++ {
		if slices.ContainsFunc(but, func(g grant) bool { return g.permit == n }) {
			continue
		}
		t.Discard(&hold.Hold{Key: lockkey.Permit(r.lock.Queue.Key, n), Queue: r.lock.Queue, Holder: r.lock.Holder, TTL: r.lock.TTL})
	}
}

// notAsMany logs that other callers use a semaphore with another number of permits.
func (t *Table) notAsMany(r *request, others int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.others[r.lock.Queue.Key] == others {
		return // it was logged
	}
	if t.others == nil {
		t.others = make(map[string]int)
	}
	t.others[r.lock.Queue.Key] = others
	t.host.Log.Warn("pgxlock: a semaphore is used with different numbers of permits", "semaphore", lockkey.Semaphore(r.lock.Queue.Key), "permits", r.permits, "others", others)
}
