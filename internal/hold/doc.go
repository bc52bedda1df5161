// Package hold keeps I2 of docs/design.md: a holder stops believing that it has its lock before
// the server's expiry, by a margin, or as soon as it is told that it has lost the lock.
//
// A Hold is one acquisition, from the try to its end:
//
//	          Granted, then Admit             Renewed and Changed move the deadline
//	tried ───────────────────────▶ held ◀──────────────────────────┐
//	  │                             │  └────────────────────────────┘
//	  ├── refused: nothing is left  ├── deadline passed, or Lose ──▶ ended: lost
//	  ├── late, or the caller left  └── End ────────────────────────▶ ended: released or closed
//	  │   before the answer: the backend releases it
//	  └── lost before Admit: its caller releases it
//
// A Hold that has ended stays so, with the same error. Err, and Err of its contexts, read the
// clock first; Lost and Ended report what is known already. The Group's timer ends the holds
// whose callers only wait for Done or Lost.
//
// Backends (leases, advisory locks, locks in memory) make holds and implement [Backend].
//
// Lock order of all rooms, outermost first: the mutexes of the leaders' terms and those that a
// backend holds while it sends (Table.requesting, then Table.sharing); Hold.mu; one of the
// Group's, the Owner's (that of events) or the Backend's (Locks.mu, renewer.mu, Table.mu); then
// Queue.mu; last mux.mu, listener.mu and those of sessions and batchers. Only package memory
// locks a hold under its own mutex, before anybody else knows the hold. Contexts end after
// Hold.mu is unlocked, because that runs code of callers.
package hold
