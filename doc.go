// Package pgxlock is a distributed lock for programs that already have a
// PostgreSQL database.
//
// A [Locker] hands out [Lock] values; a Lock is one acquisition. [NewLease]
// returns a Locker whose locks are leases: rows in the table distributed_locks
// that expire unless they are renewed, which the Locker does. SQL callers of
// acquire_lock and release_lock, in any language, take the same locks. The
// package migrations, or the command pgxlock, installs the table.
//
// # Which call for which job
//
//	skip if somebody else is on it             Locker.TryDo
//	wait, then work                            Locker.Do
//	hold a lock beyond one function            Locker.Acquire, Lock.Release
//	make writes that a late holder cannot      Lock.Fence, in the writing transaction
//	protect something outside the database     Lock.Token, refused there if a greater was seen
//
// # What is guaranteed
//
// Between the grant of a lock and its local deadline nobody else is granted it,
// as long as the server's clock does not gain more than the margin on ours
// within one TTL. The deadline moves with every renewal. Whatever runs under the
// lock learns of a loss from [Lock.Context] or [Lock.Err], which read the clock.
//
// No program can rule out that it freezes between that look and its next line.
// [Lock.Fence] makes that harmless: either it fails, or nobody is granted the lock
// until the transaction has ended. Fencing tokens do the same for resources that
// compare them.
//
// # What happens when
//
//	this process dies                  others get its locks after their TTL
//	this process is frozen             the same; it finds out at its first look
//	the network is cut                 Lost before the TTL is over; others after it
//	the server restarts or crashes     leases stand; renewals go on when it is back
//	a standby is promoted              leases stand if their commits were replicated;
//	                                   tokens grow in any case
//	a call ends with its context       nothing is held; what was granted meanwhile is
//	                                   given back
//	Release cannot reach the server    the lease runs out after its TTL
//	Close                              contexts end, Do is waited for, locks released
//
// # Errors
//
// Every error is an [*Error] that wraps one of the package's sentinels, or the
// error of the server or the network, or says which argument is wrong. A server
// that cannot be reached is never reported as a busy lock.
package pgxlock
