// Package monitor shows the locks of a database, of all processes that use it, and takes
// locks away from their holders. It is for people and for programs that supervise others;
// a program that only locks does not need it.
//
//	show everything, once or again and again   Monitor.Snapshot, Monitor.Watch
//	show some                                  Monitor.Holders, Monitor.Expired, Monitor.Waiters
//	show which holder blocks which waiter      Snapshot.Waits
//	take a lock away, end a session            Monitor.Evict, Monitor.Terminate
//	remove expired leases                      Monitor.Reap
//
// The package imports package pgxlock, as packages once and ratelimit do, and is not imported
// by it: a holder has a [pgxlock.Kind] and a [pgxlock.Mode], errors are [pgxlock.Error], and
// events are [pgxlock.Event]. For the same reason the type of a holder is [pgxlock.Holder]:
// [pgxlock.Locker.Holders] returns it, too.
//
// Each call takes one connection of the pool and runs one statement after the other, each in
// a transaction of its own: nothing is locked from one to the next, so that an answer may
// mix two moments. A Monitor keeps no state between calls and has no mutex.
package monitor
