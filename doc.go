// Package pgxlock provides distributed locks for programs that already have a PostgreSQL
// database.
//
//	locks, err := pgxlock.NewLeaseLocker(pool, nil) // one for the program
//
//	err = locks.Do(ctx, "report:daily", func(ctx context.Context, lock *pgxlock.Lock) error {
//		return buildReport(ctx) // ctx ends if the lock is lost
//	})
//
// The package needs nothing beside the database. Callers in SQL, in any language, take the
// same locks with lock_tx, claim_once, start_run, acquire_lock, acquire_shared_lock and
// release_lock. The package migrations, or the command pgxlock, installs these functions and
// the tables. [LockTx] and [NewAdvisoryLocker] need nothing installed.
//
// # Kinds of locks
//
// A transaction lock ends with the caller's transaction: there is nothing to release and nothing
// to lose. [LockTx] takes one: use it when one transaction does all the work. [ClaimTx] is for
// work that must be done once: exactly one transaction commits the claim of a key.
//
// A lease is a row in the table distributed_locks that expires unless it is renewed.
// [NewLeaseLocker] returns a [Locker] for leases, which renews them. Use a lease for work that
// takes longer than a transaction. It survives a crash of the server. When the holder's process
// dies, others get the lease after its TTL.
//
// An advisory lock belongs to a session of the server. [NewAdvisoryLocker] returns a Locker for
// advisory locks, the fastest kind. They end with their session: when the server notices that
// the process has died, but also when the server restarts.
//
// A lease and an advisory lock of the same key do not exclude each other: programs that
// protect one thing must use the same kind. Permits of a [Semaphore] and shared leases are
// leases. [LockTx], lock_tx and pg_advisory_lock take advisory locks. Claims, runs of package
// once and limits of package ratelimit exclude only their own kind.
//
// # Choosing a call
//
//	lock what one transaction writes           LockTx, LockAllTx, LockSQLTx
//	do a thing only once                       ClaimTx, ClaimSQLTx
//	answer a request that may be repeated      AnswerTx, AnswerSQLTx
//	do a job once a day, or once per tick      package once: Do, Run, DoAt
//	skip the work if another process does it   Locker.TryDo
//	wait, then work                            Locker.Do
//	write only while the lock is held          Locker.DoTx; Lock.Fence, Lock.FenceSQL
//	hold a lock beyond one function            Locker.Acquire, Lock.Release
//	lock many keys, all or none                Locker.AcquireAll
//	let readers in together, writers alone     the option Shared
//	lock very often                            NewAdvisoryLocker
//	lock by number instead of name             RawKey, RawKey2
//	use leases beside a *sql.DB                NewLeaseLocker, with a pgxpool.Pool beside it
//	elect one leader                           Locker.Lead
//	let in a few at a time                     Locker.Semaphore
//	limit a rate                               package ratelimit
//	protect something outside the database     Lock.Token
//	check that a database is safe for locks    package doctor
//	show locks, and take them away             package monitor
//	build metrics and traces                   Event, and Observe in each config
//	test a program that locks                  NewMemoryLocker, package locktesting; once.NewMemory, ratelimit.NewMemory
//
// # The life of a lock
//
// A [Lock] is one acquisition. It is held from the grant until [Lock.Release], until its
// Locker is closed, or until it is lost. [Locker.Do] acquires, calls a function and releases;
// most callers should use it.
//
// The Locker renews its locks, and each renewal moves the lock's local deadline,
// [Lock.Deadline]. If it passes, the lock is lost. The deadline is a margin earlier than the server's:
// before it nobody else is granted the lock, as long as the server's clock gains no more than
// the margin on the local clock within one TTL. Three things end a lock before its deadline:
// the end of an advisory lock's session, an eviction (package monitor), and a failover that
// loses the grant.
//
// When a lock is lost, the context from [Lock.Context] ends, [Lock.Lost] is closed, and
// [Lock.Err] returns an error that matches [ErrLost]. Lock.Err, [Lock.Renew], [Lock.Fence] and
// Err of the context read the clock, so they are right even on the first line after the process
// was frozen. docs/guarantees.md has what becomes of a lock when a process, the network or the
// server fails.
//
// # Fencing
//
// A process can freeze after it has checked its lock and before it writes. When it goes on,
// another process may hold the lock. No timeout prevents this. Fencing refuses the late write.
//
// For writes to the same database, call [Lock.Fence] at the beginning of the transaction that
// writes, or use [Locker.DoTx], which does it. Either Fence fails, or nobody is granted the
// lock until the transaction has ended, whatever clocks, pauses and networks do.
//
// For writes elsewhere, send [Lock.Token] along. The token grows with every acquisition of a
// key. The resource remembers the greatest token it has seen and refuses smaller ones.
//
// Advisory locks have tokens and fences only with [AdvisoryConfig.Tokens]. Transaction locks
// need neither, because the lock and the writes end together.
//
// # Waiting
//
// [Locker.Acquire] waits until ctx ends; the option [MaxWait] bounds the wait alone. Waiters
// are served first come, first served within a Locker, and fairly between processes. A waiter
// does not occupy a connection or a transaction. The holder's release wakes the next waiter.
// Where notifications do not arrive, waiters poll at the pace of Backoff.
//
// If a caller waits while it holds another lock, it must pass the context of that lock. Then a
// cycle of waits, also between processes, ends with [ErrDeadlock] for one of the callers.
//
// # Errors
//
// Every error is an [*Error]. It wraps one of the package's sentinels, or the error of the
// server or the network, or says which argument is wrong. The exception is the error of a
// callback, for example of [Locker.Do]: it is returned unchanged, joined with an [*Error] if
// the lock was lost. A server that cannot be reached is never reported as a
// busy lock.
//
//	try again later                    ErrNotAcquired, ErrUnavailable; ratelimit.ErrLimited
//	begin the transaction again        ErrStaleSnapshot; SQLSTATE 40001 and 40P01
//	release your locks and try again   ErrDeadlock from a cycle of waits
//	repeat the work under a new lock   ErrLost
//	change something first             any other
//
// A nil context and a nil receiver are wrong arguments: the call does nothing and returns an
// error, but [Lock.Release] needs no context. A nil [Lock] is not held: its Err says so, its
// Lost is closed, and the context from its Context has ended. Other methods without an error
// return zero values.
//
// # Connections
//
// A Locker takes only the configuration from its pool, and opens few connections of its own, at
// its first use, so that a busy pool delays no renewal. One Locker serves a whole program and
// any number of keys. LockTx, ClaimTx and [Lock.Fence] use the caller's transaction, and
// package monitor uses connections of the pool.
package pgxlock
