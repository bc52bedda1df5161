// Package waitqueue is the queue of the callers that wait: first come, first served within a
// Locker, and fairly between processes (I7). It ends a wait that would never end, a deadlock. It
// grants nothing: a caller joins, tries, waits here, and tries again.
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
// The callers that wait for one lock in one process are a local queue, whose first waiter
// alone tries. Once it was refused by another process, the local queue has a ticket, a row in
// the queue of all processes:
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
// A ticket that is over stays void until its removal was tried.
//
// The listener receives the notifications of other processes on a connection of its own. It
// runs while there is a ticket, a leader or a lock session, and until none was needed for the
// pool's MaxConnIdleTime. While it cannot listen, waiters poll.
//
// Lock order: the mutexes of the backend and of the Leaders, then Queue.mu, then listener.mu
// and those of the batchers. A Hold is asked whether it is lost without Queue.mu.
package waitqueue
