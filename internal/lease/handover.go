package lease

// Where callers here wait for a lease, and it is still their turn, the one that releases it leaves that
// to the next one: its try is one statement, and one commit, for both.

// leave leaves a release to the caller that is next, and reports whether there is one.
func (t *Table) leave(r *release) bool {
	r.handed = true // before another goroutine may have it
	if r.token != nil && t.host.Queue.HandOver(r.lock.Queue, r) {
		return true
	}
	r.handed = false
	return false
}

// Return implements [hold.Release].
func (r *release) Return() {
	r.handed = false
	go r.table.flow.release(r)
}

// returnRelease gives a release back that the request was to finish.
func (r *request) returnRelease() {
	if r.from != nil {
		r.from.Return()
		r.from = nil
	}
}

// releaseFor releases what was left to requests in one batch, before they are sent.
func (t *Table) releaseFor(requests []*request) {
	var returns []*release
	for _, r := range requests {
		returns = append(returns, r.from)
		r.from = nil
	}
	t.releaseAll(returns)
	for _, r := range returns {
		select {
		case <-r.done:
		default: // there is no connection: it goes with the next one, perhaps after the requests
			r.handed = false
		}
	}
}
