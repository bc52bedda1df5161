package pgxlock

import (
	"time"

	"github.com/jackc/pgx/v5"
)

// The server's answer to a request for a lease, or for a permit, is settled here.

// grant is the answer.
type grant struct {
	acquired       bool
	token          *int64
	heldBy         *string
	remainingMS    *int64
	ahead          bool // somebody stands before it
	permit, others *int // of a semaphore: which one it is; how many others say there are
}

func toGrant(row pgx.CollectableRow) (g grant, err error) {
	into := []any{&g.acquired, &g.token, &g.heldBy, &g.remainingMS, &g.ahead, &g.permit, &g.others}
	return g, row.Scan(into[:len(row.FieldDescriptions())]...)
}

// settle answers the request, or asks again.
func (t *leaseTable) settle(r *leaseRequest, g grant, sent time.Duration) {
	if g.others != nil {
		t.notAsMany(r, *g.others)
	}
	if g.permit != nil {
		r.lock.key = permitKey(r.lock.queue, *g.permit)
		if r.unknown {
			t.discardPermits(r, *g.permit) // an earlier attempt may have been granted another one
		}
	}
	switch {
	case !g.acquired:
		busy := t.busy(r, g)
		if busy.soon && !g.ahead && t.askSoon(r) || t.standBehindLeftover(r, busy.holder) {
			return
		}
		if r.unknown {
			t.discardRequest(r) // it may be in our own way
		}
		r.Answer(busy)
	case !r.lock.granted(*g.token, sent, t.locker.now()):
		t.discard(r.lock)
		r.Answer(errLateGrant)
	case !r.Answer(nil):
		t.discard(r.lock)
	}
}

// busy is the error for a request that was refused.
func (t *leaseTable) busy(r *leaseRequest, g grant) *busyError {
	busy := &busyError{}
	if holder := g.heldBy; holder != nil && *holder != r.lock.holder {
		busy.holder = *holder
		busy.here = r.permits == 0 && t.has(*holder) // other processes may give back other permits
	}
	if ms := g.remainingMS; ms != nil {
		busy.remaining = time.Duration(*ms+1) * time.Millisecond // the server has told the whole ones
	}
	// Nobody has it alone: others stand before it, or are just changing the group.
	busy.soon = r.lock.mode == Shared && (busy.holder == "" || busy.holder == sharedHolder)
	return busy
}

// discardRequest gives back what may have been granted to a request.
func (t *leaseTable) discardRequest(r *leaseRequest) {
	if r.permits == 0 {
		t.discard(r.lock)
	}
	t.discardPermits(r, 0)
}

// discardPermits gives back what may have been granted to a request for a permit, it is
// not known which, but for one of them.
func (t *leaseTable) discardPermits(r *leaseRequest, but int) {
	for n := 1; n <= int(r.permits); n++ {
		if n == but {
			continue
		}
		lock := t.locker.newLock(permitKey(r.lock.queue, n), r.lock.holder, r.lock.ttl, r.lock.margin)
		lock.queue = r.lock.queue
		t.discard(lock)
	}
}

// notAsMany says that others use a semaphore with another number of permits.
func (t *leaseTable) notAsMany(r *leaseRequest, others int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.others[r.lock.queue] == others {
		return // it was said
	}
	if t.others == nil {
		t.others = make(map[string]int)
	}
	t.others[r.lock.queue] = others
	t.locker.log.Warn("pgxlock: a semaphore is used with different numbers of permits", "semaphore", semaphoreOf(r.lock.queue), "permits", int(r.permits), "others", others)
}
