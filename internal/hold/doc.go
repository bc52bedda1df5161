// Package hold keeps I2: a holder believes that it has its lock exactly for as long as no
// other can have it.
//
// A Hold is one acquisition, from the try to its end:
//
//	          Granted, then Admit             Renewed moves the deadline
//	tried ───────────────────────▶ held ◀──────────────────────────┐
//	  │                             │  └────────────────────────────┘
//	  │ refused, or late            ├── deadline passed, or Lose ──▶ ended: lost
//	  ▼                             └── End ────────────────────────▶ ended: released or closed
//	nothing: Backend.Discard
//	removes what may be left
//
// A Hold that has ended stays so, with the same error. Every method that answers whether it
// is held reads the clock first. The timer of the Group is there for callers that call no
// method.
//
// Backends (leases, advisory locks, locks in memory) make holds and implement [Backend].
//
// Lock order: Hold.mu, then the Group's, the Owner's and the Backend's. Contexts end after
// Hold.mu is unlocked, because that runs code of callers.
package hold
