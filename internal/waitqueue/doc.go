// Package waitqueue is the queue of the callers that wait: first come, first served within a
// Locker, and fairly between processes (I7). Of waits in a cycle it ends one. It grants
// nothing: a caller joins, tries, waits here, and tries again.
//
// A Waiter is one call:
//
//	        Join: others wait already
//	new ──────────────┬──────────────▶ queued ◀────────────────────────────┐
//	 │                │                  │ first, and woken or due          │
//	 │ nobody waits   │ Wait, Enqueue:   ▼                                  │ Wait: refused, or a
//	 ▼                │ the try failed  may try ── Turn, and the caller's try ┘ transient error
//	may try ── Turn, ─┘                  │
//	 and the caller's try                ├── Granted ──▶ out of the queue, with the lock
//	                                     └── Leave ────▶ out of the queue
//
// Wait ends early with the caller's context, with MaxWait, with its Locker, with a lock that
// the call or its context holds and loses, and with a deadlock.
//
// The callers of one Locker that wait for one lock are a local queue, whose first waiter alone
// tries. The local queue gets a ticket, a row in the queue of all processes, when its first
// waiter is refused by a holder elsewhere, when one of its callers holds other locks, or when
// other processes are known to wait:
//
//	            enter               answer
//	no ticket ────────▶ in flight ────────▶ published ── refresh, each second ──┐
//	    ▲                  │  ▲               │    ▲                            │
//	    │                  │  └───────────────│────┼────────────────────────────┘
//	    │                  │ no answer        │    └─ woken: the first waiter tries
//	    │                  ▼                  │
//	    │               unsent: it polls      │
//	    │                  │                  │ granted, or no waiter is left
//	    └──── removed ◀────┴──────────────────┘
//
// The next refresh sends an unsent ticket again. A ticket that is over and may still be in the
// table is void: a shared try waits until its removal was tried.
//
// The listener receives the notifications of other processes on a connection of its own. It
// runs while there is a ticket or a leader, and from the first lock session on; it ends after
// the pool's MaxConnIdleTime without any of them. While it cannot listen, waiters poll. Any role
// may send notifications: those that name no lock of this process take no mutex.
//
// Lock order: the mutexes of the backend and of the Leaders, then Queue.mu, then listener.mu
// and those of the batchers. No method of a Hold is called under Queue.mu. Package hold has the
// order of all rooms.
package waitqueue
