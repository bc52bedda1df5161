// Package pgxlock is a distributed lock for programs that already have a
// PostgreSQL database.
//
// What one transaction writes is locked inside it: [LockTx] locks a key until the
// transaction ends, [ClaimTx] makes one committed transaction the only one.
//
// For what takes longer, a [Locker] hands out [Lock] values; a Lock is one
// acquisition. [NewLeaseLocker] returns a Locker whose locks are leases: rows in the
// table distributed_locks that expire unless they are renewed, which the Locker
// does. [NewAdvisoryLocker] returns one whose locks are advisory locks of one session:
// faster, free at once when the process dies, and gone with the session.
//
// Package once, beside this one, runs a job once in each period, whichever process comes
// first.
//
// SQL callers of lock_tx, claim_once, start_run, acquire_lock, acquire_shared_lock and release_lock, in any
// language, take the same locks. The package migrations, or the command pgxlock,
// installs them; LockTx and NewAdvisoryLocker need nothing installed.
//
// # What excludes what
//
// A lease and an advisory lock of the same key do not exclude each other. Leases are taken
// by [NewLeaseLocker] and acquire_lock, also as permits and shares; advisory locks by
// [NewAdvisoryLocker], [LockTx], lock_tx and pg_advisory_lock. Programs that lock one thing must
// use the same kind. Claims, runs and limits exclude nothing but their like.
//
// # Which call for which job
//
//	lock what this transaction writes          LockTx, LockAllTx, LockSQLTx
//	do a thing once                            ClaimTx, ClaimSQLTx
//	do a job once a day, or for each tick      package once: Do, Run, DoAt
//	skip if somebody else is on it             Locker.TryDo
//	wait, then work                            Locker.Do
//	hold a lock beyond one function            Locker.Acquire, Lock.Release
//	lock many keys, all or none                Locker.AcquireAll
//	let readers in together, writers alone     the option Shared
//	lock very often; what numbers name         NewAdvisoryLocker; RawKey, RawKey2
//	have leases beside a *sql.DB               NewLeaseLocker, with a pgxpool.Pool beside it
//	one process of many does it                Locker.Lead
//	let in a few at a time                     Locker.Semaphore
//	limit how often a thing happens            package ratelimit
//	see whether locks can be trusted here      package doctor
//	measure and trace what locks do            LeaseConfig.Observe, AdvisoryConfig.Observe
//	test a program that locks                  NewMemoryLocker, once.NewMemory, ratelimit.NewMemory
//	make writes that a late holder cannot      Locker.DoTx; Lock.Fence or Lock.FenceSQL, in the writing transaction
//	protect something outside the database     Lock.Token, refused there if a greater was seen
//
// # What is guaranteed
//
// Between the grant of a lock and its local deadline nobody else is granted it,
// as long as the server's clock does not gain more than the margin on ours
// within one TTL. The deadline moves with every renewal. Three things end a lock
// earlier: the end of an advisory lock's session, [Monitor.Evict], and a failover that
// loses the grant. Check [Lock.Context] or [Lock.Err]: both read the clock.
//
// No program can rule out that it freezes between that check and its next line.
// [Lock.Fence] makes that harmless: either it fails, or nobody is granted the lock
// until the transaction has ended. Fencing tokens do the same for resources that
// compare them.
//
// # What happens when
//
//	a transaction ends in any way      its LockTx locks are free; its claims stand
//	                                   if it has committed
//	this process dies                  others get its leases after their TTL, its
//	                                   advisory locks when the server sees it; a run
//	                                   of package once is not started again, with Retry
//	                                   after the TTL
//	this process is frozen             others get all after the TTL; it finds out at
//	                                   its first look
//	the network is cut                 Lost before the TTL is over; others after it
//	the server restarts or crashes     leases stand; renewals go on when it is back;
//	                                   advisory locks are lost, and Lost fires
//	a standby is promoted              leases stand if their commits were replicated;
//	                                   tokens grow in any case; advisory locks are lost
//	a call ends with its context       nothing is held; what was granted meanwhile is
//	                                   given back
//	Release cannot reach the server    the lease runs out after its TTL; the session
//	                                   lock is gone with its session
//	Close                              contexts end, Do is waited for, locks released
//
// # Errors
//
// An error is an [*Error] that wraps one of the package's sentinels, or the error of the
// server or the network, or says which argument is wrong. What a callback returns, of
// [Locker.Do], [Locker.DoTx] or once.Runner.Do, comes back as it is, joined with an [*Error] where
// the lock was lost. A server that cannot be reached is never reported as a busy lock.
//
//	try again later                    ErrNotAcquired, ErrLimited, ErrUnavailable
//	begin the transaction again        ErrStaleSnapshot; SQLSTATE 40001 and 40P01
//	release what you hold, try again   ErrDeadlock of nested waits
//	do the work anew, under a new lock ErrLost
//	change something first             any other
//
// A nil context, and a method that is called on a nil pointer, are such wrong
// arguments; nothing was done then, but [Lock.Release] releases without a context,
// too. A nil [Lock] is not held: its Err says so, its Lost is closed, and the context
// of its Context has ended. Other methods without an error return zero values.
package pgxlock
