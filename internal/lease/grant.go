package lease

import (
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// The server's answer to a request for a lease, or for a permit, is settled here.

// grant is the answer.
type grant struct {
	token          *int64 // nil: refused
	heldBy         *string
	remainingMS    *int64
	ahead          bool // other waiters come first
	permit, others *int // of a semaphore: the granted permit; the number of permits that other callers use
}

// toGrants reads the answer of acquire.sql, or of a variant: an array for each column, with an
// element for each request. All but the tokens may be NULL.
func toGrants(row pgx.CollectableRow) ([]grant, error) {
	var tokens, remainingMS []*int64
	var heldBy []*string
	var ahead []bool
	var permits, others []*int
	into := []any{&tokens, &heldBy, &remainingMS, &ahead, &permits, &others}
	err := row.Scan(into[:len(row.FieldDescriptions())]...)
	grants := make([]grant, len(tokens))
	for i, token := range tokens {
		grants[i] = grant{token: token, heldBy: at(heldBy, i), remainingMS: at(remainingMS, i), ahead: at(ahead, i), permit: at(permits, i), others: at(others, i)}
	}
	return grants, err
}

// at returns the element, or zero if there is none.
func at[E any](elements []E, i int) (e E) {
	if i < len(elements) {
		e = elements[i]
	}
	return e
}

// settle answers the request, or sends it again.
func (t *Table) settle(r *request, g grant, sent time.Duration) {
	if g.others != nil {
		t.notAsMany(r, *g.others)
	}
	if g.permit != nil {
		r.lock.Key = lockkey.Permit(r.lock.Queue.Key, *g.permit)
		if r.unknown {
			t.discardPermits(r, *g.permit) // an earlier attempt may have been granted another one
		}
	}
	switch {
	case g.token == nil:
		busy := t.busy(r, g)
		if busy.Soon && !g.ahead && t.askSoon(r) || t.standBehindLeftover(r, busy.Holder) {
			return
		}
		if r.unknown {
			t.discardRequest(r) // an earlier grant to this request may block it
		}
		r.Answer(busy)
	case !r.lock.Granted(*g.token, sent, t.host.Clock()):
		t.Discard(r.lock)
		r.Answer(hold.ErrLateGrant)
	case !r.Answer(nil):
		t.Discard(r.lock)
	}
}

// busy is the error for a request that was refused.
func (t *Table) busy(r *request, g grant) *hold.Busy {
	busy := &hold.Busy{}
	if holder := g.heldBy; holder != nil && *holder != r.lock.Holder {
		busy.Holder = *holder
		busy.Here = r.permits == 0 && t.has(*holder) // other processes may release other permits
	}
	if ms := g.remainingMS; ms != nil {
		busy.Remaining = time.Duration(*ms+1) * time.Millisecond // the answer is in whole milliseconds
	}
	// No holder excludes this request: waiters come first, or another caller is just joining or
	// leaving the group.
	busy.Soon = r.lock.Mode == hold.Shared && (busy.Holder == "" || busy.Holder == sharedHolder)
	return busy
}

// discardRequest releases what may have been granted to a request.
func (t *Table) discardRequest(r *request) {
	if r.permits == 0 {
		t.Discard(r.lock)
	}
	t.discardPermits(r, 0)
}

// discardPermits releases the permits that may have been granted to a request, except one. It
// is not known which of them was.
func (t *Table) discardPermits(r *request, but int) {
	for n := 1; n <= r.permits; n++ {
		if n == but {
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
