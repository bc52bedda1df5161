package lease

import (
	"slices"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockkey"
)

// A leftover is a lease that is being released although no caller has it: its grant came
// after its caller had left, its outcome was unknown, or it was lost. It must not look
// busy to callers of its own Locker: a request that it may have refused waits until the
// server has answered the release, and then asks again.
type leftover struct {
	name      lockkey.Name // the wait name of the lease
	holder    string
	over      bool       // the server has answered
	forgotten bool       // it is not among the Locker's leftovers any more
	behind    []*request // requests that wait for that answer
}

// addLeftover records a leftover. Call it before the answer to any request is processed that
// the lease may have refused.
func (t *Table) addLeftover(lock *hold.Hold) *leftover {
	left := &leftover{name: lock.Queue, holder: lock.Holder}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leftovers[left.name] = append(t.leftovers[left.name], left)
	return left
}

// endLeftover sends the requests behind a leftover again. If the server has refused the release
// because a transaction has the row locked, it refuses them now: a try does not wait for
// transactions.
func (t *Table) endLeftover(left *leftover) {
	if left == nil {
		return
	}
	t.mu.Lock()
	behind := left.behind
	left.behind = nil
	if !left.over {
		left.over = true
		t.returned = append(t.returned, left)
	}
	t.mu.Unlock()
	t.flow.ask(false, behind...)
}

// forgetReturned removes the leftovers that are over. Call it before a batch of requests is
// sent: until then a leftover that is over may have refused a request of the last batch.
func (t *Table) forgetReturned() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, left := range t.returned {
		if left.forgotten {
			continue // removed with another leftover of its name: a semaphore may have thousands
		}
		rest := slices.DeleteFunc(t.leftovers[left.name], func(l *leftover) bool {
			l.forgotten = l.over
			return l.over
		})
		if len(rest) == 0 {
			delete(t.leftovers, left.name)
		} else {
			t.leftovers[left.name] = rest
		}
	}
	t.returned = nil
}

// retryBehindLeftover sends a refused request again if a leftover with that holder refused it,
// and reports whether it does. For shared leases and permits the holder in the way is not
// known: then it sends the request again a bounded number of times.
func (t *Table) retryBehindLeftover(r *request, holder string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := r.permits == 0 && holder != SharedHolder
	var found *leftover
	for _, left := range t.leftovers[r.lock.Queue] {
		if (!known || left.holder == holder) && (found == nil || found.over) {
			found = left
		}
	}
	if found == nil || !known && r.unsettled == maxUnsettled {
		return false
	}
	if !known {
		r.unsettled++
	}
	if found.over {
		t.flow.ask(false, r)
	} else {
		found.behind = append(found.behind, r)
	}
	return true
}
