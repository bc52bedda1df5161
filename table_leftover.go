package pgxlock

import "slices"

// A leftover is a lease that is being released although no caller has it: its grant came
// after its caller had left, its outcome was unknown, or it was lost. It must not look
// busy to callers of its own Locker: a request that it may have refused waits until the
// server has answered the release, and then asks again.
type leftover struct {
	name      string // what callers wait for who want the lease
	holder    string
	over      bool            // the server has answered
	forgotten bool            // it is not among the Locker's leftovers any more
	behind    []*leaseRequest // wait for that
}

// addLeftover is called before the answer of any request that the lease may have refused
// is looked at.
func (t *leaseTable) addLeftover(lock *Lock) *leftover {
	left := &leftover{name: lock.queue, holder: lock.holder}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leftovers[left.name] = append(t.leftovers[left.name], left)
	return left
}

// endLeftover lets the requests behind a leftover ask again. If the server has refused
// the release, because a transaction has the row locked, they are refused then: a try
// does not wait for transactions.
func (t *leaseTable) endLeftover(left *leftover) {
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
	t.acquiring.Add(behind...)
}

// forgetReturned is called before a batch of requests is sent: until then a leftover that
// is over may have refused one of the last batch.
func (t *leaseTable) forgetReturned() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, left := range t.returned {
		if left.forgotten {
			continue // with another one of the name: a semaphore may have thousands
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

// standBehindLeftover reports whether a request that was refused asks again, because a
// leftover was in its way, which has that holder. Who of those who share a lease, or have
// the permits of a semaphore, was in the way is not known: for those it asks again a
// bounded number of times.
func (t *leaseTable) standBehindLeftover(r *leaseRequest, holder string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	known := r.permits == 0 && holder != sharedHolder
	var found *leftover
	for _, left := range t.leftovers[r.lock.queue] {
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
		t.acquiring.Add(r)
	} else {
		found.behind = append(found.behind, r)
	}
	return true
}
