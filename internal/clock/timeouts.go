package clock

import "time"

// The times by which the rooms wait for each other and for the server.
const (
	// WakeTimeout is how long a woken waiter may take before the next one is woken. A lock that
	// is left to the waiters of other processes is left to them for so long. In SQL,
	// pgxlock_wake_timed_out() knows the same time.
	WakeTimeout = 250 * time.Millisecond

	// CheckInterval is about how often a waiter checks whether it must go on waiting, and each
	// Locker whether its first waiters should try, although nobody has woken them.
	CheckInterval = time.Second

	// MaxReconnectDelay bounds the pause before the session of advisory locks connects again.
	// Backoff is meant for busy keys, and callers that wait for a connection wait for no holder.
	MaxReconnectDelay = time.Second

	// MaxListenDelay bounds the pause before the listener connects again. Waiters poll meanwhile.
	MaxListenDelay = 30 * time.Second
)
